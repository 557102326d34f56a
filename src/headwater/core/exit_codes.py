"""Exit codes that launchers and the processes they start agree on."""

INTERRUPTED = 130
"""Exit code of an interrupted process. A shell reports the same for Ctrl-C."""
