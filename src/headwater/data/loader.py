"""Loader of batches in a given order: worker processes read ahead, and it resumes at the exact sample."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from headwater.core.errors import FROM_WEIGHTS, DataError
from headwater.core.safe_path import safe_path
from headwater.core.trees import tensors_in
from headwater.data.order import SampleOrder

Batch = dict[str, torch.Tensor]


class LoaderState(TypedDict):
    """Position in the data: `samples_consumed`. The other keys identify the data and their order."""

    samples_consumed: int
    num_samples: int
    shuffle: bool
    shuffle_seed: int


_OF_THE_ORDER: dict[Literal["num_samples", "shuffle", "shuffle_seed"], str] = {
    "num_samples": "{} samples",
    "shuffle": "shuffle: {}",
    # Not the name of the key: most users set the run's `seed` instead.
    "shuffle_seed": "seed {}",
}
"""Key of a state that must not differ when a run continues -> the words for its value in an error."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Processes of one rank that read its batches.

    Attributes:
        count: number of processes; 0: read in the training process.
        prefetch_factor: batches that each process reads ahead.
        persistent: keep the processes from one iteration to the next.
    """

    count: int = 0
    prefetch_factor: int = 2
    persistent: bool = True


_NO_WORKERS = Workers()


@runtime_checkable
class ReadsAhead(Protocol):
    """A data set that reads ahead itself, so that it needs no worker processes of torch."""

    def read_ahead(self, batches: Iterable[Sequence[int]], per_worker: int, /) -> Iterator[Batch | DataError]:
        """Yield the batches of draws in order; see `RemoteSamples.read_ahead`."""
        ...


class BatchLoader:
    """A loader that yields this rank's slice of each global batch.

    If the order repeats, an iteration is endless, and a new iteration continues where the last one stopped.
    Otherwise each iteration is one pass from the beginning; the first one after `load_state_dict` begins at
    the loaded position.

    Workers return errors as values, because torch would turn an exception into one string that includes the
    traceback. Therefore `dataset.__getitems__` returns either a batch or a `DataError`.

    Args:
        dataset: its `__getitems__` takes draws (`SampleOrder.draws`) and returns a collated batch or a
            `DataError`.
        order: decides which samples each batch holds.
        workers: the processes that read.
    """

    def __init__(self, dataset: Any, order: SampleOrder, workers: Workers = _NO_WORKERS) -> None:
        self.order = order
        self._consumed = 0
        self._resuming = False
        self._batches = _LocalBatches(order)
        self._ahead = workers.prefetch_factor
        self._dataset = dataset
        if isinstance(dataset, ReadsAhead):
            workers = _NO_WORKERS
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,
            collate_fn=_shared,
            num_workers=workers.count,
            # torch raises an error if these two settings are given without workers.
            prefetch_factor=workers.prefetch_factor if workers.count else None,
            persistent_workers=workers.persistent and workers.count > 0,
            # "fork" would copy the locks of the engine's threads and the context of the device.
            multiprocessing_context=multiprocessing.get_context("spawn") if workers.count else None,
            worker_init_fn=_exit_without_shutdown,
        )

    def __iter__(self) -> Iterator[Batch]:
        if not self.order.repeat and not self._resuming:
            self._consumed = 0
        self._resuming = False
        self._batches.start = self._consumed
        for batch in self._start():
            if isinstance(batch, DataError):
                try:
                    raise batch
                finally:
                    # The error's traceback refers to this frame. If the frame also referred to the error,
                    # only the cycle collector could free the loader, and it might free the queues before the
                    # workers are told to stop.
                    del batch
            position = self.order.next_position(self._consumed)
            assert position is not None, "every batch has a position"
            # The position changes before the yield, because the caller may save it while it has this batch.
            self._consumed = position
            yield batch

    def _start(self) -> Iterator[Any]:
        """Start the worker processes or threads; return the iterator over their batches."""
        if isinstance(self._dataset, ReadsAhead):
            return self._dataset.read_ahead(self._batches, self._ahead)
        with safe_path():
            return iter(self._loader)

    def __len__(self) -> int:
        """Return the number of batches in one pass.

        Raises:
            TypeError: if the order repeats, because the iteration is then endless.
        """
        if self.order.end is None:
            raise TypeError("an endless loader has no length")
        return -(-self.order.end // self.order.batch_size)

    def state_dict(self) -> LoaderState:
        """Return the position after the batches yielded so far; batches read ahead do not count."""
        order = self.order
        return LoaderState(
            samples_consumed=self._consumed,
            num_samples=order.num_samples,
            shuffle=order.shuffle,
            shuffle_seed=order.seed,
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Make the next iteration begin at a saved position; batch size and number of ranks may have changed.

        Args:
            state: the result of `state_dict`.

        Raises:
            DataError: if the state belongs to other data or another order.
        """
        mine = self.state_dict()
        for key, words in _OF_THE_ORDER.items():
            if state[key] != mine[key]:
                then, now = (words.format(str(value).lower()) for value in (state[key], mine[key]))
                raise DataError(
                    f"the checkpoint was made with {then}, but this run has {now}",
                    where="train_dataloader",
                    remedy=f"continue with {then}, or {FROM_WEIGHTS}",
                )
        self._consumed = state["samples_consumed"]
        self._resuming = True


class _LocalBatches(Sampler[list[int]]):
    """Sampler that yields, batch by batch, the draws that this rank reads, beginning at position `start`."""

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        position = self.start
        while (stop := self.order.next_position(position)) is not None:
            draws = self.order.local_draws(position, stop).tolist()
            if draws:  # empty if the last batch is smaller than the number of ranks
                yield draws
            position = stop


def _exit_without_shutdown(worker: int) -> None:
    """Make this worker process exit with `os._exit`, after all other finalizers.

    The usual shutdown of torch sometimes aborts under load ("terminate called without an active exception").
    The DataLoader then reports a failed worker although every batch has arrived.
    """
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-1000)


# Spawned workers import this function by its name, so it cannot be a lambda.
def _shared(batch: Any) -> Any:
    """Return what the data set has returned. In a worker, move the tensors of a batch to shared memory first.

    torch would move the tensors there on another thread of the worker. If that failed, the batch would never
    arrive, and the training process would wait for it without end.
    """
    if isinstance(batch, DataError) or get_worker_info() is None:
        return batch
    try:
        for tensor in tensors_in(batch):
            tensor.share_memory_()
    except RuntimeError as error:
        return DataError(
            f"a data worker has no shared memory for its batch: {str(error).partition(chr(10))[0]}",
            where="/dev/shm",
            remedy="write num_workers: 0 or a smaller prefetch_factor, or give a container more memory there "
            "(docker run --shm-size)",
        )
    return batch
