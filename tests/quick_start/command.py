"""Command lines of the Python interpreter, taken apart. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Program:
    """A program for an interpreter.

    Attributes:
        kind: `module`, `code` or `file`.
        text: name of the module, the code, or path of the file.
        arguments: of the program.
        unbuffered: option `-u`.
        safe_path: option `-P`.
        original: the whole command of the interpreter.
        network: name of the network namespace; empty for that of the client.
    """

    kind: str
    text: str
    arguments: tuple[str, ...]
    unbuffered: bool
    safe_path: bool
    original: tuple[str, ...]
    network: str = ""


_KNOWN_BY_COMMAND = "headwater.appliance."
"""Modules whose processes are looked for by their command line, which a fork does not have."""
_KINDS = {"-m": "module", "-c": "code"}


def parse(command: Sequence[str]) -> Program | None:
    """Return what a command of this interpreter runs; None if a fork cannot run it."""
    network = ""
    if tuple(command[:3]) == ("ip", "netns", "exec") and len(command) > 4:
        network, command = command[3], command[4:]
    if not command or command[0] != sys.executable:
        return None
    words, options = list(command[1:]), set()
    while words and words[0] in ("-u", "-P", "-B"):
        options.add(words.pop(0))
    if not words:
        return None
    if (kind := _KINDS.get(words[0])) is not None:
        words.pop(0)
    elif words[0].startswith("-"):
        return None
    if not words:
        return None
    text, *arguments = words
    if text.startswith(_KNOWN_BY_COMMAND):
        return None
    return Program(
        kind or "file", text, tuple(arguments), "-u" in options, "-P" in options, tuple(command), network
    )
