"""Sparse training: the masks of a model's weights, and the updates of these masks."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.seeding import derive_seed
from headwater.sparsity.masks import INIT_METHODS, PackedMask, exchanged, first_mask, largest, num_kept
from headwater.sparsity.schedules import Cadence, Constant, Value

_DENSE_BY_DEFAULT = re.compile(
    r"embed|position|relative_bias|patches|timestep|(^|\.)(lm_head|head|heads|classifier|nsp|mlm|cls)\."
    r"|^(output|projection|pooler)\."
)
"""Pattern of the names of embeddings, position tables and heads: dense unless `param_filter` selects them."""

Algorithm = Literal["static", "gmp", "set", "rigl"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix with its own sparsity: a whole parameter, or some rows of one.

    Attributes:
        name: the name with which `param_filter` is compared.
        rows: the matrix's rows in the parameter; all by default.
    """

    name: str
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The sparsity settings of a group of weights.

    Attributes:
        sparsity: fraction of the elements that are zero, as a function of the step.
        algorithm: `static` never changes the mask. `gmp` drops the smallest weights as the sparsity grows
            (arXiv:1710.01878). `set` replaces the smallest weights by random elements (arXiv:1707.04780).
            `rigl` replaces them by the elements with the largest gradients (arXiv:1911.11134).
        init_method: how the first mask is chosen; see `headwater.sparsity.masks.first_mask`.
        drop_fraction: fraction of the kept weights to replace, as a function of the step (`set` and `rigl`).
        update: the steps at which the mask changes.
        param_filter: shell-style patterns of parameter names. If empty, the group takes all matrices except
            embeddings (of tokens, positions, patches) and output heads, which are recognised by name.

    Raises:
        ConfigError: if a value is unknown, out of range or does not fit the algorithm.
    """

    sparsity: Value
    algorithm: Algorithm = "static"
    init_method: str = "random"
    drop_fraction: Value | None = None
    update: Cadence | None = None
    param_filter: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.init_method not in INIT_METHODS:
            raise ConfigError(
                f"unknown init_method {self.init_method!r}", remedy=f"write {' or '.join(INIT_METHODS)}"
            )
        if not 0 <= self.sparsity(0) < 1:
            raise ConfigError(
                f"expected a sparsity >= 0 and < 1, got {self.sparsity(0)}",
                remedy="write the fraction of the weights that are zero, such as 0.8",
            )
        if self.algorithm != "gmp" and not isinstance(self.sparsity, Constant):
            raise ConfigError(
                f"algorithm {self.algorithm} needs a constant sparsity, got a schedule",
                remedy="write a number, or write algorithm: gmp",
            )

    def takes(self, name: str, dimensions: int) -> bool:
        """True if this group applies to a parameter.

        Args:
            name: the parameter's name.
            dimensions: number of dimensions of the parameter.
        """
        if self.param_filter:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.param_filter)
        return dimensions > 1 and not _DENSE_BY_DEFAULT.search(name)

    def updates(self, step: int) -> bool:
        """True if the mask changes in this step."""
        return self.algorithm != "static" and self.update is not None and self.update.includes(step)


class Sparsifier:
    """The masks of a model's parameters, and their updates.

    A `Sparsifier` computes masks but does not apply them. The training code multiplies the weights by the
    first masks (`begin`). Before each optimizer step it masks the gradients and, where a mask changes
    (`changing`, `change`), the weight and its optimizer state. Masked elements then stay zero under any
    optimizer that updates each element independently.

    Args:
        groups: sparsity settings. A parameter gets those of the first group that takes its name.
        shapes: shape of each trainable parameter, by name.
        parts: for parameters that consist of several matrices, these matrices in the order of their rows.
        seed: seed of the random masks.

    Raises:
        ConfigError: if a group does not match any parameter.
    """

    def __init__(
        self,
        groups: Sequence[Sparsity],
        shapes: Mapping[str, torch.Size],
        *,
        parts: Mapping[str, Sequence[Part]] | None = None,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._shapes = shapes
        self._masks: dict[str, PackedMask] = {}
        self._restored: frozenset[str] = frozenset()
        self._groups: dict[str, list[tuple[Part, Sparsity]]] = {}
        found: set[int] = set()
        for name, shape in shapes.items():
            for part in (parts or {}).get(name, (Part(name),)):
                taking = (
                    number
                    for number, group in enumerate(groups)
                    if group.takes(part.name, len(shape)) or group.takes(name, len(shape))
                )
                number = next(taking, None)
                if number is not None:
                    found.add(number)
                    self._groups.setdefault(name, []).append((part, groups[number]))
        for number, group in enumerate(groups):
            if number not in found:
                patterns = " or ".join(group.param_filter) or "the default filter"
                raise ConfigError(
                    f"no trainable parameter matches {patterns}",
                    where="sparsity: param_filter",
                    remedy=f"write patterns that match names such as {_example(shapes, parts)}",
                )

    @property
    def names(self) -> Iterable[str]:
        """Names of the sparse parameters."""
        return self._groups.keys()

    def numel(self, name: str) -> int:
        """Return the number of elements of a sparse parameter."""
        return self._shapes[name].numel()

    def changes(self, name: str) -> bool:
        """True if the mask of a parameter may change during training."""
        return any(group.algorithm != "static" and group.update for _, group in self._groups[name])

    @property
    def without_mask(self) -> list[str]:
        """Names of the sparse parameters whose first mask is not chosen yet."""
        return [name for name in self.names if name not in self._masks]

    def begin(self, name: str, weight: Tensor) -> Tensor:
        """Choose and store a parameter's first mask. The caller applies it to the weight and optimizer state.

        Args:
            name: the parameter's name.
            weight: its values, on the CPU.

        Returns:
            A bool tensor of the weight's shape: true where an element is kept.
        """
        mask = torch.ones(weight.shape, dtype=torch.bool, device="cpu")
        for part, group in self._groups[name]:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "sparsity", part.name, 0))
            mask[part.rows] = first_mask(weight[part.rows], group.sparsity(0), group.init_method, generator)
        self._masks[name] = PackedMask(mask)
        return mask

    def capacity(self, name: str) -> int | None:
        """Return the most elements of a parameter that its masks keep; `None` if that is not known yet.

        The sparsity never falls, so this is the number that the present mask keeps, or the first one.
        """
        if name in self._masks:
            return self._masks[name].count
        shape = self._shapes[name]
        rows, row_numel = shape[0] if shape else 1, math.prod(shape[1:])
        kept = rows * row_numel
        for part, group in self._groups[name]:
            if group.init_method == "from_zeros":
                return None
            numel = len(range(*part.rows.indices(rows))) * row_numel
            kept += num_kept(numel, group.sparsity(0)) - numel
        return kept

    def first(self, name: str, weight: Callable[[], Tensor]) -> PackedMask:
        """Return the mask of a parameter that was restored from a checkpoint, or choose its first mask.

        Args:
            name: the parameter's name.
            weight: returns its values, on the CPU; called only if the mask is chosen.
        """
        if name not in self._restored:
            self.begin(name, weight())
        return self._masks[name]

    def changing(self, step: int) -> list[str]:
        """Return the names of the parameters whose mask changes in this step."""
        return [name for name, own in self._groups.items() if any(group.updates(step) for _, group in own)]

    def needing_gradients(self, step: int) -> list[str]:
        """Return the names of the parameters whose gradient `change` needs in this step."""
        return [
            name
            for name, own in self._groups.items()
            if any(group.algorithm == "rigl" and group.updates(step) for _, group in own)
        ]

    def change(self, name: str, weight: Tensor, gradient: Callable[[], Tensor], step: int) -> Tensor:
        """Choose and store a parameter's next mask. The caller then applies `mask_of` to the weight.

        Args:
            name: the parameter's name.
            weight: its values, on the CPU.
            gradient: returns the gradient of the loss for every element, including masked ones. Called only
                if the algorithm needs it.
            step: number of the optimizer step, from 1. Call this only when it is certain that the optimizer
                will take the step.

        Returns:
            A bool tensor of the weight's shape: true where an element was kept before and still is. The
            caller sets the optimizer state of all other elements to zero.
        """
        before, gradient = self.mask_of(name), functools.cache(gradient)
        mask = before.clone()
        for part, group in self._groups[name]:
            if group.updates(step):
                mask[part.rows] = self._next_mask(part, group, step, weight, before, gradient)
        self._masks[name] = PackedMask(mask)
        return before & mask

    def _next_mask(
        self,
        part: Part,
        group: Sparsity,
        step: int,
        whole: Tensor,
        masks: Tensor,
        gradient: Callable[[], Tensor],
    ) -> Tensor:
        weight, mask = whole[part.rows], masks[part.rows]
        if group.algorithm == "gmp":
            present = weight.abs().masked_fill_(~mask, -1.0)
            return largest(present, min(num_kept(weight.numel(), group.sparsity(step)), int(mask.sum())))

        def scores() -> Tensor:
            if group.algorithm == "rigl":
                return gradient().detach()[part.rows].abs().float().cpu()
            seed = derive_seed(self._seed, "sparsity", part.name, step)
            generator = torch.Generator().manual_seed(seed)
            return torch.rand(weight.shape, dtype=torch.float32, generator=generator, device="cpu")

        assert group.drop_fraction is not None, f"algorithm {group.algorithm} needs a drop_fraction"
        return exchanged(weight, mask, scores, group.drop_fraction(step))

    def mask_of(self, name: str) -> Tensor:
        """Return the current mask of a parameter, bool."""
        return self._masks[name].unpack()

    def packed(self, name: str) -> PackedMask:
        """Return the current mask of a parameter. A later change of the mask stores a new object."""
        return self._masks[name]

    def sparsity_of(self, name: str) -> float:
        """Return the fraction of a parameter's elements that are masked."""
        return 1 - self._masks[name].count / max(self._shapes[name].numel(), 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks by parameter name: uint8 tensors with one bit per element."""
        return {name: mask.bits for name, mask in self._masks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the masks that `state_dict` returned.

        Raises:
            CheckpointError: if the state has masks of other parameters or sizes.
        """
        sizes = {name: -(-self._shapes[name].numel() // 8) for name in self.names}
        if {name: len(bits) for name, bits in state.items()} != sizes:
            raise CheckpointError(
                "the masks in the checkpoint are not those of the parameters that `sparsity` selects",
                remedy="use the sparsity settings of the checkpoint, or load only the weights",
            )
        self._masks = {name: PackedMask.of_bits(bits, self._shapes[name]) for name, bits in state.items()}
        self._restored = frozenset(state)


def _example(shapes: Mapping[str, torch.Size], parts: Mapping[str, Sequence[Part]] | None) -> str:
    names = (part.name for name in shapes for part in (parts or {}).get(name, (Part(name),)))
    return next((name for name in names if "embedding" not in name), "none")
