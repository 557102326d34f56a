"""Keeps weights sparse while they are trained, wherever they are."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.seeding import derive_seed
from headwater.sparsity.masks import INIT_METHODS, PackedMask, exchanged, first_mask, largest, num_kept
from headwater.sparsity.schedules import Cadence, Constant, Value

_NO_INNER_MATRIX = re.compile(
    r"embed|position|relative_bias|patches|timestep|(^|\.)(lm_head|head|heads|classifier|nsp|mlm|cls)\."
    r"|^(output|projection|pooler)\."
)
"""In names of matrices that read what the model is given, or write what it gives."""

Algorithm = Literal["static", "gmp", "set", "rigl"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix whose sparsity is its own: a parameter, or some rows of one.

    Attributes:
        name: what patterns are compared with.
        rows: of the parameter.
    """

    name: str
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """How sparse the weights of some names are.

    Attributes:
        sparsity: share of the elements that are zero, by step.
        algorithm: `static` leaves the mask as it is; `gmp` drops the smallest weights as the sparsity grows
            (arXiv:1710.01878); `set` exchanges the smallest for random ones (arXiv:1707.04780); `rigl`
            for those of the largest gradients (arXiv:1911.11134).
        init_method: how the first mask is made; see `headwater.sparsity.masks.first_mask`.
        drop_fraction: share of the weights to exchange, by step.
        update: the steps at which the mask changes.
        param_filter: patterns of names; where empty, all matrices but those whose names say that they embed
            something (tokens, positions, patches) or belong to the model's head.

    Raises:
        ConfigError: if the values make no sense.
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
                f"there is no init_method {self.init_method!r}", remedy=f"write {' or '.join(INIT_METHODS)}"
            )
        if not 0 <= self.sparsity(0) < 1:
            raise ConfigError(
                f"a sparsity of {self.sparsity(0)} is no share of the weights",
                remedy="write a number from 0 to below 1",
            )
        if self.algorithm != "gmp" and not isinstance(self.sparsity, Constant):
            raise ConfigError(
                f"the sparsity of {self.algorithm} does not change with the step",
                remedy="write a number, or the algorithm gmp",
            )

    def takes(self, name: str, dimensions: int) -> bool:
        """Whether it is meant for a matrix of that name."""
        if self.param_filter:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.param_filter)
        return dimensions > 1 and not _NO_INNER_MATRIX.search(name)

    def updates(self, step: int) -> bool:
        """Whether the mask changes in this step."""
        return self.algorithm != "static" and self.update is not None and self.update.includes(step)


class Sparsifier:
    """The masks of a model, and how they change.

    Whoever trains masks the weights with the first masks, and before each step of the optimizer the gradients
    and, where a mask changes, weight and optimizer state. What is masked then stays zero under any optimizer
    that updates each element by itself.

    Args:
        groups: the first that takes a name counts.
        shapes: shape of each trainable parameter by name.
        parts: of a parameter, in the order of its rows; the whole if not given.
        seed: of what is random.

    Raises:
        ConfigError: if a group takes no name.
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
                raise ConfigError(
                    f"no trainable parameter is called like {' or '.join(group.param_filter) or 'a matrix'}",
                    where="sparsity: param_filter",
                    remedy=f"write patterns of names such as {_example(shapes, parts)}",
                )

    @property
    def names(self) -> Iterable[str]:
        """The parameters that are sparse."""
        return self._groups.keys()

    def begin(self, name: str, weight: Tensor) -> Tensor:
        """The first mask of a parameter, whose weight and optimizer state are to be masked with it.

        Args:
            name: of the parameter.
            weight: its values, on the CPU.
        """
        mask = torch.ones(weight.shape, dtype=torch.bool)
        for part, group in self._groups[name]:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "sparsity", part.name, 0))
            mask[part.rows] = first_mask(weight[part.rows], group.sparsity(0), group.init_method, generator)
        self._masks[name] = PackedMask(mask)
        return mask

    def changing(self, step: int) -> list[str]:
        """The parameters whose mask changes in this step."""
        return [name for name, own in self._groups.items() if any(group.updates(step) for _, group in own)]

    def change(self, name: str, weight: Tensor, gradient: Callable[[], Tensor], step: int) -> Tensor:
        """Change the mask of a parameter, whose weight is to be masked with `mask_of` then.

        Args:
            name: of the parameter.
            weight: its values, on the CPU.
            gradient: gives that of the whole loss by every element, masked ones too, where it is needed.
            step: of the optimizer, from 1. It must be sure that the optimizer takes it.

        Returns:
            Where elements are kept that were there before, bool: all other optimizer state is to be zero.
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
            scores = weight.abs().masked_fill(~mask, -1.0)
            return largest(scores, min(num_kept(weight.numel(), group.sparsity(step)), int(mask.sum())))
        if group.algorithm == "set":
            seed = derive_seed(self._seed, "sparsity", part.name, step)
            scores = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
        else:
            scores = gradient().detach()[part.rows].float().abs().cpu()
        assert group.drop_fraction is not None, "whoever exchanges weights says how many"
        return exchanged(weight, mask, scores, group.drop_fraction(step))

    def mask_of(self, name: str) -> Tensor:
        """The mask of a parameter, bool."""
        return self._masks[name].unpack()

    def sparsity_of(self, name: str) -> float:
        """Share of the elements of a parameter that are masked."""
        return 1 - float(self._masks[name].unpack().double().mean())

    def state_dict(self) -> dict[str, Any]:
        """The masks, a bit for each element."""
        return {name: mask.bits for name, mask in self._masks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            CheckpointError: if other parameters were sparse.
        """
        sizes = {name: -(-self._shapes[name].numel() // 8) for name in self.names}
        if {name: len(bits) for name, bits in state.items()} != sizes:
            raise CheckpointError(
                "the masks in the checkpoint are of other parameters than those that are sparse here",
                remedy="set sparsity as it was, or load the weights alone",
            )
        self._masks = {name: PackedMask.of_bits(bits, self._shapes[name]) for name, bits in state.items()}


def _example(shapes: Mapping[str, torch.Size], parts: Mapping[str, Sequence[Part]] | None) -> str:
    names = (part.name for name in shapes for part in (parts or {}).get(name, (Part(name),)))
    return next((name for name in names if "embedding" not in name), "none")
