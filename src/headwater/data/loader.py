"""Batches of a data set in a given order, read ahead by worker processes, resumable to the exact sample."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, Sampler

from headwater.core.errors import DataError
from headwater.core.safe_path import safe_path
from headwater.data.order import SampleOrder

Batch = dict[str, torch.Tensor]


class LoaderState(TypedDict):
    """Position in the data, as plain values; the rest tells whether it is the same data in the same order."""

    samples_consumed: int
    num_samples: int
    shuffle: bool
    shuffle_seed: int


class BatchLoader:
    """Iterates over this rank's part of each global batch.

    With an order that repeats, iteration is endless, and a new iteration goes on where the last one
    stopped. Otherwise each iteration is one pass from the beginning (from the loaded state, right after
    `load_state_dict`).

    Errors cross from the workers as values: torch would turn an exception into one string with a
    traceback in it. So `dataset.__getitems__` gives either a batch or a `DataError`.

    Args:
        dataset: its `__getitems__` takes draws (`SampleOrder.draws`) and gives a collated batch or a
            `DataError`.
        order: which samples, when.
        num_workers: worker processes; 0 reads in this one.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers from one iteration to the next.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
    ) -> None:
        self.order = order
        self._consumed = 0
        self._resuming = False
        self._batches = _LocalBatches(order)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,
            collate_fn=_as_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers and num_workers > 0,
            # A fork would copy the engine's threads' locks and the device's context.
            multiprocessing_context=multiprocessing.get_context("spawn") if num_workers else None,
            worker_init_fn=_leave_at_once,
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
                    # The error's traceback holds this frame. Were the error a local of it too, only the cycle
                    # collector would free the loader, and its queues before its workers were told to stop.
                    del batch
            position = self.order.next_position(self._consumed)
            assert position is not None, "there is a position for every batch"
            self._consumed = position
            yield batch

    def _start(self) -> Iterator[Any]:
        """Start the workers."""
        with safe_path():
            return iter(self._loader)

    def __len__(self) -> int:
        """Batches of one pass.

        Raises:
            TypeError: if the order repeats: the iteration is endless.
        """
        if self.order.end is None:
            raise TypeError("an endless loader has no length")
        return -(-self.order.end // self.order.batch_size)

    def state_dict(self) -> LoaderState:
        """State after the batches handed out by the iteration, whatever the workers have read ahead."""
        order = self.order
        return LoaderState(
            samples_consumed=self._consumed,
            num_samples=order.num_samples,
            shuffle=order.shuffle,
            shuffle_seed=order.seed,
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Makes the next iteration begin after what was consumed; batch size and ranks may have changed.

        Raises:
            DataError: if the state belongs to other data or another order.
        """
        mine = self.state_dict()
        for key in ("num_samples", "shuffle", "shuffle_seed"):
            if state[key] != mine[key]:
                what = f"checkpoint was made with {key} {state[key]}, this run has {mine[key]}"
                remedy = "use the data and seed of the checkpoint, or start without its data position"
                raise DataError(what, where=f"train_dataloader.{key}", remedy=remedy)
        self._consumed = state["samples_consumed"]
        self._resuming = True


class _LocalBatches(Sampler[list[int]]):
    """Draws of this rank's batches, from position `start` on."""

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        position = self.start
        while (stop := self.order.next_position(position)) is not None:
            draws = self.order.local_draws(position, stop).tolist()
            if draws:  # a last batch may be too small for all ranks to have a part in it
                yield draws
            position = stop


def _leave_at_once(worker: int) -> None:
    """Let this worker process end without taking torch down piece by piece, after all else that it has to do.

    Some abort in that under load ("terminate called without an active exception"), and torch reports it
    as a failure although every batch had arrived.
    """
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-1000)


def _as_is(batch: Any) -> Any:
    return batch
