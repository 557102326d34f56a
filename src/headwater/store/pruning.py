"""Pruning: weights and optimizer state set to zero by masks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwater.core.stage import ParamKey
from headwater.sparsity.masks import PackedMask
from headwater.store.pieces import PieceState
from headwater.store.store import WeightStore


def prune(store: WeightStore, key: ParamKey, mask: PackedMask, kept: Tensor) -> None:
    """Set weights of a parameter to zero where `mask` is false, and optimizer state where `kept` is false.

    If the store leaves out the masked elements of the parameter, it has the new mask from now on.

    All ranks call this function together, and each changes the pieces that it updates.

    Args:
        store: the weight store.
        key: the parameter.
        mask: its new mask.
        kept: bool, in the shape of the parameter: the elements that the mask has kept before and still keeps.
    """
    stage, param = key
    if store.parameters.masks.of(stage, param) is not None:
        store.parameters.remask(key, mask)
        return
    masked = ~mask.unpack()

    def zero(piece: PieceState) -> None:
        # A product would make the zeros of negative weights negative, unlike those of `remask`.
        piece.master.masked_fill_(_run(masked, piece), 0)
        _clear(piece, kept)

    store.parameters.change(stage, {param}, zero)


def clear_state(store: WeightStore, stage: int, kept: Mapping[int, Tensor]) -> None:
    """Set optimizer state to zero where `kept` is false; see `prune`.

    All ranks call this function together, and each changes the pieces that it updates.

    Args:
        store: the weight store.
        stage: index of the stage.
        kept: bool, in the shape of each parameter, by index.
    """
    store.parameters.change(stage, kept.keys(), lambda piece: _clear(piece, kept[piece.param]))


def _clear(piece: PieceState, kept: Tensor) -> None:
    for state in piece.states.values():
        state.view(-1).masked_fill_(~_run(kept, piece), 0)


def _run(mask: Tensor, piece: PieceState) -> Tensor:
    """Return the elements of a mask that belong to a piece."""
    return mask.reshape(-1)[piece.start : piece.start + piece.master.numel()]
