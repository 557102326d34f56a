"""The user's own data loaders: repeated for several passes, and resumed at the exact batch.

[Note: randomness of data]
Random numbers that samplers and transforms draw for a batch are keyed by the pass and the position in it:
torch, `random` and numpy are seeded before each batch, and the generators of a DataLoader before each pass.
So a resumed run gets the same batches as a run that was never stopped, and evaluations do not change them.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.trainer.checkpoint_state import pack_state
from headwater.trainer.interrupt import shielded
from headwater.trainer.job import Batch
from headwater.utils.data.parts import Parts

logger = logging.getLogger(__name__)


@runtime_checkable
class Seekable(Protocol):
    """A loader whose position can be saved and set."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position at which the next pass begins."""
        ...


def seed_everything(seed: int) -> None:
    """Seed torch, `random` and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes no larger seeds


class Passes:
    """Iterates over the batches of a loader, pass by pass; see [Note: randomness of data].

    Args:
        loader: can be iterated over repeatedly.
        seed: of the run.
        name: of the function that returned the loader. It keys the randomness, and errors name it.

    Raises:
        DataError: if the loader cannot be iterated over.
    """

    def __init__(self, loader: Any, seed: int, name: str) -> None:
        if not isinstance(loader, Iterable):
            raise DataError(
                f"expected {name} to return an iterable of batches, got {loader!r}",
                where=name,
                remedy="return a torch.utils.data.DataLoader, or any iterable of batches",
            )
        self.loader = loader
        self.name = name
        self._seed = seed
        self._generators = [(generator, generator.initial_seed()) for generator in _generators(loader)]
        self._begun: Iterator[Batch] | None = None

    @property
    def length(self) -> int | None:
        """The number of batches in a pass; `None` if the loader has no length."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def first(self) -> Batch:
        """Return the first batch. The next pass from the beginning yields it again.

        Raises:
            DataError: if there is no batch.
        """
        batches = self._run(0, 0)
        batch = next(batches, None)
        if batch is None:
            raise DataError(
                "the loader has no batch", where=self.name, remedy="check its data and its batch size"
            )
        self._begun = itertools.chain([batch], batches)
        return batch

    def over(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of one pass.

        Args:
            epoch: number of the pass; passes with the same number are equal.
            start: position that was set in the loader, at which it begins.
        """
        begun, self._begun = self._begun, None
        return begun if begun is not None and (epoch, start) == (0, 0) else self._run(epoch, start)

    def _run(self, epoch: int, start: int) -> Iterator[Batch]:
        for generator, seed in self._generators:
            # The first pass keeps the user's seed: it yields the same batches as the loader without this run.
            generator.manual_seed(derive_seed(seed, epoch) if epoch else seed)
        batches = shielded(self.loader)
        for position in itertools.count(start):
            # The seeds come before the batch, because samplers and transforms draw from these generators.
            seed_everything(derive_seed(self._seed, self.name, epoch, position))
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield dict(batch) if isinstance(batch, Mapping) else batch


class RepeatedPasses:
    """Endless training data: repeats passes over a loader.

    A `Seekable` loader resumes at its saved position. With other loaders the batches before it are skipped.

    Args:
        passes: over the loader.
        parts: divides each batch among several ranks.
    """

    def __init__(self, passes: Passes, parts: Parts | None = None) -> None:
        self._passes = passes
        self._parts = parts or Parts()
        self._epoch = 0
        self._position = 0
        self._is_positioned = False  # true if the loader itself begins at the saved position
        self._is_checked = False

    def __iter__(self) -> Iterator[Batch]:
        return self._parts.of(self._batches())

    def _batches(self) -> Iterator[Batch]:
        while True:
            for batch in self._rest():
                self._position += 1
                yield batch
            if self._position == 0:
                raise DataError(
                    f"the loader has no batch in pass {self._epoch + 1}",
                    where=self._passes.name,
                    remedy="return an iterable that can be restarted; a generator cannot",
                )
            self._epoch, self._position = self._epoch + 1, 0

    def _rest(self) -> Iterator[Batch]:
        """Return the remaining batches of this pass."""
        if self._is_positioned:
            self._is_positioned = False
            return self._passes.over(self._epoch, self._position)
        batches = self._passes.over(self._epoch)
        if self._position:
            logger.info("skipping %d batches that the run has already used", self._position)
        # Read and dropped one by one: a list of them would hold all batches in memory.
        if sum(1 for _ in itertools.islice(batches, self._position)) < self._position:
            raise self._other_data(f"a pass has fewer than {self._position} batches")
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded.

        Raises:
            DataError: if a checkpoint cannot hold the position of the loader.
        """
        loader = self._passes.loader
        state = {
            "epoch": self._epoch,
            "position": self._position,
            "length": self._passes.length,
            "loader": loader.state_dict() if isinstance(loader, Seekable) else None,
        }
        if not self._is_checked:
            # Raise now: the first checkpoint may be hours later.
            pack_state({"data": state})
            self._is_checked = True
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position at which the iteration begins.

        Raises:
            DataError: if a pass had another number of batches.
        """
        if state["length"] != self._passes.length:
            raise self._other_data(f"a pass had {state['length']} batches, now it has {self._passes.length}")
        self._epoch, self._position = state["epoch"], state["position"]
        loader = self._passes.loader
        if state["loader"] is not None and isinstance(loader, Seekable):
            loader.load_state_dict(state["loader"])
            self._is_positioned = True

    def _other_data(self, what: str) -> DataError:
        return DataError(
            f"the checkpoint was made with other data: {what}",
            where=self._passes.name,
            remedy="use the data and batch size of the checkpoint, or start from only its weights",
        )


class RepeatedPass:
    """Data to evaluate on: each iteration yields the same pass. With several ranks, each gets a part."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._parts = Parts(equal=False)

    def __iter__(self) -> Iterator[Batch]:
        return self._parts.of(self._passes.over(0))


def _generators(loader: object) -> list[torch.Generator]:
    """Return the generators of a DataLoader and its sampler, each once."""
    if not isinstance(loader, DataLoader):
        return []
    batches = loader.batch_sampler or loader.sampler
    holders = (loader, loader.sampler, batches, vars(batches).get("sampler", batches))
    found = (vars(holder).get("generator") for holder in holders)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
