"""``python -m umbel.deploy``: the entry points of containers."""

from umbel.cli.main import parts

if __name__ == "__main__":
    parts(prog_name="python -m umbel.deploy")
