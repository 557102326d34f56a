"""The option `--appliance`, which runs a command on another machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headwater.appliance.remote.address import ENVIRONMENT, Address, read_address
from headwater.core.errors import ConfigError

OPTION = "--appliance"
_NAMES = (OPTION, "--mgmt_address", "--cs_ip")
"""The option, and its names in Cerebras' documents."""
HELP = f"use the queue of another machine: ssh://[user@]host[:port][/path] (or {ENVIRONMENT})"
REMOTE = ("fit", "jobs")
"""The commands that accept the option and the variable."""
REMOTE_IF_ASKED = ("plan", "validate")
"""The commands that accept the option but ignore the variable: without the option they run here."""


def take_address(words: Sequence[str]) -> tuple[Address | None, list[str]]:
    """Return the address that a command line names, and the words without this option.

    The option may be anywhere before `--`. Without it the variable HEADWATER_APPLIANCE has the address.

    Raises:
        ConfigError: if the address is missing or malformed.
    """
    end = words.index("--") if "--" in words else len(words)
    rest, text, where = list(words[:end]), None, OPTION
    for place, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name not in _NAMES:
            continue
        if not equals and place + 1 == len(rest):
            raise ConfigError("expected an address, got none", where=name, remedy=f"write {name} ssh://host")
        where, text = name, value if equals else rest[place + 1]
        del rest[place : place + (1 if equals else 2)]
        break
    if text is not None:
        return read_address(text, where=where), [*rest, *words[end:]]
    found = os.environ.get(ENVIRONMENT)
    return read_address(found, where=ENVIRONMENT) if found else None, list(words)


def refuse_other_commands(command: str, words: Sequence[str]) -> None:
    """Raise if a command line has the option, but its command runs only on this machine.

    Args:
        command: the command.
        words: the command line.

    Raises:
        ConfigError: if the command line has the option for such a command. The variable HEADWATER_APPLIANCE
            is not an error, because such commands ignore it.
    """
    end = words.index("--") if "--" in words else len(words)
    known = (*REMOTE, *REMOTE_IF_ASKED)
    if command not in known and is_asked(words[:end]):
        raise ConfigError(
            f"headwater {command} runs only on this machine",
            where=OPTION,
            remedy=f"use the option with {', '.join(known)}; for other commands: "
            f"headwater {OPTION} … jobs submit --follow -- headwater {command} …",
        )


def is_asked(words: Sequence[str]) -> bool:
    """True if the words contain the option."""
    return any(word.partition("=")[0] in _NAMES for word in words)


def say(text: str) -> None:
    """Print a notice of the state of a connection on stderr."""
    print(f"note: {text}", file=sys.stderr, flush=True)
