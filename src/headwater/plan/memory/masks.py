"""Host memory of the masks of sparse training, and of the copies that they make necessary."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headwater.store.layout import PIECE_ELEMENTS

if TYPE_CHECKING:
    from headwater.plan.step_trace import Trace

_INDEX_BYTES, _FP32_BYTES = 8, 4
_CHOICE_BYTES = 16
"""Bytes for each element of a parameter while its mask is chosen (`headwater.sparsity`).

These are 3 fp32 values (the weight, its score, and a copy of the score that is partitioned) and 4 bools, as
`tests/stream/test_masking_memory.py` measures.
"""
_STAYING_BYTES = 8
"""Bytes for each element of a parameter while its state moves to the elements of a new mask: the weight and
bools; see `Pieces.remask`."""


def mask_bytes(trace: Trace) -> int:
    """Return the bytes of a rank's masks, and of the copies on which updates of masked parameters work.

    An update copies the wire values and gradients of kept elements, and lists their places. A batch of pieces
    ends with the piece that makes it full.

    Args:
        trace: the dry run.
    """
    masked = [[param for param in stage.params if param.kept is not None] for stage in trace.stages]
    most = max((sum(param.stored_numel for param in params) for params in masked), default=0)
    copies = min(most, 2 * PIECE_ELEMENTS) * (_INDEX_BYTES + 2 * _FP32_BYTES)
    return trace.masks.num_bytes + copies


class MaskingBytes(NamedTuple):
    """Bytes that ranks need while they choose masks.

    Attributes:
        first: while the first masks are chosen, before any step.
        in_step: while the gradients of a step are masked and masks change.
    """

    first: int
    in_step: int


def masking_bytes(trace: Trace, state_of_an_element: float, ranks: int) -> MaskingBytes:
    """Return the bytes that ranks need while they choose masks.

    Args:
        trace: the dry run.
        state_of_an_element: most bytes of a stored element beside the wire image.
        ranks: number of ranks that choose them at the same time.
    """
    in_step = _in_step(trace, state_of_an_element)
    return MaskingBytes(ranks * _CHOICE_BYTES * trace.masks.largest, ranks * in_step)


def _in_step(trace: Trace, state_of_an_element: float) -> int:
    masks = trace.masks
    if not masks.largest_changing:
        return masks.largest  # a bool for each gradient
    stored = (param.stored_numel for param in trace.params if param.kept is not None)
    # A bool for each element in the old order, and one in the new order, beside its values.
    moved = int(max(stored, default=0) * (state_of_an_element + 2))
    moving = _STAYING_BYTES * masks.largest_changing + moved if moved else 0
    return max(_CHOICE_BYTES * masks.largest_changing, moving, masks.largest)


def expanded_bytes(trace: Trace, state_of_an_element: float) -> int:
    """Return the bytes of a run of a masked parameter that a thread reads or writes with all its elements.

    Args:
        trace: the dry run.
        state_of_an_element: most bytes of a stored element beside the wire image.
    """
    sizes = (param.numel for param in trace.params if param.kept is not None)
    # Master and state tensors of all elements, beside the places and the master of the kept ones.
    of_an_element = _FP32_BYTES + state_of_an_element + _INDEX_BYTES + _FP32_BYTES
    return int(min(max(sizes, default=0), PIECE_ELEMENTS) * of_an_element)
