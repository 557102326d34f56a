"""Whole values of single parameters, out of a store and into it."""

from __future__ import annotations

from contextlib import closing

import torch

from headwater.core.errors import StoreError
from headwater.core.stage import ParamKey
from headwater.store.pieces import PieceState
from headwater.store.store import WeightStore


def read_param(store: WeightStore, key: ParamKey, state: str | None = None) -> torch.Tensor:
    """A copy of a parameter's master, or of one of its optimizer state tensors, up to date.

    Args:
        store: that has it.
        key: the parameter.
        state: name of the state tensor; the master if not given.

    Raises:
        StoreError: if this rank does not reach all of it.
    """
    stage, param = key
    shape, dtype = _shape_and_dtype(store, key, state)
    out, filled = torch.empty(shape, dtype=dtype), 0
    with closing(store.read(stage, with_states=state is not None, params={param})) as pieces:
        for piece in pieces:
            value = piece.master if state is None else piece.states[state]
            out.view(-1)[piece.start : piece.start + value.numel()].copy_(value.view(-1))
            filled += value.numel()
    if filled < out.numel():
        raise StoreError(
            f"{store.spec(key).name} is read by rank {store.fabric.rank}, and other ranks have it",
            remedy="save a checkpoint, and read it there",
        )
    is_like_it = state is None or out.shape == store.spec(key).shape
    return store.spec(key).like_the_parameter(out) if is_like_it else out


def write_param(store: WeightStore, key: ParamKey, value: torch.Tensor, state: str | None = None) -> None:
    """Replace a parameter's master, or one of its optimizer state tensors, by a tensor of its shape."""
    stage, param = key
    shape, _ = _shape_and_dtype(store, key, state)
    flat = value.reshape(shape).reshape(-1)

    def replace(piece: PieceState) -> None:
        target = piece.master if state is None else piece.states[state].view(-1)
        target.copy_(flat[piece.start : piece.start + target.numel()])

    store.change(stage, {param}, replace)


def _shape_and_dtype(
    store: WeightStore, key: ParamKey, state: str | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Of a parameter's master, or of one of its optimizer state tensors."""
    spec = store.spec(key)
    if state is None:
        return spec.shape, spec.dtype
    layout = store.rule.state_layout(spec)[state]
    return spec.shape if layout.shape is None else layout.shape, layout.dtype
