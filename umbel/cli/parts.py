"""``python -m umbel.cli.parts``: the processes of a site and of the server, each in a separate container."""

from umbel.cli.main import parts as app

if __name__ == "__main__":
    app(prog_name="python -m umbel.cli.parts")
