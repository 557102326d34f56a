"""Sparse training of a run: applies masks to weights, gradients and optimizer state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from headwater.models.layers.linear import replaced_products
from headwater.models.layers.replaced import Replacement, replaced
from headwater.optim.catalog import require_elementwise
from headwater.sparsity.products import MaskedProducts
from headwater.sparsity.sparsifier import Part, Sparsifier
from headwater.store.gathering import Gathering
from headwater.store.named import keys_by_name
from headwater.store.pruning import prune
from headwater.store.store import WeightStore
from headwater.stream.engine import Engine
from headwater.trainer.job import Trainable

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig

logger = logging.getLogger(__name__)


class SparseTraining:
    """Masks gradients before each update, and changes the masks at their steps.

    With several ranks, each has all masks, and applies them to its part of weights, gradients and optimizer
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
        """Make the masks that were not loaded from a checkpoint, and mask their weights."""
        for name in self._sparsifier.without_mask:
            mask = self._sparsifier.begin(name, self._weight(name))
            prune(self._store, self._keys[name], self._sparsifier.packed(name), mask)
        self._gathering.release()

    def before_update(self, step: int) -> None:
        """Mask the gradients of a step. Called when all gradients are computed, before the update.

        Args:
            step: number of the step, from 1.
        """
        gradients = self._store.gradients
        # First, because the sums lack the gradients of other ranks before this call.
        gradients.complete()
        changing = self._sparsifier.changing(step)
        if changing:
            if not gradients.norm(sorted(gradients.status.present)).isfinite():
                return  # the step will be skipped or raise an error, so the masks must not change
            self._change(changing, step)
        for name, key in self._keys.items():
            gradients.multiply(key, functools.partial(self._sparsifier.mask_of, name))

    def _change(self, changing: Iterable[str], step: int) -> None:
        """Change the masks of the parameters named in `changing`, except parameters without a gradient."""
        present = self._store.gradients.status.present
        for name in (name for name in changing if self._keys[name] in present):
            kept = self._sparsifier.change(
                name, self._weight(name), functools.partial(self._gradient, name), step
            )
            prune(self._store, self._keys[name], self._sparsifier.packed(name), kept)
        self._gathering.release()

    def _weight(self, name: str) -> Tensor:
        # The tensor is valid until the next call, which reuses its memory.
        (weight,) = self._gathering.bring([self._keys[name]])
        return weight.view(self._store.spec(self._keys[name]).shape)

    def _gradient(self, name: str) -> Tensor:
        gradient = self._store.gradients.borrow(self._keys[name])
        assert gradient is not None, "only parameters with a gradient are changed"
        return gradient.to("cpu")  # where the weights and masks are

    def state_dict(self) -> dict[str, Any]:
        """Return the masks as plain data and tensors."""
        return self._sparsifier.state_dict()


@final
class SkippedWeights:
    """The linear layers of a model whose masked weights need not be multiplied in training steps.

    Args:
        model: the model.
        sparsifier: the masks of its weights.
    """

    def __init__(self, model: nn.Module, sparsifier: Sparsifier) -> None:
        self._sparsifier = sparsifier
        self._needing_gradients = frozenset(sparsifier.names)
        # Made once, because a compiler would compile again for new objects.
        self._replacements = list(filter(None, (self._replacement(model, name) for name in sparsifier.names)))

    def _replacement(self, model: nn.Module, name: str) -> Replacement | None:
        layer, _, parameter = name.rpartition(".")
        if parameter != "weight":
            return None
        products = MaskedProducts(
            functools.partial(self._sparsifier.packed, name), lambda: name in self._needing_gradients
        )
        return replaced_products(model.get_submodule(layer), products)

    def skipped(self, step: int) -> AbstractContextManager[None]:
        """Return a context for a training step, from 1, in which the layers do not multiply masked weights.

        A step that changes masks may need the gradients of masked weights, so it also computes these.
        """
        self._needing_gradients = frozenset(self._sparsifier.needing_gradients(step))
        return replaced(self._replacements)


def start_sparse(engine: Engine, sparsifier: Sparsifier) -> SparseTraining:
    """Return the sparse training of a run. Masks that are not chosen yet are made now.

    Args:
        engine: holds the weights that the run starts with.
        sparsifier: the masks from which the run's plan was made.
    """
    sparse = SparseTraining(sparsifier, engine.store)
    sparse.begin()
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
        ConfigError: if the optimizer mixes the elements of a weight, or a name matches no weight.
        CheckpointError: if the masks are of other weights.
    """
    groups = [section.build() for section in init.sparsity]
    if not groups:
        return None
    require_elementwise(init.optimizer_spec.name, where="trainer.init.sparsity")
    shapes = {name: param.shape for name, param in trainable.model.named_parameters() if param.requires_grad}
    parts = {name: _parts(trainable.parts(name)) for name in shapes}
    named = {name: found for name, found in parts.items() if found}
    sparsifier = Sparsifier(groups, shapes, parts=named, seed=init.seed)
    if masks is not None:
        sparsifier.load_state_dict(masks)
    return sparsifier


def _parts(stacked: Any) -> list[Part]:
    """Return the rows of each matrix in a parameter, from what `Trainable.parts` returns for it."""
    parts, start = [], 0
    for name, rows in stacked:
        parts.append(Part(name, slice(start, None if rows < 0 else start + rows)))
        start += max(rows, 0)
    return parts
