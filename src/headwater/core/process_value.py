"""Global values that a context can replace for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class ProcessValue(Generic[T]):
    """A value that the whole process shares: a call sets it, and later calls of other functions read it.

    Where an argument could carry the value, pass an argument instead. Beside each value of this class, a
    comment must give the reason why it is global.

    Args:
        value: the first value.

    Attributes:
        value: the present value.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def replaced(self, value: T) -> Iterator[None]:
        """Set the value inside the context. At the end, restore the value from before."""
        # Not reset to a fixed value: contexts may be nested.
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
