"""The order in which ranks add to shared gradient sums. Uses only counters, no tensors and no threads."""

from __future__ import annotations

import dataclasses
from typing import Protocol, final

ROUNDS = 2
"""Turns of each rank per sum and micro-batch: one for a parameter's first gradient, one for a second."""


class Counters(Protocol):
    """Numbers that all ranks read. One rank at a time writes a number. Implemented by `fabric.Board`."""

    def post(self, slot: int, value: int) -> None:
        """Write the number in a slot."""

    def read(self, slot: int) -> int:
        """Return the number in a slot."""

    def wait(self, slot: int, value: int, what: str) -> None:
        """Block until the number in a slot is at least `value`. `what` says in errors what was waited for."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """The right of one rank to add once to one sum.

    Attributes:
        slot: which sum.
        number: how many turns at this sum come before it, those of all ranks counted together.
        micro_batch: which micro-batch it is for.
    """

    slot: int
    number: int
    micro_batch: int


@final
class TurnQueue:
    """Hands out turns, so that additions to a sum happen in the same order in every run.

    The order is rank 0, rank 1, … for the first gradient of a micro-batch, again rank 0, rank 1, … for second
    gradients, then the next micro-batch. A parameter that is used in several places may have a second
    gradient. Each rank uses every one of its turns, or lets it pass. So a counter per sum, the turns taken so
    far, says whose turn it is.

    No rank waits for a rank of a later turn. So ranks that use their turns in the order of `first` and
    `end_micro_batch` cannot deadlock.

    Args:
        num_slots: how many sums.
        rank: this rank.
        num_ranks: how many ranks.
        taken: per sum, the turns that ranks have taken.
        entered: per rank, the micro-batches that it has begun; if given, no rank adds to a sum before all
            ranks have begun the micro-batch. Then a rank that waits for a sum finds no later gradient in it.
    """

    def __init__(
        self, num_slots: int, rank: int, num_ranks: int, taken: Counters, entered: Counters | None = None
    ) -> None:
        self._num_slots = num_slots
        self._rank = rank
        self._num_ranks = num_ranks
        self._taken = taken
        self._entered = entered
        self._first: set[int] = set()  # slots whose first turn of this micro-batch was handed out
        self.micro_batch = 0

    @property
    def has_begun(self) -> bool:
        """True if `first` has returned a turn in the current micro-batch."""
        return bool(self._first)

    def first(self, slot: int) -> Turn | None:
        """Return the turn for a sum's first gradient in this micro-batch; `None` on a later call."""
        if slot in self._first:
            return None
        # This comes before the turn: rank 0 waits until every rank has begun the micro-batch.
        self._enter()
        self._first.add(slot)
        return self._turn(slot, 0)

    def end_micro_batch(self) -> list[tuple[Turn, bool]]:
        """Return all turns of this rank that `first` has not returned. Then the next micro-batch begins.

        The turns are in the order in which the rank must use them.

        Returns:
            Pairs of a turn and a flag: true if the turn is for a second gradient.
        """
        self._enter()
        first = [self._turn(slot, 0) for slot in range(self._num_slots) if slot not in self._first]
        # Every rank has a second turn at every sum, so that no rank must know the others' gradients.
        second = [self._turn(slot, 1) for slot in range(self._num_slots)]
        self._first.clear()
        # The count changes after the turns are made, because their numbers depend on it.
        self.micro_batch += 1
        return [*((turn, False) for turn in first), *((turn, True) for turn in second)]

    def _enter(self) -> None:
        if self._entered is not None:
            self._entered.post(self._rank, self.micro_batch + 1)

    def _turn(self, slot: int, round_: int) -> Turn:
        before = (self.micro_batch * ROUNDS + round_) * self._num_ranks
        return Turn(slot, before + self._rank, self.micro_batch)

    def wait(self, turn: Turn, what: str) -> None:
        """Block until all earlier turns at the same sum have ended. `what` names the sum in errors."""
        if self._entered is not None and self._rank == 0:  # all others wait for rank 0, so it is enough
            for rank in range(self._num_ranks):
                self._entered.wait(rank, turn.micro_batch + 1, f"rank {rank} to begin the backward")
        self._taken.wait(turn.slot, turn.number, what)

    def pass_on(self, turn: Turn) -> None:
        """End a turn; the next rank may add."""
        self._taken.post(turn.slot, turn.number + 1)

    def wait_for_first(self, slot: int, micro_batch: int, what: str) -> None:
        """Block until all ranks have used their first turn of a micro-batch at one sum."""
        self._taken.wait(slot, (micro_batch * ROUNDS + 1) * self._num_ranks, what)

    def have_ended_first(self, slot: int) -> bool:
        """True if all ranks have used their first turn of the present micro-batch at one sum."""
        return self._taken.read(slot) >= (self.micro_batch * ROUNDS + 1) * self._num_ranks

    def wait_for_all(self, slot: int, what: str) -> None:
        """Block until every rank has used as many turns at a sum as this rank."""
        rounds = self.micro_batch * ROUNDS + (slot in self._first)
        self._taken.wait(slot, rounds * self._num_ranks, what)
