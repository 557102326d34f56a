"""Gradient sums to which the ranks of one host add one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.store.gradients.additions import AdditionThread
from headwater.store.gradients.norms import gradient_norm
from headwater.store.gradients.turns import Turn, TurnQueue

if TYPE_CHECKING:
    from headwater.store.gradients.storage import GradientStorage


class Beginning(NamedTuple):
    """The generation of a gradient sum when this rank submits an addition to it, and how to prepare the sum.

    Attributes:
        generation: the generation of the sum. The first addition of a generation replaces the old content.
        prepare: run by the first rank of the host at the beginning of its turn.
    """

    generation: int
    prepare: Callable[[], None] | None = None


@final
class RankSums:
    """One gradient sum for each trainable parameter. The ranks of a host add to a sum one after another.

    Additions run on a thread while the model computes. A sum is filled if any rank has written to it in its
    current generation.

    Attributes:
        keys: the parameters.
        keys_of_stage: stage -> its parameters.
        slots: the number of each parameter's sum.
        storage: where the sums lie.
        turns: the order of additions.
        norms: one per sum, fp32, in memory that the ranks of the host share. Each rank measures some of the
            sums, and all ranks read the norms.

    Args:
        stages: the stages.
        fabric: the ranks.
        storage: where the sums lie.
        begin: called when an addition to a sum is submitted.
        together: true if no rank may add before all ranks have begun the micro-batch; see `TurnQueue`.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        fabric: Fabric,
        storage: GradientStorage,
        begin: Callable[[ParamKey], Beginning],
        *,
        together: bool,
    ) -> None:
        self._stages = stages
        self._fabric = fabric
        self.storage = storage
        self._begin = begin
        self.keys = list(storage.sizes.dtypes)
        self.keys_of_stage: dict[int, list[ParamKey]] = {}
        for key in self.keys:
            self.keys_of_stage.setdefault(key[0], []).append(key)
        self.slots = {key: slot for slot, key in enumerate(self.keys)}
        count, rank, num_ranks = len(self.keys), fabric.local_rank, fabric.local_size
        entered = Board(fabric, num_ranks) if together else None
        self.turns = TurnQueue(count, rank, num_ranks, Board(fabric, count), entered)
        self._written = Board(fabric, count)  # the generation in which a sum was last written
        self.norms = fabric.allocate(4 * count)[: 4 * count].view(torch.float32)
        self._second: dict[ParamKey, torch.Tensor] = {}  # further gradients of this micro-batch
        self._additions = AdditionThread(storage.sizes.largest_gradient_bytes)
        self._adding_to: int | None = None  # the stage to which the thread has last added

    def add(self, key: ParamKey, gradient: torch.Tensor) -> bool:
        """Submit a gradient to be added. A second one of the same parameter waits for `end_micro_batch`.

        Returns:
            True if too many gradients wait to be added.
        """
        turn = self.turns.first(self.slots[key])
        if turn is None:
            earlier = self._second.get(key)
            self._second[key] = gradient if earlier is None else earlier + gradient
        else:
            self._submit(key, gradient, turn)
        return self._additions.is_backlogged()

    def end_micro_batch(self, *, add_second: bool = True) -> dict[ParamKey, torch.Tensor]:
        """Submit second gradients, and pass on the turns for which this rank has no gradient.

        Args:
            add_second: false to return second gradients instead.

        Returns:
            The second gradients that are not added.
        """
        second, self._second = self._second, {}
        for turn, is_second in self.turns.end_micro_batch():
            key = self.keys[turn.slot]
            self._submit(key, second.get(key) if is_second and add_second else None, turn)
        return {} if add_second else second

    def _submit(self, key: ParamKey, gradient: torch.Tensor | None, turn: Turn) -> None:
        # The state of the sum is taken now: a later commit changes the generation.
        addition = functools.partial(self._use_turn, key, gradient, turn, self._begin(key))
        self._additions.submit(addition, 0 if gradient is None else gradient.nbytes)

    def _use_turn(
        self, key: ParamKey, gradient: torch.Tensor | None, turn: Turn, beginning: Beginning
    ) -> None:
        # The thread waits here, and not the caller in `_submit`, so that the backward continues meanwhile.
        self.turns.wait(turn, f"the gradient of {self._stages[key[0]].params[key[1]].name}")
        if beginning.prepare is not None and self._fabric.local_rank == 0:
            beginning.prepare()
        if gradient is not None:
            if self._adding_to != key[0]:
                self._release_pages()
            self._adding_to = key[0]
            self.storage.open(key[0])
            if self.has(key, beginning.generation):
                self.storage.add(key, gradient)
            else:
                self.storage.write(key, gradient)
                self.note_written(key, beginning.generation)
        self.turns.pass_on(turn)  # last: then the next rank reads what was written above

    def _release_pages(self) -> None:
        """On the host's last rank, release the page cache of the stage to which the thread has last added."""
        if self._adding_to is not None and self._fabric.local_rank == self._fabric.local_size - 1:
            self.storage.release_pages(self._adding_to)
        self._adding_to = None

    def drain(self) -> None:
        """Block until the gradients that wait to be added are no more than those of one stage."""
        self._additions.drain()

    def finish(self) -> None:
        """Block until this rank has done all additions that it has submitted."""
        self._additions.finish()
        self._release_pages()

    def has_second(self, stage: int) -> bool:
        """True if a second gradient of a parameter of a stage waits for `end_micro_batch`."""
        return any(key[0] == stage for key in self._second)

    def are_whole(self, stage: int) -> bool:
        """True if all ranks have used their turns for the first gradients of this micro-batch at a stage."""
        return all(self.turns.have_ended_first(self.slots[key]) for key in self.keys_of_stage[stage])

    def wait_for_all(self, key: ParamKey) -> None:
        """Block until all ranks have added their gradients to a sum."""
        self.turns.wait_for_all(self.slots[key], "the gradients of all ranks")

    def has(self, key: ParamKey, generation: int) -> bool:
        """True if a rank of this host has written to the sum of `key` in this generation; see `Beginning`."""
        return self._written.read(self.slots[key]) == generation

    def note_written(self, key: ParamKey, generation: int) -> None:
        """Record in which generation a sum was written. Generation 0 marks the sum as empty."""
        self._written.post(self.slots[key], generation)

    def whole(self, key: ParamKey) -> torch.Tensor:
        """Return a sum in the parameter's shape: a view of it, or a copy if the sum is on disk."""
        return self.storage.read(key).view(self._stages[key[0]].params[key[1]].shape)

    def is_mine(self, key: ParamKey) -> bool:
        """True if this rank, and no other rank of its host, measures a sum and multiplies it."""
        return self.slots[key] % self._fabric.local_size == self._fabric.local_rank

    def measure(self, keys: Iterable[ParamKey]) -> None:
        """Measure the norms of those of the sums that this rank has to measure."""
        for key in keys:
            if self.is_mine(key):
                self.norms[self.slots[key]] = gradient_norm(self.storage.read(key))

    def norm(self, key: ParamKey) -> torch.Tensor:
        """Return a copy of the norm of a sum that a rank has measured. The next step overwrites the norm."""
        return self.norms[self.slots[key]].clone()

    def close(self) -> None:
        """Release the thread, memory and files."""
        # The thread of the additions ends before the storage, to which it adds.
        self._additions.close()
        self.storage.close()
