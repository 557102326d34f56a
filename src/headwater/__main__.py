"""`python -m headwater`: the command line."""

from headwater.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
