"""``python -m rmsnorm_raw``: the command line, where its script is not on PATH."""

from rmsnorm_raw.cli import app

if __name__ == "__main__":
    app()
