"""Pruning: weights and optimizer state set to zero by masks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwater.sparsity.masks import PackedMask
from headwater.store.pieces import PieceState
from headwater.store.store import WeightStore


def prune(store: WeightStore, stage: int, masks: Mapping[int, Tensor], kept: Mapping[int, Tensor]) -> None:
    """Set weights to zero where `masks` are false, and optimizer state where `kept` is false.

    If the store leaves out the masked elements of a parameter, it has its new mask from now on.

    All ranks call this function together, and each changes the pieces that it updates.

    Args:
        store: the weight store.
        stage: index of the stage.
        masks: bool, in the shape of each parameter, by index.
        kept: bool, in the shape of each parameter, for the same parameters: the elements that the mask has
            kept before and still keeps.
    """
    stored = store.parameters.masks.by_param(stage)
    compact = {param: PackedMask(mask) for param, mask in masks.items() if param in stored}
    if compact:
        store.parameters.remask(stage, compact)
    whole = masks.keys() - compact.keys()

    def zero(piece: PieceState) -> None:
        # Not multiplied: the zeros of negative weights would be negative, other bits than those of `remask`.
        piece.master.masked_fill_(~_run(masks, piece), 0)
        _clear(piece, kept)

    if whole:
        store.parameters.change(stage, whole, zero)


def clear_state(store: WeightStore, stage: int, kept: Mapping[int, Tensor]) -> None:
    """Set optimizer state to zero where `kept` is false; see `prune`.

    All ranks call this function together, and each changes the pieces that it updates.

    Args:
        store: the weight store.
        stage: index of the stage.
        kept: bool, in the shape of each parameter, by index.
    """
    store.parameters.change(stage, kept.keys(), lambda piece: _clear(piece, kept))


def _clear(piece: PieceState, kept: Mapping[int, Tensor]) -> None:
    for state in piece.states.values():
        state.view(-1).masked_fill_(~_run(kept, piece), 0)


def _run(masks: Mapping[int, Tensor], piece: PieceState) -> Tensor:
    """Return the elements of a mask that belong to a piece."""
    return masks[piece.param].reshape(-1)[piece.start : piece.start + piece.master.numel()]
