"""Dtypes that operators refuse in a real computation, but accept in a dry run on shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.plan.trace_recorder import OperatorCall

_aten = torch.ops.aten

_ONE_DTYPE = frozenset({
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.convolution,
    _aten.binary_cross_entropy,
})  # fmt: skip
"""Operators for which all tensors of a call must have the same dtype."""

_CLASSES = (torch.int64, torch.uint8)
_INDICES = (torch.int64, torch.int32)
_INDEX_ARGUMENT = {
    _aten.nll_loss_forward: (1, _CLASSES),
    _aten.nll_loss2d_forward: (1, (torch.int64,)),
    _aten.gather: (2, _INDICES),
    _aten.scatter: (2, _INDICES),
    _aten.scatter_add: (2, _INDICES),
    _aten.index_add: (2, _INDICES),
    _aten.index_select: (2, _INDICES),
}
"""Position of an argument that holds indices, and the dtypes that it may have."""


def dtype_problem(call: OperatorCall) -> str | None:
    """Return as text which dtypes an operator takes and which it got; `None` if the dtypes are right."""
    name, func = call.func._overloadpacket, call.func
    if name in _ONE_DTYPE:
        # The dtypes have the order of the arguments, so that the text reads like the call.
        found = list(dict.fromkeys(arg.dtype for arg in call.args if isinstance(arg, torch.Tensor)))
        return f"{func} takes tensors of one dtype, got {_listed(found)}" if len(found) > 1 else None
    position, allowed = _INDEX_ARGUMENT.get(name, (0, ()))
    if not allowed or call.args[position].dtype in allowed:
        return None
    given = _listed([call.args[position].dtype])
    return f"{func} takes classes or indices as {_listed(allowed, ' or ')}, got {given}"


def _listed(dtypes: Sequence[torch.dtype], separator: str = " and ") -> str:
    return separator.join(str(dtype).removeprefix("torch.") for dtype in dtypes)
