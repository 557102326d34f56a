"""The division of batches among ranks."""

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
_NO_BATCH = -1.0
"""Value that a rank gathers instead of a fingerprint when its data has ended. Fingerprints are >= 0."""


class Parts:
    """Yields this rank's parts of the batches of a loader, and finds out whether the loader divides the data.

    If all ranks load the same batches, each rank computes its slice of every batch. If they load different
    batches, the loader has already divided the data, and each rank computes its whole batches. The first
    batches are compared to find out which case it is.

    Args:
        are_shares: true if each rank loads different batches; `None` to find out from the first batches.
        equal: true if slices must be equal. Otherwise sizes may differ by one, and empty slices are skipped.
    """

    def __init__(self, are_shares: bool | None = None, *, equal: bool = True) -> None:
        self._are_shares = are_shares
        self._equal = equal

    @property
    def are_shares(self) -> bool:
        """True if it is known that ranks load different batches, which are then the parts."""
        return bool(self._are_shares)

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's parts of `batches`, until the data of any rank ends.

        Raises:
            DataError: if a batch cannot be divided equally, or if ranks that loaded equal batches at first
                load different ones later.
        """
        fabric = current()
        if fabric.size == 1:
            yield from batches
            return
        own = iter(batches)
        while True:
            batch = next(own, _END)
            # A rank without further batches gathers too; otherwise the others would wait for its next batch.
            mark = _NO_BATCH if batch is _END else float(fingerprint(batch))
            marks = fabric.gather(mark, "the next batch")
            if _NO_BATCH in marks:
                _check_end(marks)
                return
            part = self._part(batch, marks)
            if num_samples(part):
                yield part

    def compare_first(self, batch: Any) -> None:
        """Find out, from a first batch on each rank, whether ranks load different batches."""
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
        _check_same_batch(marks)
        return take_part(batch, equal=self._equal)


def _check_end(marks: Sequence[float]) -> None:
    """Log a warning if only some ranks are at the end of their data."""
    if any(mark != _NO_BATCH for mark in marks):
        logger.warning(
            "the data of rank %d ended first; the remaining batches of other ranks are skipped in this pass",
            marks.index(_NO_BATCH),
        )


def _check_same_batch(marks: Sequence[float]) -> None:
    other = next((rank for rank, mark in enumerate(marks) if mark != marks[0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} has loaded a different batch than rank 0, but earlier batches were equal",
            where="data loader",
            remedy="seed the loader's random numbers; if it divides its data among the ranks, write "
            "DataExecutor(…, sharded=True)",
        )
