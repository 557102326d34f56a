"""Weights that follow other weights of the same model: a teacher that is the average of its student."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.core.errors import ConfigError
from headwater.store.named import StoredWeights
from headwater.store.store import WeightStore
from headwater.trainer.job import Average


class MovingAverages:
    """Moves the averages of a model after each step; two weights are in memory at a time.

    Of several ranks, which share the store, each makes the average and writes its share of it.

    An update that waits for its stage is applied by this, since the average is of what it makes.

    Args:
        store: holds the weights.
        averages: which follow which.

    Raises:
        ConfigError: if one that follows is trained, or there is none to follow.
    """

    def __init__(self, store: WeightStore, averages: Sequence[Average]) -> None:
        self._weights = StoredWeights(store)
        self._pairs: list[tuple[str, str, Callable[[int], float]]] = []
        for average in averages:
            names = [name for name in self._weights.places if name.startswith(average.target)]
            for target in names:
                source = average.source + target.removeprefix(average.target)
                self._check(store, target, source)
                self._pairs.append((source, target, average.momentum))

    def _check(self, store: WeightStore, target: str, source: str) -> None:
        stage, index = self._weights.places[target]
        if store.stages[stage].params[index].requires_grad:
            raise ConfigError(
                f"{target} is the average of other weights, and trained too",
                where="trainer.init.model.freeze",
                remedy="freeze it",
            )
        if source not in self._weights.places:
            raise ConfigError(
                f"{target} is to follow {source}, and there is none",
                where="trainer.init.model.ema",
                remedy="name models of the same shape",
            )

    def after_update(self, step: int) -> None:
        """A step was applied: follow it.

        Args:
            step: its number, from 1.
        """
        for source, target, momentum in self._pairs:
            kept = momentum(step)
            mean = self._weights.read(target).mul_(kept).add_(self._weights.read(source), alpha=1 - kept)
            self._weights.write(target, mean)
