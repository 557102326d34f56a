"""Snapshots on ranks other than 0: they send pieces to rank 0, or wait until rank 0 has saved a stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import final

import torch

from headwater.store.pieces import PieceState
from headwater.store.store import WeightStore


def receive_pieces(store: WeightStore) -> Iterator[PieceState]:
    """Yield the pieces that other hosts send, stage after stage; see `SnapshotElsewhere`."""
    link = store.snapshots.link
    if link is not None:
        for stage in store.stages:
            for host, piece in store.ownership.elsewhere(stage.index):
                state = store.parameters.pieces.empty(stage.index, piece)
                for tensor in (state.master, *state.states.values()):
                    link.receive(tensor, host)
                yield state


@final
class SnapshotElsewhere:
    """Another rank's part in rank 0's snapshot: this rank updates no stage before rank 0 has saved it.

    The leader of another host sends its host's pieces of a stage to rank 0. A stage that was sent counts as
    saved.

    Args:
        store: the store.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._up_to = store.ledger.num_commits
        self._sent = 0  # how many stages were sent
        for stage in store.ownership.replicated:
            # Rank 0 flushes this stage too, and waits there until all ranks have updated their replicas.
            store.flush_stage(stage)
        store.access.before_update = self._before_update

    def _before_update(self, stage: int, commit: int) -> None:
        if commit <= self._up_to:
            return
        if self._store.snapshots.link is not None:
            self._send(stage)
        else:
            name = self._store.stages[stage].name
            self._store.snapshots.saved.wait(stage, self._up_to + 1, f"rank 0 to save stage {name!r}")

    def run(self) -> None:
        """Send the pieces of this host to rank 0, if this rank is the leader of another host."""
        if self._store.snapshots.link is not None:
            for stage in self._store.stages:
                self._send(stage.index)

    def _send(self, stage: int) -> None:
        """Send a stage to rank 0, after all stages before it. Do nothing if it was sent already."""
        link = self._store.snapshots.link
        assert link is not None, "leaders send"
        with self._store.access.locks.exclusive(stage), torch.no_grad():
            # Checked under the lock: the training thread and `run` both send.
            if stage < self._sent:
                return
            if stage > 0:
                self._send(stage - 1)
            with closing(self._store.parameters.read(stage, up_to=self._up_to)) as pieces:
                for piece in pieces:
                    for tensor in (piece.master, *piece.states.values()):
                        link.send(tensor.contiguous(), 0)
            # After the send: an error must not make the stage count as saved.
            self._sent = stage + 1
            self._store.snapshots.saved.post(stage, self._up_to + 1)
