"""Rules that convert between our parameters and the tensors of another format, in both directions.

"Ours" are the parameters of this package, "theirs" the tensors of the other format.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError
from headwater.core.gather import gather
from headwater.core.names import similar
from headwater.core.units import counted

TRAIN_UNCONVERTED = "train the model unconverted: write `model: {hf: FOLDER}` in the params"
"""Remedy for a model of the transformers library that no model of this package can represent."""


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that converts one kind of our parameters to tensors of the other format, and back.

    Attributes:
        ours: name of our parameter; `{}` stands for the index of a layer.
        theirs: names of their tensors, each with the same number of `{}`; empty if they do not store it.
        split: converts our parameter to their tensors; also works on the meta device, for shapes.
        join: converts their tensors to our parameter; it inverts `split`.
    """

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = _alone
    join: Callable[[Sequence[Tensor]], Tensor] = _only

    def __post_init__(self) -> None:
        layers = self.ours.count("{}")
        assert all(name.count("{}") == layers for name in self.theirs), f"{self} loses a layer number"

    def names(self, ours: str) -> tuple[str, ...] | None:
        """Return the other format's names for our parameter `ours`, or `None` if this rule is not for it."""
        pattern = re.escape(self.ours).replace(r"\{\}", r"(\d+)")
        match = re.fullmatch(pattern, ours)
        return None if match is None else tuple(name.format(*match.groups()) for name in self.theirs)


def same(ours: str, theirs: str) -> Rule:
    """Return a rule for a tensor that the other format stores unchanged, under another name."""
    return Rule(ours, (theirs,))


def transposed(ours: str, theirs: str) -> Rule:
    """Return a rule for a matrix that the other format stores transposed."""
    return Rule(ours, (theirs,), lambda tensor: [tensor.t()], lambda tensors: _only(tensors).t())


def stacked(ours: str, theirs: Sequence[str], rows: Sequence[int]) -> Rule:
    """Return a rule for several tensors of the other format, of `rows` rows, that are stacked in ours."""
    return Rule(ours, tuple(theirs), lambda tensor: tensor.split(list(rows)), _stack)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    # Not `torch.cat`: its result is fresh memory in small pages, which cost more than the copy.
    return gather(parts, shape, dtype)


def repeated(ours: str, theirs: Sequence[str]) -> Rule:
    """Return a rule for a tensor that the other format stores in several copies; an import reads one."""
    return Rule(ours, tuple(theirs), lambda tensor: [tensor] * len(theirs), lambda copies: copies[0])


def permuted(ours: str, theirs: str, order: Tensor) -> Rule:
    """Return a rule for a tensor with permuted rows: the other format's row `i` is our row `order[i]`."""
    return reordered(same(ours, theirs), order)


def reordered(rule: Rule, order: Tensor, *, dim: int = 0) -> Rule:
    """Return `rule` with a permuted dimension: the other format's index `i` is our index `order[i]`."""
    back = order.argsort()
    return dataclasses.replace(
        rule,
        # On the device of the tensor: shapes are computed on the meta device.
        split=lambda tensor: rule.split(tensor.index_select(dim, order.to(tensor.device))),
        join=lambda tensors: rule.join(tensors).index_select(dim, back),
    )


def with_constant(rule: Rule, theirs: str, value: Callable[[], Tensor]) -> Rule:
    """Return `rule` with one more tensor of the other format, whose values must be given constants.

    Args:
        rule: rule of the parameter.
        theirs: name of the additional tensor.
        value: returns the constant values. An import of a tensor with other values raises `CheckpointError`.
    """

    def join(tensors: Sequence[Tensor]) -> Tensor:
        *parts, found = tensors
        tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
        if not torch.allclose(found.float(), value(), rtol=0, atol=tolerance):
            raise CheckpointError(
                f"tensor {theirs.replace('{}', '*')} has values that no model of this package represents",
                where=rule.ours.replace("{}", "*"),
                remedy=TRAIN_UNCONVERTED,
            )
        return rule.join(parts)

    return dataclasses.replace(
        rule,
        theirs=(*rule.theirs, theirs),
        split=lambda tensor: [*rule.split(tensor), value().to(tensor.device)],
        join=join,
    )


def scaled(rule: Rule, *factors: Tensor | float) -> Rule:
    """Return `rule` for a format that stores our parameter times a factor; a factor of 1 changes no bit.

    Args:
        rule: rule of the parameter.
        factors: one factor per tensor of theirs, broadcast to the shape of our parameter.
    """
    assert len(factors) == len(rule.theirs), f"{len(factors)} factors for {rule.theirs}"

    def split(tensor: Tensor) -> list[Tensor]:
        return [rule.split(tensor * _on(factor, tensor))[number] for number, factor in enumerate(factors)]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        joined = rule.join(tensors)
        return joined / _on(factors[0], joined)

    return dataclasses.replace(rule, split=split, join=join)


def _on(factor: Tensor | float, like: Tensor) -> Tensor | float:
    return factor.to(like.device) if isinstance(factor, Tensor) else factor


def both(
    rule: Callable[..., Rule], ours: str, theirs: str | Sequence[str], *args: object
) -> tuple[Rule, Rule]:
    """Return a rule for the weight of a module and one for its bias.

    Args:
        rule: function that makes a rule.
        ours: name of our module.
        theirs: name of their module, or names of several modules.
        args: further arguments of `rule`.
    """

    def of(kind: str) -> Rule:
        names = f"{theirs}.{kind}" if isinstance(theirs, str) else [f"{name}.{kind}" for name in theirs]
        return rule(f"{ours}.{kind}", names, *args)

    return of("weight"), of("bias")


def linear_transposed(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """Return the rules of a linear layer whose weight the other format stores transposed."""
    return transposed(f"{ours}.weight", f"{theirs}.weight"), same(f"{ours}.bias", f"{theirs}.bias")


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A parameter of our model, and the rule that converts it.

    Attributes:
        name: name of our parameter.
        shape: shape of our parameter.
        theirs: names of their tensors.
        rule: rule that converts between them.
    """

    name: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors in the other format."""
        return [tuple(part.shape) for part in self.rule.split(torch.empty(self.shape, device="meta"))]


def map_parameters(shapes: Mapping[str, tuple[int, ...]], rules: Iterable[Rule]) -> dict[str, Mapped]:
    """Return name -> parameter of our model with its rule; exactly one of `rules` must fit each."""
    rules, mapped = tuple(rules), {}
    for name, shape in shapes.items():
        found = [(theirs, rule) for rule in rules if (theirs := rule.names(name)) is not None]
        assert len(found) == 1, f"{len(found)} rules for {name}"
        mapped[name] = Mapped(name, tuple(shape), *found[0])
    return mapped


def unexpected(name: str, expected: Iterable[str], where: str) -> CheckpointError:
    """Return the error for an unknown tensor; it names the most similar known tensors."""
    near = similar(name, expected, count=2)
    hint = f"the most similar names are {' and '.join(near)}" if near else "the model has no similar name"
    return CheckpointError(
        f"tensor {name} does not belong to this model",
        where=where,
        remedy=f"{hint}; check that the model's config belongs to the checkpoint",
    )


def missing(names: Iterable[str], where: str) -> CheckpointError:
    """Return the error for tensors that a checkpoint lacks."""
    names = sorted(names)
    return CheckpointError(
        f"{counted(len(names), 'missing tensor', 'missing tensors')}: {', '.join(names[:5])}",
        where=where,
        remedy="check that the checkpoint is complete and that the model's config belongs to it",
    )
