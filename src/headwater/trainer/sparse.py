"""Sparse training of a run: applies masks to weights, gradients and optimizer state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwater.optim.catalog import require_elementwise
from headwater.sparsity.sparsifier import Part, Sparsifier
from headwater.store.gathering import Gathering
from headwater.store.named import keys_by_name
from headwater.store.pruning import prune
from headwater.store.store import WeightStore
from headwater.stream.engine import Engine
from headwater.trainer.job import Job, Trainable

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig

logger = logging.getLogger(__name__)


class SparseTraining:
    """Masks gradients before each update, and changes the masks at their steps.

    Each of several ranks has all masks, and applies them to its part of weights, gradients and optimizer
    state.

    Args:
        sparsifier: the masks.
        store: weights and gradients.
    """

    def __init__(self, sparsifier: Sparsifier, store: WeightStore) -> None:
        self._sparsifier = sparsifier
        self._store = store
        self._gathering = Gathering(store)
        keys = keys_by_name(store.stages)
        self._keys = {name: keys[name] for name in sparsifier.names}

    def begin(self) -> None:
        """Make the first masks, and mask the weights; some may have their masks since they were loaded."""
        new = {name: key for name, key in self._keys.items() if not self._store.parameters.masks.of(*key)}
        for stage, names in self._by_stage(new).items():
            masks = {
                index: self._sparsifier.begin(name, self._weight(stage, index))
                for index, name in names.items()
            }
            prune(self._store, stage, masks, masks)
        self._gathering.release()
        self.share()

    def share(self) -> None:
        """Use the masks that the store has, so that each is in memory once."""
        for name, key in self._keys.items():
            kept = self._store.parameters.masks.of(*key)
            if kept is not None:
                self._sparsifier.share(name, kept.mask)

    def before_update(self, step: int) -> None:
        """Mask the gradients of a step. Called when all gradients are computed, before the update.

        Args:
            step: number of the step, from 1.
        """
        gradients = self._store.gradients
        # This comes first: without it, the sums lack the gradients of other ranks.
        gradients.complete()
        changing = self._sparsifier.changing(step)
        if changing:
            if not gradients.norm(sorted(gradients.status.present)).isfinite():
                return  # the step will be refused: the masks must stay as they are
            self._change(changing, step)
        for name, key in self._keys.items():
            gradients.multiply(key, functools.partial(self._sparsifier.mask_of, name))

    def _change(self, changing: Iterable[str], step: int) -> None:
        """Change the masks of the parameters named in `changing`, except parameters without a gradient."""
        present = self._store.gradients.status.present
        trained = [name for name in changing if self._keys[name] in present]
        for stage, names in self._by_stage(trained).items():
            kept = {}
            for index, name in names.items():
                of_now = self._weight(stage, index), functools.partial(self._gradient, stage, index), step
                kept[index] = self._sparsifier.change(name, *of_now)
            prune(self._store, stage, {i: self._sparsifier.mask_of(n) for i, n in names.items()}, kept)
        self._gathering.release()
        self.share()

    def _by_stage(self, names: Iterable[str]) -> dict[int, dict[int, str]]:
        """Return stage -> index in the stage -> name, for the named parameters."""
        found: dict[int, dict[int, str]] = {}
        for name in names:
            stage, index = self._keys[name]
            found.setdefault(stage, {})[index] = name
        return found

    def _weight(self, stage: int, index: int) -> Tensor:
        # The tensor is valid until the next call, which reuses its memory.
        (weight,) = self._gathering.bring([(stage, index)])
        return weight.view(self._store.spec((stage, index)).shape)

    def _gradient(self, stage: int, index: int) -> Tensor:
        gradient = self._store.gradients.borrow((stage, index))
        assert gradient is not None, "only parameters with a gradient are changed"
        return gradient.to("cpu")  # where the weights and masks are

    def state_dict(self) -> dict[str, Any]:
        """Return the masks as plain data and tensors."""
        return self._sparsifier.state_dict()


def start_sparse(engine: Engine, job: Job, masks: Mapping[str, Any] | None) -> SparseTraining | None:
    """Return the sparse training of a run, or `None` if its params do not ask for it.

    Args:
        engine: holds the weights that the run starts with.
        job: the run.
        masks: of the checkpoint that the run continues from; if not given, new masks are made.

    Raises:
        ConfigError: if the optimizer mixes the elements of a weight, or a name matches no weight.
        CheckpointError: if the masks are of other weights.
    """
    if not job.init.sparsity:
        return None
    require_elementwise(engine.store.rule.spec.name, where="trainer.init.sparsity")
    sparsifier = make_sparsifier(job.init, job.trainable, masks)
    assert sparsifier is not None, "the params have a section sparsity"
    sparse = SparseTraining(sparsifier, engine.store)
    if masks is None:
        sparse.begin()
    else:
        sparse.share()
    sizes = {name: engine.store.spec(key).numel for name, key in keys_by_name(engine.store.stages).items()}
    masked = sum(sparsifier.sparsity_of(name) * sizes[name] for name in sparsifier.names)
    total = sum(sizes[name] for name in sparsifier.names)
    logger.info("%d of %d weights in %d matrices are masked", masked, total, len(list(sparsifier.names)))
    return sparse


def make_sparsifier(
    init: CommonInitConfig, trainable: Trainable, masks: Mapping[str, Any] | None = None
) -> Sparsifier | None:
    """Return the masks of a run's parameters, or `None` if its params do not ask for sparse training.

    Args:
        init: the params.
        trainable: the model.
        masks: of the checkpoint that the run continues from; if not given, no mask is chosen yet.

    Raises:
        ConfigError: if a name matches no weight.
        CheckpointError: if the masks are of other weights.
    """
    groups = [section.build() for section in init.sparsity]
    if not groups:
        return None
    shapes = {name: param.shape for name, param in trainable.model.named_parameters() if param.requires_grad}
    parts = {name: _parts(trainable.parts(name)) for name in shapes}
    named = {name: found for name, found in parts.items() if found}
    sparsifier = Sparsifier(groups, shapes, parts=named, seed=init.seed)
    if masks is not None:
        sparsifier.load_state_dict(masks)
    return sparsifier


def _parts(stacked: Any) -> list[Part]:
    parts, start = [], 0
    for name, rows in stacked:
        parts.append(Part(name, slice(start, None if rows < 0 else start + rows)))
        start += max(rows, 0)
    return parts
