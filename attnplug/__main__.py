"""`python -m attnplug`: the command line, where its script is not on the path."""

from attnplug.cli import app

if __name__ == "__main__":
    app()
