"""Clean up after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the context raises, also for `KeyboardInterrupt`. The exception is not caught."""
    with ExitStack() as stack:
        stack.callback(clean_up)
        yield
        stack.pop_all()
