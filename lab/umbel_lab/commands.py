"""The lab's commands, which `umbel` finds by the entry point of this table (`umbel.cli.main.installed`)."""

COMMANDS = {
    "audit": (
        "umbel_lab.attacks.defences.command:app",
        "Audit a Mod, filter or strategy wrapper of any package: is its claim true?",
    ),
    "experiment": (
        "umbel_lab.experiments.__main__:app",
        "Reproduce the papers' tables and figures, and measure the cost of a guarantee.",
    ),
    "attack": (
        "umbel_lab.attacks.__main__:app",
        "Run attacks by a curious or malicious server, and audit the claimed epsilon.",
    ),
}
