"""Sparse training of a run: the masks beside the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from headwater.core.errors import ConfigError
from headwater.sparsity.sparsifier import Part, Sparsifier
from headwater.store.named import StoredWeights
from headwater.store.store import WeightStore
from headwater.stream.engine import Engine
from headwater.trainer.job import Job

logger = logging.getLogger(__name__)


class SparseTraining:
    """Masks gradients before each update, and changes the masks when it is time to.

    Args:
        sparsifier: the masks.
        store: weights and gradients.
    """

    def __init__(self, sparsifier: Sparsifier, store: WeightStore) -> None:
        self._sparsifier = sparsifier
        self._store = store
        self.weights = StoredWeights(store)

    def before_update(self, step: int) -> None:
        """All gradients of a step are there: mask them.

        Args:
            step: number of the step, from 1.
        """
        gradients = self._store.gradients
        gradients.complete()
        if self._sparsifier.changes(step) and not gradients.norm(sorted(gradients.present)).isfinite():
            return  # the step will be refused, and leaves no trace
        for name in self._sparsifier.names:
            place = self.weights.places[name]
            gradient = gradients.expose(*place)
            if gradient is not None:
                self._sparsifier.mask(name, gradient, step, self.weights)
                gradients.changed(*place, gradient)

    def state_dict(self) -> dict[str, Any]:
        """The masks."""
        return self._sparsifier.state_dict()


def start_sparse(engine: Engine, job: Job, masks: Mapping[str, Any] | None) -> SparseTraining | None:
    """The masks of a run, if its params ask for any.

    Args:
        engine: holds the weights that the run starts with.
        job: the run.
        masks: of the checkpoint that it goes on from; they are made anew where there are none.

    Raises:
        ConfigError: if the optimizer mixes the elements of a weight, or no weight has such a name.
        CheckpointError: if the masks are of other weights.
    """
    groups = [section.build() for section in job.init.sparsity]
    if not groups:
        return None
    if not engine.store.rule.elementwise:
        raise ConfigError(
            f"{engine.store.rule.spec.name} does not update each weight by itself: masked ones would grow",
            where="trainer.init.sparsity",
            remedy="use an optimizer that does, such as AdamW or SGD",
        )
    params = [param for stage in engine.store.stages for param in stage.params if param.requires_grad]
    shapes = {param.name: torch.Size(param.shape) for param in params}
    parts = {name: _parts(job.trainable.parts(name)) for name in shapes}
    named = {name: found for name, found in parts.items() if found}
    sparsifier = Sparsifier(groups, shapes, parts=named, seed=job.init.seed)
    sparse = SparseTraining(sparsifier, engine.store)
    if masks is None:
        sparsifier.begin(sparse.weights)
    else:
        sparsifier.load_state_dict(masks)
    masked = sum(sparsifier.sparsity_of(name) * shapes[name].numel() for name in sparsifier.names)
    total = sum(shapes[name].numel() for name in sparsifier.names)
    logger.info("%d of %d weights in %d matrices are masked", masked, total, len(list(sparsifier.names)))
    return sparse


def _parts(stacked: Any) -> list[Part]:
    parts, start = [], 0
    for name, rows in stacked:
        parts.append(Part(name, slice(start, None if rows < 0 else start + rows)))
        start += max(rows, 0)
    return parts
