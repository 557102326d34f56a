"""Moving averages of weights in a model, such as a teacher whose weights are an average of the student's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from headwater.core.errors import ConfigError
from headwater.core.stage import ParamKey, ParamSpec
from headwater.store.gathering import Gathering
from headwater.store.named import keys_by_name
from headwater.store.pieces import PieceState
from headwater.store.store import WeightStore
from headwater.trainer.job import Average


class MovingAverages:
    """Updates the moving averages of a model after each step, stage by stage.

    With several ranks, each rank updates its own part of each average.

    Reading the weights applies their pending updates first, because the average needs the new values.

    Args:
        store: holds the weights.
        averages: the pairs of weights and their moving averages.

    Raises:
        ConfigError: if an average is trained too, or the weights that it averages do not exist.
    """

    def __init__(self, store: WeightStore, averages: Sequence[Average]) -> None:
        self._store = store
        self._gathering = Gathering(store)
        self._stages: dict[int, dict[int, _Follower]] = {}  # by stage, and by index in the stage
        keys = keys_by_name(store.stages)
        for average in averages:
            for name in (name for name in keys if name.startswith(average.target)):
                source = average.source + name.removeprefix(average.target)
                _check(store.spec(keys[name]), source, keys)
                stage, index = keys[name]
                self._stages.setdefault(stage, {})[index] = _Follower(keys[source], average.momentum)

    def after_update(self, step: int) -> None:
        """Update all moving averages. Called after a step.

        Args:
            step: number of the step that was applied, from 1.
        """
        for stage, followers in self._stages.items():
            self._move(stage, followers, step)
        self._gathering.release()

    def _move(self, stage: int, followers: Mapping[int, _Follower], step: int) -> None:
        """Update the moving averages in a stage."""
        # All sources are read in one call, because another call would reuse the memory of these tensors.
        sources = self._gathering.bring(
            [follower.source for follower in followers.values()], to=[(stage, index) for index in followers]
        )
        followed = dict(zip(followers, sources, strict=True))

        def follow(piece: PieceState) -> None:
            kept = followers[piece.param].momentum(step)
            run = slice(piece.start, piece.start + piece.master.numel())
            piece.master.mul_(kept).add_(followed[piece.param][run], alpha=1 - kept)

        self._store.parameters.change(stage, followers.keys(), follow)


@dataclasses.dataclass(frozen=True)
class _Follower:
    """A weight that is the moving average of another weight.

    Attributes:
        source: the weight that it averages.
        momentum: returns m for the number of a step, where average = m * average + (1 - m) * weight.
    """

    source: ParamKey
    momentum: Callable[[int], float]


def _check(target: ParamSpec, source: str, keys: Mapping[str, ParamKey]) -> None:
    if target.requires_grad:
        raise ConfigError(
            f"{target.name} is a moving average of other weights, so it must not be trained",
            where="trainer.init.model.freeze",
            remedy="add a pattern that matches this name to freeze",
        )
    if source not in keys:
        raise ConfigError(
            f"{target.name} is to be the average of {source}, but the model has no such parameter",
            where="trainer.init.model.ema",
            remedy="name two models with the same parameters in ema",
        )
