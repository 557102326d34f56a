"""An input function as a data loader, and any loader as the number of batches that a run wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headwater.core.errors import ConfigError, DataError
from headwater.distributed import reading_input
from headwater.utils.data.parts import Parts

_END = object()


class DataLoader:
    """The batches of what an input function returns; of several ranks, each one's part of them (see `Parts`).

    The function is called when batches are first wanted. What it returned is iterated anew each time; if that
    is an iterator, which has only one pass in it, the function is called anew.

    Attributes:
        batches: the same, undivided.

    Args:
        input_fn: returns a `torch.utils.data.DataLoader` or another iterable of batches. Which share of the
            data it reads is its own business: see `headwater.distributed.num_tasks` and `task_id`.
        args: what it is called with.
        kwargs: likewise.

    Raises:
        ConfigError: if `input_fn` cannot be called.
    """

    def __init__(self, input_fn: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> None:
        if not callable(input_fn):
            raise ConfigError(
                f"a function that returns batches is wanted, found {type(input_fn).__name__}",
                where="utils.data.DataLoader",
                remedy="give the function itself, or give the loader that it returns to the DataExecutor",
            )
        self.batches = InputFunction(lambda: input_fn(*args, **kwargs), _name(input_fn))
        self._parts = Parts()

    def __iter__(self) -> Iterator[Any]:
        return self._parts.of(self.batches)

    def __len__(self) -> int:
        """Number of batches; raises `TypeError` if the loader does not know."""
        return len(self.batches)


class InputFunction:
    """The batches of what a function returns, marked as read while they are.

    Args:
        function: returns an iterable of batches.
        name: of the function.
    """

    def __init__(self, function: Callable[[], Iterable[Any]], name: str) -> None:
        self._function = function
        self._name = name
        self._loader: Iterable[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loader = self._get()
        if isinstance(loader, Iterator):
            self._loader = None
        with reading_input():
            batches = iter(loader)
        while True:
            with reading_input():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def __len__(self) -> int:
        """Number of batches; raises `TypeError` if the loader does not know."""
        return len(self._get())  # type: ignore[arg-type]

    def _get(self) -> Iterable[Any]:
        if self._loader is None:
            with reading_input():
                loader = self._function()
            self._loader = checked_iterable(loader, what=f"the input function {self._name!r} returned")
        return self._loader


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def checked_iterable(loader: Any, *, what: str) -> Iterable[Any]:
    """`loader`; raises `DataError` if it gives no batches. `what` precedes what was found."""
    if isinstance(loader, Iterable):
        return loader
    found = "nothing" if loader is None else f"a {type(loader).__name__}, which cannot be iterated"
    raise DataError(
        f"{what} {found}", remedy="return an iterable of batches, such as a torch.utils.data.DataLoader"
    )


def passes(loader: Iterable[Any], num_batches: int | None) -> Iterator[Any]:
    """`num_batches` batches: the loader starts again at its end; one pass where no number is given.

    Raises:
        DataError: if a pass gives nothing.
    """
    given = 0
    while True:
        before = given
        for batch in loader:
            given += 1
            yield batch
            if given == num_batches:
                return
        if given == before:
            _refuse_empty(given, num_batches)
        if num_batches is None:
            return


def _refuse_empty(given: int, num_batches: int | None) -> None:
    if not given:
        raise DataError(
            "the data loader gave no batch",
            remedy="look at its data set: is it empty, or smaller than one batch with drop_last?",
        )
    raise DataError(
        f"the data loader ended after {given} of {num_batches} batches, and gives none when it starts again",
        remedy="give what can be started again, such as a torch.utils.data.DataLoader, or an input function",
    )


def with_last(batches: Iterator[Any], length: int | None) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last. If `length` is unknown, and only then, one is read ahead."""
    if length is not None:
        yield from ((batch, index == length) for index, batch in enumerate(batches, 1))
        return
    batch = next(batches, _END)
    while batch is not _END:
        following = next(batches, _END)
        yield batch, following is _END
        batch = following
