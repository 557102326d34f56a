"""Addresses of appliances: `ssh://[user@]host[:port][/path]`."""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import unquote, urlsplit

from headwater.core.errors import ConfigError

ENVIRONMENT = "HEADWATER_APPLIANCE"
"""Environment variable with the address of the appliance to use."""
SCHEME = "ssh://"
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+$-]*")
_EXAMPLE = "write it as ssh://host, or ssh://user@host:port/path"


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of an appliance.

    Attributes:
        host: name or IP address of the machine, or an alias of the user's SSH configuration.
        user: user on that machine; SSH's choice if `None`.
        port: port of its SSH server; SSH's choice if `None`.
        path: folder for uploads and runs on that machine; its usual folder if `None`. `~/` means the home of
            the user.
    """

    host: str
    user: str | None = None
    port: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port else ""
        path = "" if self.path is None else f"/{self.path}" if self.path.startswith("~") else self.path
        return f"{SCHEME}{user}{host}{port}{path}"


def read_address(text: str, *, where: str) -> Address:
    """Parse the address of an appliance.

    Args:
        text: the address.
        where: place where the user wrote it, for the error.

    Raises:
        ConfigError: if it is not an address `ssh://[user@]host[:port][/path]`.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"not an address: {text!r}: {error}", where=where, remedy=_EXAMPLE) from error
    if parts.scheme != "ssh" or parts.query or parts.fragment:
        raise ConfigError(f"expected an address ssh://host, got {text!r}", where=where, remedy=_EXAMPLE)
    if parts.password is not None:
        remedy = f"{_EXAMPLE}; SSH asks for passwords itself, and keys are better"
        raise ConfigError("expected an address without a password", where=where, remedy=remedy)
    user = None if parts.username is None else unquote(parts.username)
    # A first character `-` would make ssh read the word as an option.
    for kind, word, pattern in (("host", parts.hostname or "", _HOST), ("user", user, _USER)):
        if word is not None and not pattern.fullmatch(word):
            raise ConfigError(f"not a name of a {kind}: {word!r}", where=where, remedy=_EXAMPLE)
    assert parts.hostname is not None, "an empty host does not match"
    path = unquote(parts.path).rstrip("/")
    return Address(parts.hostname, user, port, (path[1:] if path.startswith("/~") else path) or None)
