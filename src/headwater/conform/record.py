"""Values that a training run records, and the first value that differs between two runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

Shown = tuple[str, Any]
"""A name, and a tensor or another value."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value that differs between two runs.

    Attributes:
        name: name of the value.
        plain: the value of the plain run, as text.
        streamed: the value of the streamed run, as text.
        detail: the first index that differs, the number of such elements, and the largest difference.
    """

    name: str
    plain: str
    streamed: str
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: plain {self.plain}, streamed {self.streamed}"
        return f"{text} ({self.detail})" if self.detail else text


def settled(value: Any) -> Any:
    """Return a copy of a recorded value that later steps do not change."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        if value.layout is not torch.strided:
            return value.detach().to_dense()
        return value.detach().as_subclass(torch.Tensor).clone()


def first_difference(plain: Sequence[Shown], streamed: Sequence[Shown]) -> Difference | None:
    """Return the first value that differs in name, dtype, shape or elements; `None` if all are equal."""
    for (name, expected), (other, found) in zip(plain, streamed, strict=False):
        if name != other:
            return Difference(f"the name of a value after {name!r}", name, other)
        difference = _difference(name, expected, found)
        if difference is not None:
            return difference
    if len(plain) != len(streamed):
        more = (plain if len(plain) > len(streamed) else streamed)[min(len(plain), len(streamed))][0]
        return Difference("number of values", str(len(plain)), str(len(streamed)), f"first extra: {more}")
    return None


def _difference(name: str, expected: Any, found: Any) -> Difference | None:
    """Return the difference of two values of one name, or `None`."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        both_nan = expected != expected and found != found
        same = type(expected) is type(found) and (both_nan or expected == found)
        return None if same else Difference(name, repr(expected), repr(found))
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return Difference(name, _form(expected), _form(found))
    if torch.equal(expected, found):
        return None
    unequal = (expected != found) & ~(expected.isnan() & found.isnan())
    if not bool(unequal.any()):
        return None  # NaN in the same places
    index = tuple(int(axis) for axis in unequal.nonzero()[0])
    detail = ""
    if index:
        count = int(unequal.sum())
        detail = f"first at {list(index)}, {count} of {expected.numel()} elements differ"
        if expected.is_floating_point():
            detail += f", by at most {float((expected - found)[unequal].abs().max()):.3g}"
    return Difference(name, repr(expected[index].item()), repr(found[index].item()), detail)


def _form(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
