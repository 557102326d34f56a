"""Models by the name that a params file gives them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.models import (
    DECODERS,
    MODELS,
    SEQ2SEQ,
    BertConfig,
    DPRConfig,
    ExtractiveSummarizationConfig,
    FCMnistConfig,
    ModelConfig,
    Seq2SeqConfig,
    UNetConfig,
    ViTConfig,
)
from headwater.core.errors import ConfigError
from headwater.models import bert, decoder, mnist, seq2seq, unet, vit

Example = dict[str, Tensor]
"""A batch without values, on the meta device."""


def _whole(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _real(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package knows about a kind of model.

    Attributes:
        model: makes the module from config, `fused_loss` and `seed`. Its `forward(batch)` gives the loss.
        init_parameter: initial value of one parameter from name, shape, config and seed.
        learning_rate_scale: factor on the learning rate of one parameter from name and config.
        batch: a batch without values from config, samples, and tokens of a sample (its longest if `None`).
        divisible: whether the mean of the losses of equal parts of a batch is the loss of the batch.
    """

    model: Callable[..., nn.Module]
    init_parameter: Callable[[str, Sequence[int], Any, int], Tensor]
    learning_rate_scale: Callable[[str, Any], float]
    batch: Callable[[Any, int, int | None], Example]
    divisible: bool = True


def _texts(*more: str) -> Callable[[Any, int, int | None], Example]:
    """Batches of tokens, a mask, and `more` of the same shape."""

    def batch(config: Any, size: int, length: int | None) -> Example:
        names = ("input_ids", "attention_mask", *more)
        return {name: _whole(size, length or config.max_position_embeddings) for name in names}

    return batch


def _masked_texts(config: BertConfig, size: int, length: int | None) -> Example:
    example = _texts(*(["token_type_ids"] if config.num_segments else []))(config, size, length)
    predictions = math.ceil(0.15 * example["input_ids"].shape[1])
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        example[name] = _whole(size, predictions)
    return example if config.disable_nsp else example | {"next_sentence_label": _whole(size)}


def _labelled_texts(*labels: str) -> Callable[[Any, int, int | None], Example]:
    def batch(config: Any, size: int, length: int | None) -> Example:
        return _texts("token_type_ids")(config, size, length) | {name: _whole(size) for name in labels}

    return batch


def _sentences(config: ExtractiveSummarizationConfig, size: int, length: int | None) -> Example:
    example = _texts("token_type_ids")(config, size, length)
    sentences = min(50, example["input_ids"].shape[1])
    names = ("cls_indices", "cls_label", "cls_weights")
    return example | {name: _whole(size, sentences) for name in names}


def _questions(config: DPRConfig, size: int, length: int | None) -> Example:
    names = ("input_ids", "attention_mask", "token_type_ids")
    questions = length or config.q_encoder.max_position_embeddings
    passages = length or config.ctx_encoder.max_position_embeddings
    return {f"questions_{name}": _whole(size, questions) for name in names} | {
        f"ctx_{name}": _whole(size, 2, passages) for name in names
    }


def _digits(config: FCMnistConfig, size: int, length: int | None) -> Example:
    return {"inputs": _real(size, 1, 28, 28), "labels": _whole(size)}


def _pairs(config: Seq2SeqConfig, size: int, length: int | None) -> Example:
    source = length or config.src_max_position_embeddings
    example = {name: _whole(size, source) for name in ("input_ids", "attention_mask")}
    names = ("decoder_input_ids", "decoder_attention_mask", "labels")
    return example | {name: _whole(size, config.tgt_max_position_embeddings) for name in names}


def _images(config: ViTConfig, size: int, length: int | None) -> Example:
    return {"inputs": _real(size, config.num_channels, *config.image_size), "labels": _whole(size)}


def _segmented_images(config: UNetConfig, size: int, length: int | None) -> Example:
    inputs = _real(size, config.input_channels, *config.image_size)
    return {"inputs": inputs, "labels": _whole(size, *config.image_size)}


_DECODER = Family(decoder.Decoder, decoder.init_parameter, decoder.learning_rate_scale, _texts("labels"))


def _encoder(model: Callable[..., nn.Module], batch: Callable[[Any, int, int | None], Example]) -> Family:
    return Family(model, bert.init_parameter, bert.learning_rate_scale, batch)


_BERT = _encoder(bert.Bert, _masked_texts)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(DECODERS, _DECODER),
    "bert": _BERT,
    "esm2": _BERT,
    "bert/classifier": _encoder(bert.Classifier, _labelled_texts("labels")),
    "bert/token_classifier": _encoder(bert.TokenClassifier, _texts("token_type_ids", "labels")),
    "bert/extractive_summarization": _encoder(bert.ExtractiveSummarizer, _sentences),
    "bert/qa": _encoder(bert.QuestionAnswering, _labelled_texts("start_positions", "end_positions")),
    # The passages of a batch are told from each other.
    "dpr": dataclasses.replace(_encoder(bert.DPR, _questions), divisible=False),
    "fc_mnist": Family(mnist.FCMnist, mnist.init_parameter, lambda name, config: 1.0, _digits),
    "vision_transformer": Family(vit.ViT, vit.init_parameter, lambda name, config: 1.0, _images),
    # Batch norm and Dice's loss are of the whole batch.
    "unet": Family(
        unet.UNet, unet.init_parameter, lambda name, config: 1.0, _segmented_images, divisible=False
    ),
    **dict.fromkeys(
        SEQ2SEQ,
        Family(seq2seq.Seq2Seq, seq2seq.init_parameter, seq2seq.learning_rate_scale, _pairs),
    ),
}
"""Families by the `name` of the model section."""

assert FAMILIES.keys() == MODELS.keys(), "every schema has a model"


def build_model(
    config: ModelConfig, *, device: str = "cpu", fused_loss: bool = True, seed: int = 0
) -> nn.Module:
    """The module that `config` describes.

    Args:
        config: the model section of a params file.
        device: where its parameters are made; on `meta` they take no memory and have no values.
        fused_loss: compute a loss over a vocabulary in chunks, without the logits of the whole batch.
        seed: seed of the initial weights.

    Raises:
        ConfigError: if `freeze` names no parameter of the model.
    """
    with torch.device(device):
        model = FAMILIES[config.name].model(config, fused_loss=fused_loss, seed=seed)
    _freeze(model, getattr(config, "freeze", ()))
    return model


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Leave the parameters whose names one of the patterns matches out of training."""
    for pattern in patterns:
        try:
            frozen = [value for name, value in model.named_parameters() if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is no regular expression: {error}", where="model.freeze", remedy="correct it"
            ) from error
        if not frozen:
            parts = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"no parameter's name matches {pattern!r}",
                where="model.freeze",
                remedy=f"the names begin with {parts}",
            )
        for parameter in frozen:
            parameter.requires_grad_(False)


def meta_batch(config: ModelConfig, size: int, length: int | None = None) -> Example:
    """A batch without values for the model that `config` describes, on the meta device.

    Args:
        config: the model section of a params file.
        size: samples.
        length: tokens of a sample; the most that the model takes if not given.
    """
    return FAMILIES[config.name].batch(config, size, length)


def init_parameter(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """Initial value of one parameter of the model that `config` describes, fp32 on the CPU."""
    return FAMILIES[config.name].init_parameter(name, shape, config, seed)


def learning_rate_scale(name: str, config: ModelConfig) -> float:
    """Factor on the learning rate of one parameter of the model that `config` describes."""
    return FAMILIES[config.name].learning_rate_scale(name, config)
