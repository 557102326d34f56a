"""Operators that fake tensors cannot run, and what the dry run goes on with instead."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_map_only

_GROUPED_MM = torch.ops.aten._grouped_mm.default


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` on fake tensors, also where the result depends on data that they do not have.

    A number read from a tensor is 1, a truth value `False` (most are guards against bad data, or skip
    something), and of shapes that depend on data the largest is taken: every element is selected.
    """
    if func is _GROUPED_MM and args[0].dtype == torch.float32:
        return _narrow_grouped_mm(args, kwargs)
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        dtype = args[0].dtype
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    except DynamicOutputShapeException:
        return _on_ones(func, args, kwargs)


def _on_ones(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        real_args, real_kwargs = tree_map_only(torch.Tensor, _ones, (args, kwargs))
        out = func(*real_args, **real_kwargs)
    return tree_map_only(torch.Tensor, torch.empty_like, out)


def _ones(fake: torch.Tensor) -> torch.Tensor:
    return torch.ones(fake.shape, dtype=fake.dtype)


def _narrow_grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """torch (2.13) computes grouped products of fp32 matrices, but its fake operator takes bf16 alone."""
    left, right, *rest = args
    out: torch.Tensor = _GROUPED_MM(left.bfloat16(), right.bfloat16(), *rest, **kwargs)
    return out.to(left.dtype)
