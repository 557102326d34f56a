"""Batches of texts without the positions at their end that are padding in all samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.encoder import (
    DPRConfig,
    EncoderSection,
    QuestionAnsweringConfig,
    TokenClassifierConfig,
)
from headwater.config.models.preference import DPOConfig
from headwater.core.batches import IGNORED, num_samples

Batch = Mapping[str, Tensor]
MULTIPLE = 8
"""Texts are cut to a multiple of this length, unless they are shorter. So fewer different shapes occur."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """The tensors of a batch that have a value for each position of a text.

    Attributes:
        names: the names of the tensors, [batch, …, seq]; a batch may lack some of them.
        used: returns the positions on which the loss depends, bool [batch, …, seq]. Positions between two
            such positions are kept too.
    """

    names: tuple[str, ...]
    used: Callable[[Batch], Tensor]


_POSITIONS = ("position_ids", "attention_span")
_ENCODED = ("input_ids", "attention_mask", "token_type_ids", *_POSITIONS)
_DECODED = ("decoder_input_ids", "decoder_attention_mask", "labels")


def _mask(name: str) -> Callable[[Batch], Tensor]:
    return lambda batch: batch[name] != 0


def _retrieved(kind: str) -> Texts:
    names = tuple(f"{kind}_{name}" for name in _ENCODED)
    return Texts(names, _mask(f"{kind}_attention_mask"))


ENCODER = (Texts(_ENCODED, _mask("attention_mask")),)
_TOKENS = (Texts((*_ENCODED, "labels"), _mask("attention_mask")),)
# The mask of a decoder marks labels that count. A position attends only to positions before it.
CAUSAL = ("input_ids", "attention_mask", "labels", *_POSITIONS)
_DECODER = (Texts(CAUSAL, _mask("attention_mask")),)
# One length for both answers, because the model computes them as one batch.
_ANSWERS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
_PREFERENCES = (
    Texts(
        _ANSWERS, lambda batch: (batch["chosen_labels"] != IGNORED) | (batch["rejected_labels"] != IGNORED)
    ),
)
_RETRIEVAL = (_retrieved("questions"), _retrieved("ctx"))
PAIRS = (
    Texts(("input_ids", "attention_mask"), _mask("attention_mask")),
    Texts(_DECODED, _mask("decoder_attention_mask")),
)


def decoder_texts(config: DecoderConfig) -> Sequence[Texts]:
    """Return the texts in a batch of a decoder; none if its loss also depends on the padding."""
    return () if config.moe is not None and config.moe.load_balancing_loss_coef else _DECODER


def preference_texts(config: DPOConfig) -> Sequence[Texts]:
    """Return the texts in a batch of preference tuning."""
    return _PREFERENCES


def pair_texts(config: object) -> Sequence[Texts]:
    """Return the texts in a batch of an encoder-decoder."""
    return PAIRS


def retrieval_texts(config: DPRConfig) -> Sequence[Texts]:
    """Return the texts in a batch of two encoders."""
    return () if config.q_encoder.linformer or config.ctx_encoder.linformer else _RETRIEVAL


def encoder_texts(config: EncoderSection) -> Sequence[Texts]:
    """Return the texts in a batch of an encoder; none if its loss also depends on the padding.

    The loss of question answering compares all positions, and Linformer projects all of them.
    """
    if config.linformer is not None or isinstance(config, QuestionAnsweringConfig):
        return ()
    if isinstance(config, TokenClassifierConfig):
        return () if config.include_padding_in_loss else _TOKENS
    return ENCODER


def sorted_by_length(batch: Batch, texts: Sequence[Texts]) -> Batch:
    """Return the batch with its samples in the order of their lengths, the longest first.

    Micro-batches then have samples of similar lengths, so that more padding can be cut off.
    """
    samples = num_samples(batch)
    total = torch.stack([_lengths(each.used(batch)) for each in texts]).sum(0)
    order = total.argsort(descending=True, stable=True)
    return {
        name: each[order] if each.dim() and len(each) == samples else each for name, each in batch.items()
    }


def without_padding(batch: Batch, texts: Sequence[Texts]) -> Batch:
    """Return the batch without the positions at the end of its texts on which its loss does not depend."""
    cut: dict[str, Tensor] = {}
    for each in texts:
        used = each.used(batch)
        length = max(int(_lengths(used).max()), 1)
        length = min(-(-length // MULTIPLE) * MULTIPLE, used.shape[-1])
        cut |= {name: batch[name][..., :length].contiguous() for name in each.names if name in batch}
    return {**batch, **cut}


def _lengths(used: Tensor) -> Tensor:
    """Return the number of positions of each sample up to the last used one, [batch]."""
    ends = torch.arange(1, used.shape[-1] + 1, device=used.device)
    return (used * ends).flatten(1).amax(1)
