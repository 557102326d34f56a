"""Rules that rename and reshape tensors between two formats, the same rules in both directions."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headwater.core.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Transform:
    """An invertible change of one tensor.

    Attributes:
        forward: from the source format to the target format.
        inverse: back.
        shape: shape in the target format by the shape in the source format.
    """

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]

    @property
    def inverted(self) -> Transform:
        """The way back. Transforms that change shapes do so the same way in both directions."""
        return Transform(self.inverse, self.forward, self.shape)


IDENTITY = Transform(lambda tensor: tensor, lambda tensor: tensor, lambda shape: shape)
TRANSPOSE = Transform(torch.t, torch.t, lambda shape: shape[::-1])


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor in both formats.

    Attributes:
        source: its name in the source format; `{}` stands for the number of a layer.
        target: its name in the target format, with as many `{}`.
        transform: how its values change on the way.
    """

    source: str
    target: str
    transform: Transform = IDENTITY

    def __post_init__(self) -> None:
        assert self.source.count("{}") == self.target.count("{}"), f"{self} loses a layer number"

    @property
    def inverted(self) -> Rule:
        return Rule(self.target, self.source, self.transform.inverted)

    def rename(self, name: str) -> str | None:
        """The target name of the tensor called `name`; `None` if this is no rule for it."""
        pattern = re.escape(self.source).replace(r"\{\}", r"(\d+)")
        match = re.fullmatch(pattern, name)
        return None if match is None else self.target.format(*match.groups())


def invert(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of the opposite direction."""
    return tuple(rule.inverted for rule in rules)


def convert(
    tensors: Iterable[tuple[str, Tensor]], rules: Sequence[Rule], expected: Iterable[str], *, where: str
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in the target format, one at a time.

    Args:
        tensors: names and tensors in the source format.
        rules: how to convert them.
        expected: names in the source format that must come, each once, and no others.
        where: what is converted, for errors.

    Raises:
        CheckpointError: if a tensor is unknown, comes twice, or is missing at the end.
    """
    all_names = tuple(expected)
    missing = set(all_names)
    for name, tensor in tensors:
        if name not in missing:
            raise _unexpected(name, all_names, where)
        missing.remove(name)
        target, rule = match_rule(name, rules)
        yield target, rule.transform.forward(tensor)
    if missing:
        some = ", ".join(sorted(missing)[:5])
        raise CheckpointError(
            f"{len(missing)} tensors are missing: {some}",
            where=where,
            remedy="check that the checkpoint is complete and that the model's config belongs to it",
        )


def match_rule(name: str, rules: Sequence[Rule]) -> tuple[str, Rule]:
    """The target name of tensor `name`, and the rule that gives it."""
    matches = [(target, rule) for rule in rules if (target := rule.rename(name)) is not None]
    assert len(matches) == 1, f"{len(matches)} rules for {name}"
    return matches[0]


def _unexpected(name: str, expected: Sequence[str], where: str) -> CheckpointError:
    if name in expected:
        return CheckpointError(f"tensor {name} comes twice", where=where)
    near = difflib.get_close_matches(name, expected, n=2)
    hint = f"the nearest known names are {' and '.join(near)}" if near else "no known name is near to it"
    return CheckpointError(
        f"tensor {name} has no place in this model",
        where=where,
        remedy=f"{hint}; check that the model's config belongs to the checkpoint",
    )
