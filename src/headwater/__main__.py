"""The command line as a module: `python -m headwater`."""

from headwater.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
