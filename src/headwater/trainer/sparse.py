"""Sparse training of a run: applies masks to weights, gradients and optimizer state."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headwater.models.layers.linear import replace_products
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
        self._needing_gradients = frozenset(self._keys)

    def begin(self) -> None:
        """Make the first masks, and mask the weights; some may have their masks since they were loaded."""
        for name in self._sparsifier.without_mask:
            mask = self._sparsifier.begin(name, self._weight(name))
            prune(self._store, self._keys[name], self._sparsifier.packed(name), mask)
        self._gathering.release()

    @contextmanager
    def skipping_masked(self, model: nn.Module) -> Iterator[None]:
        """Enter a context in which the linear layers of the model do not multiply masked weights."""
        with ExitStack() as replaced:
            for name in self._keys:
                layer, _, parameter = name.rpartition(".")
                if parameter != "weight":
                    continue
                mask = functools.partial(self._sparsifier.packed, name)
                products = MaskedProducts(mask, functools.partial(self._needs_gradient, name))
                restore = replace_products(model.get_submodule(layer), products)
                if restore is not None:
                    replaced.callback(restore)
            yield

    def begin_step(self, step: int) -> None:
        """Note the number of the step whose gradients are computed next, from 1."""
        self._needing_gradients = frozenset(self._sparsifier.needing_gradients(step))

    def _needs_gradient(self, name: str) -> bool:
        return name in self._needing_gradients

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
    parts, start = [], 0
    for name, rows in stacked:
        parts.append(Part(name, slice(start, None if rows < 0 else start + rows)))
        start += max(rows, 0)
    return parts
