"""Arguments that an operation changes by its schema, also if it does not count the change.

torch counts changes of a tensor in its `_version`. Some operations do not count theirs: the fused optimizers
(`torch._fused_adamw_`), and operations of the user that were defined with `torch.library.define`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from headwater.core.operators import written_arguments


def declared_writes(func: Callable[..., Any], tree: Callable[[], Any]) -> set[int]:
    """Return the identities of the leaves among the arguments that an operation changes by its schema.

    Args:
        func: the operation.
        tree: returns its positional and its keyword arguments. It is called only if they are needed.
    """
    operator: Any = func
    if not isinstance(func, OpOverload | OpOverloadPacket):
        name = getattr(func, "__name__", "")
        operator = getattr(torch.ops.aten, name, None) if name.startswith("_fused_") else None
    names = _names(operator) if operator is not None else ()
    if not names:
        return set()
    args, kwargs = tree()
    given = {**dict(enumerate(args)), **kwargs}
    return set(map(id, tree_leaves([value for name, value in given.items() if name in names])))


@lru_cache(maxsize=4096)
def _names(operator: OpOverload | OpOverloadPacket) -> frozenset[int | str]:
    """Return the positions and the names of the arguments that an operator changes by its schema."""
    overloads: list[Any] = [operator]
    if isinstance(operator, OpOverloadPacket):
        overloads = [getattr(operator, overload) for overload in operator.overloads()]
    found: set[int | str] = set()
    for overload in overloads:
        for index, argument in enumerate(overload._schema.arguments):
            if argument.name in written_arguments(overload):
                found |= {argument.name} if argument.kwarg_only else {index, argument.name}
    return frozenset(found)
