"""Exit codes that have the same meaning in launchers and in the processes that they start."""

INTERRUPTED = 130
"""Exit code of an interrupted process. A shell reports the same for Ctrl-C."""
