"""The parts of batches that each of several ranks computes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headwater.api.ranks import note_part, take_part
from headwater.core.batches import fingerprint, num_samples
from headwater.core.errors import DataError
from headwater.fabric.membership import current

logger = logging.getLogger(__name__)

_END = object()
_NONE = -1.0


class Parts:
    """What is this rank's, of several, of the batches of a loader.

    A loader that gives every rank the same batches does not know of ranks: each takes its slice. One that
    gives them different batches has divided its data itself: each takes what it is given. The first batches
    tell.

    Args:
        are_shares: whether the loader gives each rank other batches; the first batches tell if not given.
        equal: whether slices must be equal; otherwise sizes may differ by one, and an empty one is left out.
    """

    def __init__(self, are_shares: bool | None = None, *, equal: bool = True) -> None:
        self._are_shares = are_shares
        self._equal = equal

    @property
    def are_shares(self) -> bool:
        """Whether ranks get different batches, as far as is known."""
        return bool(self._are_shares)

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's parts of `batches`, up to where those of the first rank end.

        Raises:
            DataError: if a batch cannot be divided equally, or ranks have read different ones.
        """
        fabric = current()
        if fabric.size == 1:
            yield from batches
            return
        own = iter(batches)
        while True:
            batch = next(own, _END)
            marks = fabric.gather(_NONE if batch is _END else float(fingerprint(batch)))
            if _NONE in marks:
                _check_end(marks)
                return
            part = self._part(batch, marks)
            if num_samples(part):
                yield part

    def look_at(self, batch: Any) -> None:
        """Find out with a first batch of each rank whether they are different."""
        self._note(current().gather(float(fingerprint(batch))))

    def _note(self, marks: Sequence[float]) -> None:
        if self._are_shares is None:
            self._are_shares = len(set(marks)) > 1
            logger.info("each rank %s", "has its own data" if self._are_shares else "takes its slice")

    def _part(self, batch: Any, marks: Sequence[float]) -> Any:
        self._note(marks)
        if self._are_shares:
            note_part(batch)
            return batch
        _check_alike(marks)
        return take_part(batch, equal=self._equal)


def _check_end(marks: Sequence[float]) -> None:
    """Say so if others have batches left."""
    if any(mark != _NONE for mark in marks):
        logger.warning(
            "the data of rank %d end first: what others have left of this pass is left out",
            marks.index(_NONE),
        )


def _check_alike(marks: Sequence[float]) -> None:
    other = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} has read another batch than rank 0, and before they had the same",
            where="data loader",
            remedy="seed what is random in it; or, where it divides its data among ranks, say so with "
            "DataExecutor(…, sharded=True)",
        )
