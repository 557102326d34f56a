"""Host memory of masks by which the store leaves out elements of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.store.layout import PIECE_ELEMENTS

if TYPE_CHECKING:
    from headwater.plan.step_trace import Trace

_INDEX_BYTES, _FP32_BYTES = 8, 4


def mask_bytes(trace: Trace) -> int:
    """Return the bytes of all masks, and of the copies on which the update of masked parameters works.

    An update copies the wire values and gradients of kept elements, and lists their places. A batch of pieces
    ends with the piece that makes it full.

    Args:
        trace: the dry run.
    """
    masked = [[param for param in stage.params if param.kept is not None] for stage in trace.stages]
    bits = sum(param.numel // 8 for params in masked for param in params)
    most = max((sum(param.stored_numel for param in params) for params in masked), default=0)
    return bits + min(most, 2 * PIECE_ELEMENTS) * (_INDEX_BYTES + 2 * _FP32_BYTES)


def expanded_bytes(trace: Trace, state_of_an_element: float) -> int:
    """Return the bytes of a run of a masked parameter that a thread reads or writes with all its elements.

    Args:
        trace: the dry run.
        state_of_an_element: most bytes of a stored element beside the wire image.
    """
    sizes = (param.numel for stage in trace.stages for param in stage.params if param.kept is not None)
    # Master and state tensors of all elements, beside the places and the master of the kept ones.
    of_an_element = _FP32_BYTES + state_of_an_element + _INDEX_BYTES + _FP32_BYTES
    return int(min(max(sizes, default=0), PIECE_ELEMENTS) * of_an_element)
