"""Attention of models of the transformers library that read new tokens of several sequences side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.errors import ConfigError
from headwater.models.layers.attention import Part, Scoring, attend_parts, visible
from headwater.models.sequences import Piece

_NAME = "headwater_side_by_side"
_PIECES: ContextVar[Sequence[Piece]] = ContextVar("pieces")
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def can_read_side_by_side(model: Any) -> bool:
    """True if all layers of a model are attention that `side_by_side_attention` replaces."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or _KNOWN_LAYERS)
    # Layers that use keys of other layers, and attention sinks, are not in the arguments of the attention.
    shares_keys = bool(getattr(config, "num_kv_shared_layers", 0))
    has_sinks = any(hasattr(module, "sinks") for module in model.modules())
    supported = bool(getattr(type(model), "_supports_attention_backend", False))
    return supported and layers <= _KNOWN_LAYERS and not shares_keys and not has_sinks


@contextmanager
def side_by_side_attention(model: Any, pieces: Sequence[Piece]) -> Iterator[None]:
    """Enter a context in which the attention of a model reads and extends the caches of `pieces`.

    Args:
        model: the library's model, called with the tokens of the pieces one after another.
        pieces: the pieces, with a `KeyValueCache` each.
    """
    _register()
    config = model.config
    usual, token = config._attn_implementation, _PIECES.set(pieces)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _PIECES.reset(token)


def _register() -> None:
    """Make the attention known to the library. Without a mask function of this name, it makes no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output of the attention [1, tokens, heads, head size], as the library asks for it.

    Raises:
        ConfigError: if the model passes tensors that this attention does not know.
    """
    unknown = unknown_tensors(others)
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} cannot read several texts at once: its attention uses {unknown[0]}",
            where="model.hf",
            remedy="convert the model with headwater checkpoint import, if that knows its type",
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    parts = [
        Part(len(piece.tokens), piece.cache.layers[layer], _mask(piece, layer, sliding_window, query.device))
        for piece in _PIECES.get()
    ]
    attended = attend_parts(query, key, value, parts, Scoring(scaling, softcap))
    return attended.transpose(1, 2).contiguous(), None


def unknown_tensors(others: Mapping[str, Any], known: Collection[str] = ()) -> list[str]:
    """Return the names of further tensors that a model passes to its attention, and that change its result.

    Args:
        others: the arguments of the attention that it does not name.
        known: names of tensors that the attention understands.
    """
    understood = {*known, *_PASSED_ON}
    return [name for name, each in others.items() if isinstance(each, Tensor) and name not in understood]


_PASSED_ON = frozenset({"position_ids", "cache_position"})
"""Tensors that some models pass on to the attention, which needs none of them."""


def _mask(piece: Piece, layer: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of a layer with a window; `None` if each token sees all tokens up to its own."""
    start = piece.cache.layers[layer].length
    keys = torch.arange(start + len(piece.tokens), device=device)
    return None if window is None or window >= len(keys) else visible(keys[start:], keys, window=window)
