"""The entry points of the commands. An interruption while their modules are imported ends them quietly.

Nothing is imported here at the top: an interruption would print Python's traceback until it is imported.
"""


def headwater() -> int:
    """Run the command `headwater` and return the exit code."""
    return _quiet_imports("headwater.cli.main")


def csctl() -> int:
    """Run the command `csctl` and return the exit code."""
    return _quiet_imports("headwater.cli.csctl")


def _quiet_imports(module: str) -> int:
    """Import the module of a command, and run its `main`."""
    try:
        from importlib import import_module

        return int(import_module(module).main())
    except KeyboardInterrupt:
        # `main` handles interruptions itself: this one came before it.
        from headwater.core.exit_codes import INTERRUPTED
        from headwater.core.signals import speaks_for_all

        if speaks_for_all():
            import sys

            print("interrupted", file=sys.stderr)
        return INTERRUPTED
