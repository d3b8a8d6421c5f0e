#!/bin/sh
# A site in three commands: a hospital that takes part with a table, an account of what it spends, and its own limits.
#
#     sh examples/site.sh                                      # on this machine, up to the second command
#     SUPERLINK=umbel.example.org:8000 sh examples/site.sh     # and the third, with a server's ca.crt and this site's key
#
# The first command makes the ledger, in which every release of a client is charged before it leaves.
# The second reads the policy and the data as the node would, says what they mean, and checks the way to the server.
# The third starts the node. It calls the server, so that the site opens no port to the outside.
set -e
FOLDER=${FOLDER:-$(mktemp -d)}
cd "$FOLDER"

if [ ! -e stays.csv ]; then # a table of made-up stays, and the schema that the researcher sends
    printf 'hospital,age,cost\n' > stays.csv
    for age in 30 45 60 75; do printf 'north,%d,%d\nsouth,%d,%d\n' $age $((age * 150)) $age $((age * 100)); done >> stays.csv
    cat > schema.toml << 'SCHEMA'
model = "linear inputs=1 outputs=1"
loss = "mse"
client = { name = "hospital", type = "text" }
target = { name = "cost", type = "number", unit = "dollars", minimum = 0, maximum = 50_000, scale = 10_000 }
features = [{ name = "age", type = "integer", minimum = 0, maximum = 120, scale = 20, offset = 50 }]
SCHEMA
fi
TABLE="data-path=\"$PWD/stays.csv\" reader=\"umbel.data.table:read schema=$PWD/schema.toml\""
POLICY="$TABLE ledger-path=\"$PWD/site.jsonl\" budget=4.0 max-choice-epsilon=1.0"

[ -e site.jsonl ] || umbel site journal --create "$PWD/site.jsonl"
[ -z "$SUPERLINK" ] || set -- --superlink "$SUPERLINK" --root-certificates ca.crt --auth-supernode-private-key site-1
umbel site check "$POLICY" "$@"
[ -n "$SUPERLINK" ] || exit 0
umbel site start "$@" --node-config "$POLICY"
