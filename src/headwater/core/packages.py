"""Errors for optional packages that are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.core.errors import ConfigError


@contextmanager
def importing(what: str, extra: str, *, otherwise: str | None = None) -> Iterator[None]:
    """Enter a context for imports in which a missing package becomes an error that says how to install it.

    Args:
        what: the work that needs the package, such as "drawing a plan".
        extra: the extra of headwater that installs the package.
        otherwise: how the user can do without this work.

    Raises:
        ConfigError: if a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs {error.name}, which is not installed",
            remedy=f"pip install 'headwater[{extra}]'" + ("" if otherwise is None else f", or {otherwise}"),
        ) from error
