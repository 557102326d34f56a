"""The command line as a module: `python -m headwater`."""

from headwater.cli.start import headwater

if __name__ == "__main__":
    raise SystemExit(headwater())
