"""The state of Python objects at one moment, to undo later changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch

from headwater.core.errors import StreamError
from headwater.core.tensor_values import copies_of, put_back

if TYPE_CHECKING:
    from headwater.core.python_records import OfIterator, Record


@final
@dataclasses.dataclass
class PythonState:
    """The state of objects, variables, containers and random generators, which can be restored later.

    Larger tensors and parameters are remembered as objects, without their values.

    Attributes:
        records: the state of each object.
        iterators: the records of iterators, which are in `records` too. Some iterators cannot go back.
        caches: functions whose results are cached, each with the number of results.
        large_tensors: tensors that a forward may change in place, and whose values are not recorded.
    """

    records: list[Record] = dataclasses.field(default_factory=list)
    iterators: list[OfIterator] = dataclasses.field(default_factory=list)
    caches: list[tuple[Any, int]] = dataclasses.field(default_factory=list)
    large_tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def refuse_advanced_iterators(self) -> None:
        """Raise if an iterator has advanced since the state was recorded. Call this after `put_back`.

        Raises:
            StreamError: if there is such an iterator.
        """
        for iterator in self.iterators:
            if not iterator.is_present():
                raise StreamError(
                    "the forward takes the next value of an iterator. Headwater runs a forward more than "
                    f"once, and a {type(iterator.iterator).__name__} cannot go back",
                    remedy="call next(...) outside of the forward, and pass its value to the model as an "
                    "argument; or count the calls in an attribute",
                )

    def clear_grown_caches(self) -> None:
        """Clear caches of functions that have new results: a dry run puts tensors without values there."""
        for function, size in self.caches:
            if function.cache_info().currsize > size:
                function.cache_clear()

    def versions_of_large_tensors(self) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors whose values are not recorded, each with its present version counter."""
        return [(tensor, tensor._version) for tensor in self.large_tensors]

    def add_places_of(self, other: PythonState) -> None:
        """Record also the present state of all objects that `other` has recorded."""
        self.records += [record.again() for record in other.records]

    def is_present(self) -> bool:
        """True if nothing has changed since the state was recorded."""
        return all(record.is_present() for record in self.records)

    def put_back(self) -> None:
        """Restore the recorded state of all objects that have changed."""
        for record in self.records:
            record.put_back()


@contextmanager
def undone(before: PythonState, largest_tensor: int = 0) -> Iterator[None]:
    """Enter a context. At its end, restore a state that was recorded immediately before it.

    Args:
        before: the state.
        largest_tensor: tensors that the state has no copy of are restored too, up to this number of bytes.
    """
    # Not by their versions: a dry run counts changes by fake tensors, which change no values.
    values = copies_of([tensor for tensor in before.large_tensors if tensor.nbytes <= largest_tensor])
    try:
        yield
    finally:
        before.put_back()
        before.clear_grown_caches()
        put_back(values)


def refuse_changed_tensors(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Raise if a run of a forward that must leave no trace has changed a tensor.

    Args:
        versions: tensors with their version counters before the run.

    Raises:
        StreamError: if one of the versions has changed.
    """
    for tensor, version in versions:
        if tensor._version != version:
            raise StreamError(
                f"the forward changes a tensor of shape {list(tensor.shape)} that is not a buffer of its "
                "module. Headwater runs a forward more than once, which would change the tensor twice",
                remedy="make the tensor a buffer (register_buffer), or change it outside of the forward",
            )
