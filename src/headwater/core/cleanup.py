"""A context that calls a function if the code inside raises an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the context raises any exception, then raise the exception again."""
    with ExitStack() as stack:
        stack.callback(clean_up)
        yield
        stack.pop_all()
