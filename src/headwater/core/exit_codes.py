"""Exit codes that launchers and what they start agree on."""

INTERRUPTED = 130
"""Of what was interrupted: what a shell reports for a process that Ctrl-C ended."""
