"""The exchange of each stage's gradients between hosts while the backward continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.core.worker_pools import WorkerPool
from headwater.fabric.fabric import Board, Fabric
from headwater.store.gradients.exchange import Exchange, Runs
from headwater.store.gradients.norms import gradient_norm
from headwater.store.gradients.rank_sums import RankSums

HostRun = Callable[[int, int, int], range]
"""Function (stage, parameter, host) -> the range of elements of the parameter that the host updates."""


@final
class StageExchange:
    """Sends the gradient sums of each stage to the hosts that update it, on a thread, during the backward.

    As soon as all ranks of the host have added to the sums of a stage, the host's leader sends every other
    host the elements which that host updates, and adds up what it receives. Stages go from the last to the
    first, as in the backward. All ranks make the same calls; only leaders send.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        sums: the sums of this host.
        host_run: says which host updates which elements.
    """

    def __init__(
        self, stages: Sequence[StageSpec], fabric: Fabric, sums: RankSums, host_run: HostRun
    ) -> None:
        self._stages = stages
        self._host = fabric.host
        self._sums = sums
        self._runs = [
            [_runs_of(stage, host, sums, host_run) for host in range(fabric.num_hosts)] for stage in stages
        ]
        self._keys: list[list[ParamKey]] = [[] for _ in stages]
        for key in sums.keys:
            self._keys[key[0]].append(key)
        self._link = fabric.connect("gradients")
        self._exchange = None if self._link is None else Exchange(self._link, sums.storage, stages)
        self._exchanged = Board(fabric, len(stages))  # by stage, the step whose sums are those of all hosts
        # Squares of the norms of the elements that this host updates.
        self._squares = torch.zeros(len(sums.keys), dtype=torch.float64, device="cpu")
        self._sender = WorkerPool(1, "headwater-exchange")
        self._sending: list[Future[None]] = []

    def start(self, step: int, micro_batch: int) -> None:
        """Start to send the sums of every stage, each once all ranks of this host have added to it."""
        if self._link is not None:
            # The backward completes the last stage first.
            for stage in reversed(self._stages):
                self._sending.append(self._sender.submit(self._reduce, stage.index, step, micro_batch))

    def _reduce(self, stage: int, step: int, micro_batch: int) -> None:
        for key in self._keys[stage]:
            what = f"the gradient of {self._stages[stage].params[key[1]].name}"
            self._sums.turns.wait_for_first(self._sums.slots[key], micro_batch, what)
            if not self._sums.has(key, step):  # no rank of this host has a gradient, but other hosts may
                self._sums.storage.clear(key)
        assert self._exchange is not None, "only leaders send"
        self._exchange.reduce(self._runs[stage])
        self.measure(key for key, _, _ in self._runs[stage][self._host])
        # The pages are released after `measure`, which reads the sums once more.
        self._sums.storage.release_pages(stage)
        # This is the last statement: other ranks of the host use the sums from here on.
        self._exchanged.post(stage, step)

    def finish(self, step: int) -> None:
        """Block until this host has the summed gradients of all elements that it updates."""
        sending, self._sending = self._sending, []
        for each in sending:
            each.result()
        for stage in self._stages:
            self._exchanged.wait(stage.index, step, f"the gradient of stage {stage.name!r} of all hosts")

    def add(self, gradients: Mapping[ParamKey, torch.Tensor], step: int) -> None:
        """Add one rank's gradients to the sums of elements that this host updates. Call `finish` first."""
        for key, gradient in gradients.items() if self._link is not None else ():
            for start, stop in self._own_runs(key):
                with self._sums.storage.changing(key, start, stop) as own:
                    own += gradient.reshape(-1)[start:stop]
                self._squares[self._sums.slots[key]] = gradient_norm(own) ** 2
            self._sums.note_written(key, step)

    def measure(self, keys: Iterable[ParamKey]) -> None:
        """Compute the norm of each of these sums, over the elements that this host updates."""
        for key in keys if self._link is not None else ():
            for start, stop in self._own_runs(key):
                square = gradient_norm(self._sums.storage.read(key, start, stop)) ** 2
                self._squares[self._sums.slots[key]] = square

    def gather_norms(self, step: int) -> None:
        """Write the norms over all hosts to `RankSums.norms`, and record which sums any host has."""
        if self._link is None:
            return
        keys = self._sums.keys
        here = torch.tensor(
            [float(self._sums.has(key, step)) for key in keys], dtype=torch.float64, device="cpu"
        )
        every = self._link.gather(torch.cat([self._squares, here]))
        squares, present = every.sum(0).split(len(keys))
        self._sums.norms.copy_(squares.sqrt())
        for slot in present.nonzero().flatten().tolist():
            self._sums.note_written(keys[slot], step)

    def spread(self, key: ParamKey) -> None:
        """Copy a sum to all hosts."""
        if self._exchange is not None:
            runs = self._runs[key[0]]
            self._exchange.spread([[run for run in its if run[0] == key] for its in runs])

    def multiply(self, key: ParamKey, factor: Callable[[], torch.Tensor]) -> None:
        """Multiply a sum by `factor()`, at the elements that this host updates."""
        for start, stop in self._own_runs(key):
            with self._sums.storage.changing(key, start, stop) as own:
                own.mul_(factor().reshape(-1)[start:stop])

    def _own_runs(self, key: ParamKey) -> list[tuple[int, int]]:
        """Return the elements that this host updates as [(start, stop)], or an empty list."""
        runs = self._runs[key[0]][self._host]
        return [(start, stop) for owned, start, stop in runs if owned == key]

    def close(self) -> None:
        """End the thread, then close the connection that it uses."""
        self._sender.shutdown(wait=True, cancel_futures=True)
        if self._link is not None:
            self._link.close()


def _runs_of(stage: StageSpec, host: int, sums: RankSums, host_run: HostRun) -> Runs:
    runs = []
    for param in range(len(stage.params)):
        run = host_run(stage.index, param, host)
        if (stage.index, param) in sums.slots and run.start < run.stop:
            runs.append(((stage.index, param), run.start, run.stop))
    return runs
