"""A data loader made from an input function, and iteration over a given number of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headwater.core.errors import ConfigError, DataError
from headwater.distributed import reading_input
from headwater.utils.data.parts import Parts

_END = object()


class DataLoader:
    """An iterable of the batches of an input function. With several ranks, each gets its part (see `Parts`).

    The function is called when the first batch is needed. Each iteration iterates over its return value. If
    that is an iterator, which allows only one pass, the function is called again for the next iteration.

    Attributes:
        batches: the whole batches, not divided among ranks.

    Args:
        input_fn: returns a `torch.utils.data.DataLoader` or another iterable of batches. It may read a share
            of the data for this rank: see `headwater.distributed.num_tasks` and `task_id`.
        args: positional arguments for `input_fn`.
        kwargs: keyword arguments for `input_fn`.

    Raises:
        ConfigError: if `input_fn` is not callable.
    """

    def __init__(self, input_fn: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> None:
        if not callable(input_fn):
            raise ConfigError(
                f"expected a function that returns batches, got {type(input_fn).__name__}",
                where="utils.data.DataLoader",
                remedy="pass the function without calling it, or pass the loader itself to DataExecutor",
            )
        self.batches = InputFunction(lambda: input_fn(*args, **kwargs), _name(input_fn))
        self._parts = Parts()

    def __iter__(self) -> Iterator[Any]:
        return self._parts.of(self.batches)

    def __len__(self) -> int:
        """Return the number of batches; raise `TypeError` if the loader has no length."""
        return len(self.batches)


class InputFunction:
    """An iterable of the batches of a function's return value; `is_streamer` is true while a batch is read.

    Args:
        function: returns an iterable of batches.
        name: the function's name, for errors.
    """

    def __init__(self, function: Callable[[], Iterable[Any]], name: str) -> None:
        self._function = function
        self._name = name
        self._loader: Iterable[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        loader = self._get()
        if isinstance(loader, Iterator):  # it is used up after one pass, so the next pass needs a new one
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
        """Return the number of batches; raise `TypeError` if the loader has no length."""
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
    """Return `loader` if it is iterable.

    Args:
        loader: any object.
        what: beginning of the error message, such as `the executor was given`.

    Raises:
        DataError: if it is not iterable.
    """
    if isinstance(loader, Iterable):
        return loader
    found = "None" if loader is None else f"a {type(loader).__name__}, which is not iterable"
    raise DataError(
        f"{what} {found}", remedy="use an iterable of batches, such as a torch.utils.data.DataLoader"
    )


def passes(loader: Iterable[Any], num_batches: int | None) -> Iterator[Any]:
    """Yield `num_batches` batches, restarting the loader at its end; one pass if `num_batches` is `None`.

    Raises:
        DataError: if a pass over the loader yields no batches.
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
            "the data loader yielded no batches",
            remedy="check its data set: is it empty, or smaller than one batch with drop_last?",
        )
    raise DataError(
        f"the data loader ended after {given} of {num_batches} batches, and yielded nothing when restarted",
        remedy="use an iterable that can be restarted, such as a torch.utils.data.DataLoader, "
        "or an input function",
    )


def with_last(batches: Iterator[Any], length: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield each batch with a flag that is true for the last batch.

    Args:
        batches: the batches.
        length: their number. If it is `None`, the next batch is read before the current one is yielded.
    """
    if length is not None:
        yield from ((batch, index == length) for index, batch in enumerate(batches, 1))
        return
    batch = next(batches, _END)
    while batch is not _END:
        following = next(batches, _END)
        yield batch, following is _END
        batch = following
