"""Arguments of torch's operators: their values in a call, and those that an operator changes in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any


@functools.lru_cache(maxsize=4096)
def written_arguments(operator: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator changes in place by its schema."""
    arguments = operator._schema.arguments
    return tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)


def argument_values(
    names: Sequence[str], operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the values of arguments of one call of an operator; `None` for those that are left out.

    Args:
        names: the names of the arguments.
        operator: the operator.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
    """
    if not names:
        return []
    positions = {argument.name: index for index, argument in enumerate(operator._schema.arguments)}
    return [args[positions[name]] if positions[name] < len(args) else kwargs.get(name) for name in names]
