PRAGMA application_id = 1431126604;
PRAGMA user_version = 4;
BEGIN TRANSACTION;
CREATE TABLE charges (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    release INTEGER NOT NULL,
    clip_norm REAL,
    hash BLOB NOT NULL
) STRICT;
INSERT INTO "charges" VALUES(1,'2026-11-26T02:09:32+00:00','41',1,0,1,0.5,X'07E54946AACB679CE701A4437ADAA67A8B195772F7FCB0BF592652A143DB7165');
INSERT INTO "charges" VALUES(2,'2026-11-26T02:09:32+00:00','41',1,1,1,0.5,X'A6A0D44B35B648B23F4482B0872611A6700637DE8D1A82557E220F46ABC8F6F0');
INSERT INTO "charges" VALUES(3,'2026-11-26T02:09:32+00:00','41',2,0,1,0.5,X'E3341D6F25803BF1F515FFE5F6396B17E347E371E6F723120BCFBFE009998F76');
INSERT INTO "charges" VALUES(4,'2026-11-26T02:09:32+00:00','41',2,2,1,0.5,X'33D5D86FBD310E7F05A90911A3A930F33B95D51054A38203DD8F4702BDEE75D6');
INSERT INTO "charges" VALUES(5,'2026-11-26T02:09:32+00:00','41',3,2,2,0.25,X'C3DD465DE769616B8D074B56297343EA0302863AD96D60DD6094799DA6033225');
CREATE TABLE clients (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
INSERT INTO "clients" VALUES(0,'"anna"');
INSERT INTO "clients" VALUES(1,'"bert"');
INSERT INTO "clients" VALUES(2,'7');
CREATE TABLE ended (id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, UNIQUE (node, run)) STRICT;
INSERT INTO "ended" VALUES(1,'node','41');
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, messages INTEGER NOT NULL, UNIQUE (node, run)
) STRICT;
INSERT INTO "evaluations" VALUES(1,'node','41',2);
INSERT INTO "evaluations" VALUES(2,'node','',2);
CREATE TABLE head (id INTEGER PRIMARY KEY, charges INTEGER NOT NULL, hash BLOB NOT NULL, totals BLOB NOT NULL) STRICT;
INSERT INTO "head" VALUES(1,5,X'C3DD465DE769616B8D074B56297343EA0302863AD96D60DD6094799DA6033225',X'C7A203AA03178E2884E065CBCC888425EF5249C3C46E2731084815C82B5DDD69');
CREATE TABLE releases (id INTEGER PRIMARY KEY, what TEXT NOT NULL) STRICT;
INSERT INTO "releases" VALUES(1,'{"kind":"train","n":11,"noise_multiplier":10.0,"clipping":"public","mechanism":"laplace","hypotheses":2,"choice_epsilon":1.0}');
INSERT INTO "releases" VALUES(2,'{"kind":"report","n":1,"noise_multiplier":10.0,"clipping":"public","mechanism":"laplace","hypotheses":1,"choice_epsilon":0.0}');
CREATE TABLE requests (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, at TEXT NOT NULL, run TEXT NOT NULL, status TEXT NOT NULL,
    asks TEXT NOT NULL
) STRICT;
INSERT INTO "requests" VALUES(1,'1c7dbc3e5f8c0aba8abe8d51261cdbc183df0a0b591106bfc2c6d97be2001be3','2026-11-26T02:09:32+00:00','41','approved','{"config": {"batch-size": 10, "choice-epsilon": 2.0, "clients-per-round": 20, "clip-gradient": 0.0, "clip-norm": 2.0, "clip-norm-decay": 0.85, "clip-norm-floor": 0.01, "clipping": "public", "dataset": "", "device": "auto", "engine": "auto", "frozen": "", "hypotheses": 2, "local": "", "local-epochs": 10, "local-steps": 0, "loss": "", "max-clients-per-node": 1000000, "max-node-share": 1.0, "max-participations": 2, "max-pause": 86400.0, "max-update-norm": 0.0, "mechanism": "laplace", "message-noise": 0.0, "metric": "", "min-nodes": 1, "min-releases": 1, "model": "linear", "node-wait": 300.0, "noise-multiplier": 10.0, "noise-per": "vector", "observers": "", "optimizer": "sgd", "optimizer-options": "", "patience": 0, "pause-below": 1, "pretrained": "", "proximal": 0.0, "quorum": 1.0, "restarts": 5, "resume": "", "round-timeout": 3600.0, "rounds": 5, "seed": 0, "start-from": "", "step-size": 0.1, "strategy": "group-privacy", "strategy-options": "", "track": "", "track-options": "", "validate-by": "mean", "validate-every": 1, "validation-clients-per-round": 0}, "differs": {}, "n": 11}');
INSERT INTO "requests" VALUES(2,'2ccc88b8a15281773c2b829d924f37045f696bb9bb43491600c50ebbbda5a4cd','2026-11-26T02:09:32+00:00','41','refused','{"config": {"batch-size": 10, "choice-epsilon": 2.0, "clients-per-round": 20, "clip-gradient": 0.0, "clip-norm": 2.0, "clip-norm-decay": 0.85, "clip-norm-floor": 0.01, "clipping": "public", "dataset": "", "device": "auto", "engine": "auto", "frozen": "", "hypotheses": 2, "local": "", "local-epochs": 10, "local-steps": 0, "loss": "", "max-clients-per-node": 1000000, "max-node-share": 1.0, "max-participations": 2, "max-pause": 86400.0, "max-update-norm": 0.0, "mechanism": "laplace", "message-noise": 0.0, "metric": "", "min-nodes": 1, "min-releases": 1, "model": "linear", "node-wait": 300.0, "noise-multiplier": 10.0, "noise-per": "vector", "observers": "", "optimizer": "sgd", "optimizer-options": "", "patience": 0, "pause-below": 1, "pretrained": "", "proximal": 0.0, "quorum": 1.0, "restarts": 5, "resume": "", "round-timeout": 3600.0, "rounds": 6, "seed": 0, "start-from": "", "step-size": 0.1, "strategy": "group-privacy", "strategy-options": "", "track": "", "track-options": "", "validate-by": "mean", "validate-every": 1, "validation-clients-per-round": 0}, "differs": {}, "n": 11}');
INSERT INTO "requests" VALUES(3,'a8d62f69516f8d0c6dcd4b0d7c169efa4ce6f2bc933aec9bafb57e028debbd95','2026-11-26T02:09:32+00:00','41','waiting','{"config": {"batch-size": 10, "choice-epsilon": 2.0, "clients-per-round": 20, "clip-gradient": 0.0, "clip-norm": 2.0, "clip-norm-decay": 0.85, "clip-norm-floor": 0.01, "clipping": "public", "dataset": "", "device": "auto", "engine": "auto", "frozen": "", "hypotheses": 2, "local": "", "local-epochs": 10, "local-steps": 0, "loss": "", "max-clients-per-node": 1000000, "max-node-share": 1.0, "max-participations": 2, "max-pause": 86400.0, "max-update-norm": 0.0, "mechanism": "laplace", "message-noise": 0.0, "metric": "", "min-nodes": 1, "min-releases": 1, "model": "linear", "node-wait": 300.0, "noise-multiplier": 10.0, "noise-per": "vector", "observers": "", "optimizer": "sgd", "optimizer-options": "", "patience": 0, "pause-below": 1, "pretrained": "", "proximal": 0.0, "quorum": 1.0, "restarts": 5, "resume": "", "round-timeout": 3600.0, "rounds": 7, "seed": 0, "start-from": "", "step-size": 0.1, "strategy": "group-privacy", "strategy-options": "", "track": "", "track-options": "", "validate-by": "mean", "validate-every": 1, "validation-clients-per-round": 0}, "differs": {}, "n": 11}');
CREATE TABLE sent (
    id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL,
    UNIQUE (node, run, name, digest)
) STRICT;
INSERT INTO "sent" VALUES(1,'node','41','run','ef4c9ad141aa841f93c3a5876f5e46a3b261abfaf279c84f2910fbdf44a2892d');
CREATE TABLE totals (client INTEGER NOT NULL, first INTEGER NOT NULL, release INTEGER NOT NULL, times INTEGER NOT NULL, PRIMARY KEY (client, first)) STRICT, WITHOUT ROWID;
INSERT INTO "totals" VALUES(0,1,1,2);
INSERT INTO "totals" VALUES(1,2,1,1);
INSERT INTO "totals" VALUES(2,4,1,1);
INSERT INTO "totals" VALUES(2,5,2,1);
COMMIT;
