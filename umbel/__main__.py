"""``python -m umbel``: the command."""

from umbel.cli.main import app

if __name__ == "__main__":
    app(prog_name="umbel")
