"""Rules between the parameters of a model here and the tensors of another format, the same both ways."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError
from headwater.core.units import counted


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of parameter here, and the tensors there that hold it.

    Attributes:
        ours: its name here; `{}` stands for the number of a layer.
        theirs: names there, each with as many `{}`; none of a parameter that is not stored there.
        split: from the parameter to the tensors; on the meta device it gives their shapes.
        join: back, to the same bits.
    """

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = _alone
    join: Callable[[Sequence[Tensor]], Tensor] = _only

    def __post_init__(self) -> None:
        layers = self.ours.count("{}")
        assert all(name.count("{}") == layers for name in self.theirs), f"{self} loses a layer number"

    def names(self, ours: str) -> tuple[str, ...] | None:
        """What the parameter called `ours` is called there; `None` if this is no rule for it."""
        pattern = re.escape(self.ours).replace(r"\{\}", r"(\d+)")
        match = re.fullmatch(pattern, ours)
        return None if match is None else tuple(name.format(*match.groups()) for name in self.theirs)


def same(ours: str, theirs: str) -> Rule:
    """The same values under another name."""
    return Rule(ours, (theirs,))


def transposed(ours: str, theirs: str) -> Rule:
    """A matrix that is transposed there."""
    return Rule(ours, (theirs,), lambda tensor: [tensor.t()], lambda tensors: _only(tensors).t())


def stacked(ours: str, theirs: Sequence[str], rows: Sequence[int]) -> Rule:
    """Tensors of `rows` rows each, below each other here."""
    return Rule(
        ours, tuple(theirs), lambda tensor: tensor.split(list(rows)), lambda parts: torch.cat(list(parts))
    )


def repeated(ours: str, theirs: Sequence[str]) -> Rule:
    """A tensor that is stored several times there; of these the first counts."""
    return Rule(ours, tuple(theirs), lambda tensor: [tensor] * len(theirs), lambda copies: copies[0])


def permuted(ours: str, theirs: str, order: Tensor) -> Rule:
    """Row `i` there is row `order[i]` here."""
    return reordered(same(ours, theirs), order)


def reordered(rule: Rule, order: Tensor, *, dim: int = 0) -> Rule:
    """The same rule with the elements of a dimension in another order: `i` there is `order[i]` here."""
    back = order.argsort()
    return dataclasses.replace(
        rule,
        split=lambda tensor: rule.split(tensor.index_select(dim, order.to(tensor.device))),
        join=lambda tensors: rule.join(tensors).index_select(dim, back),
    )


def with_constant(rule: Rule, theirs: str, value: Callable[[], Tensor]) -> Rule:
    """The same rule where one more tensor lies there, whose values are always the same.

    Args:
        rule: where the parameter lies there.
        theirs: the name of the tensor there.
        value: returns its values. A tensor with other values cannot be read.
    """

    def join(tensors: Sequence[Tensor]) -> Tensor:
        *parts, found = tensors
        tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
        if not torch.allclose(found.float(), value(), rtol=0, atol=tolerance):
            raise CheckpointError(
                f"tensor {theirs.replace('{}', '*')} has values that no model here computes with",
                where=rule.ours.replace("{}", "*"),
                remedy="import another model",
            )
        return rule.join(parts)

    return dataclasses.replace(
        rule,
        theirs=(*rule.theirs, theirs),
        split=lambda tensor: [*rule.split(tensor), value().to(tensor.device)],
        join=join,
    )


def scaled(rule: Rule, *factors: Tensor | float) -> Rule:
    """The same rule for tensors that hold the parameter times a factor; a factor of 1 keeps every bit.

    Args:
        rule: where the parameter lies there.
        factors: one for each tensor there; it is broadcast to the parameter's shape here.
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
    """A rule for the weight of a module and one for its bias.

    Args:
        rule: makes either.
        ours: the module here.
        theirs: the module there, or modules.
        args: what `rule` needs besides.
    """

    def of(kind: str) -> Rule:
        names = f"{theirs}.{kind}" if isinstance(theirs, str) else [f"{name}.{kind}" for name in theirs]
        return rule(f"{ours}.{kind}", names, *args)

    return of("weight"), of("bias")


def linear_transposed(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """A linear layer whose weight, and only that, is transposed there."""
    return transposed(f"{ours}.weight", f"{theirs}.weight"), same(f"{ours}.bias", f"{theirs}.bias")


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A parameter here with its rule.

    Attributes:
        name: the parameter.
        shape: its shape.
        theirs: the tensors there.
        rule: how to go from one to the other.
    """

    name: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors there."""
        return [tuple(part.shape) for part in self.rule.split(torch.empty(self.shape, device="meta"))]


def map_parameters(shapes: Mapping[str, tuple[int, ...]], rules: Iterable[Rule]) -> dict[str, Mapped]:
    """For each parameter the one rule that is for it."""
    rules, mapped = tuple(rules), {}
    for name, shape in shapes.items():
        found = [(theirs, rule) for rule in rules if (theirs := rule.names(name)) is not None]
        assert len(found) == 1, f"{len(found)} rules for {name}"
        mapped[name] = Mapped(name, tuple(shape), *found[0])
    return mapped


def unexpected(name: str, expected: Iterable[str], where: str) -> CheckpointError:
    """The error for a tensor that has no place: it names the nearest that has."""
    near = difflib.get_close_matches(name, list(expected), n=2)
    hint = f"the nearest known names are {' and '.join(near)}" if near else "no known name is near to it"
    return CheckpointError(
        f"tensor {name} has no place in this model",
        where=where,
        remedy=f"{hint}; check that the model's config belongs to the checkpoint",
    )


def missing(names: Iterable[str], where: str) -> CheckpointError:
    """The error for tensors that a checkpoint lacks."""
    names = sorted(names)
    return CheckpointError(
        f"{counted(len(names), 'missing tensor', 'missing tensors')}: {', '.join(names[:5])}",
        where=where,
        remedy="check that the checkpoint is complete and that the model's config belongs to it",
    )
