"""Names of the users of the machine."""

from __future__ import annotations

import pwd


def user_name(uid: int) -> str:
    """Return the name of a user, or the number as text if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
