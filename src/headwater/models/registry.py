"""Registry of the models, by their names in params files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.models import MODELS, ModelConfig
from headwater.config.models.decoder import FAMILIES as DECODERS
from headwater.config.models.seq2seq import SEQ2SEQ
from headwater.core.errors import ConfigError
from headwater.models import (
    bert,
    decoder,
    decoder_parameters,
    dino,
    dit,
    dpo,
    examples,
    huggingface,
    llava,
    mnist,
    padding,
    question_answering,
    seq2seq,
    seq2seq_parameters,
    unet,
    vit,
)
from headwater.models.examples import Example
from headwater.models.padding import Texts


@dataclasses.dataclass(frozen=True)
class Family:
    """The functions that define a kind of model.

    Attributes:
        model: makes the module from config and `seed`. Its `forward(batch)` returns the loss.
        init_parameter: returns the initial value of a parameter from name, shape, config and seed.
        learning_rate_scale: returns the factor on the learning rate of a parameter from name and config.
        batch: returns a batch without values from config, samples, and tokens per sample (`None`: maximum).
        divisible: True if the mean of the losses of micro-batches, weighted with `labels`, is the loss of the
            batch.
        labels: returns the weight of a batch in this mean from config and batch; `None`: its samples.
        pretrained_names: returns the names that a parameter may have in a checkpoint from which a run starts,
            in order of preference, from name and config; `MAY_BE_MISSING` is last if it may be missing.
        public_parts: returns the Model Zoo's names of the parameters that are stacked in one of ours, each
            with its rows (-1: all), from name and config; empty if the Model Zoo has no such parameter.
        texts: returns the texts in a batch, whose padding need not be computed, from config; none if the loss
            depends on the padding.
        averages: returns the parameters that are moving averages of others, from config: the prefix of the
            followed parameters, the prefix of the averages, and a function from the step to the fraction of
            an average that is kept.
    """

    model: Callable[..., nn.Module]
    init_parameter: Callable[[str, Sequence[int], Any, int], Tensor]
    learning_rate_scale: Callable[[str, Any], float]
    batch: Callable[[Any, int, int | None], Example]
    divisible: bool = True
    labels: Callable[[Any, Any], Tensor | None] = lambda config, batch: None
    pretrained_names: Callable[[str, Any], Sequence[str]] = lambda name, config: (name,)
    public_parts: Callable[[str, Any], Sequence[tuple[str, int]]] = lambda name, config: ()
    texts: Callable[[Any], Sequence[Texts]] = lambda config: ()
    averages: Callable[[Any], Sequence[tuple[str, str, Callable[[int], float]]]] = lambda config: ()


_DECODER = Family(
    decoder.Decoder,
    decoder_parameters.init_parameter,
    decoder_parameters.learning_rate_scale,
    examples.texts("labels"),
    labels=decoder.num_labels,
    pretrained_names=lambda name, config: decoder_parameters.pretrained_names(name),
    public_parts=decoder_parameters.public_parts,
    texts=padding.decoder_texts,
)


def _encoder(model: Callable[..., nn.Module], batch: Callable[[Any, int, int | None], Example]) -> Family:
    return Family(
        model,
        bert.init_parameter,
        bert.learning_rate_scale,
        batch,
        labels=bert.num_labels,
        public_parts=bert.public_parts,
        texts=padding.encoder_texts,
    )


_BERT = _encoder(bert.Bert, examples.masked_texts)
_LLAVA = Family(
    llava.Llava,
    llava.init_parameter,
    llava.learning_rate_scale,
    examples.texts_with_images,
    labels=llava.num_labels,
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(DECODERS, _DECODER),
    "dpo": Family(
        dpo.DPO,
        dpo.init_parameter,
        dpo.learning_rate_scale,
        examples.preferences,
        pretrained_names=dpo.pretrained_names,
        texts=padding.preference_texts,
    ),
    "llava": _LLAVA,
    "multimodal_simple": _LLAVA,
    "hf": Family(
        huggingface.HuggingFaceModel,
        huggingface.init_parameter,
        lambda name, config: 1.0,
        examples.library_batch,
        labels=huggingface.num_labels,
        texts=huggingface.texts,
    ),
    "bert": _BERT,
    "esm2": _BERT,
    **dict.fromkeys(
        ("bert/classifier", "esm2/classifier"),
        _encoder(bert.Classifier, examples.labelled_texts("labels")),
    ),
    "bert/token_classifier": _encoder(bert.TokenClassifier, examples.texts("token_type_ids", "labels")),
    "bert/extractive_summarization": _encoder(bert.ExtractiveSummarizer, examples.sentences),
    "bert/qa": _encoder(
        question_answering.QuestionAnswering, examples.labelled_texts("start_positions", "end_positions")
    ),
    # Not divisible: every passage of the batch is a candidate for every question.
    "dpr": dataclasses.replace(
        _encoder(bert.DPR, examples.questions), divisible=False, texts=padding.retrieval_texts
    ),
    "fc_mnist": Family(mnist.FCMnist, mnist.init_parameter, lambda name, config: 1.0, examples.digits),
    "vision_transformer": Family(vit.ViT, vit.init_parameter, lambda name, config: 1.0, examples.images),
    # Not divisible: batch norm and Dice loss depend on the whole batch.
    "unet": Family(
        unet.UNet, unet.init_parameter, lambda name, config: 1.0, examples.segmented_images, divisible=False
    ),
    # Not divisible: the center of the teacher's scores follows the mean over the batch.
    "dino": Family(
        dino.Dino,
        dino.init_parameter,
        lambda name, config: 1.0,
        examples.views,
        divisible=False,
        averages=lambda config: [(*each.prefixes, each.momentum) for each in config.ema],
        public_parts=lambda name, config: dino.public_parts(name),
    ),
    "dit": Family(dit.DiT, dit.init_parameter, lambda name, config: 1.0, examples.noised_images),
    **dict.fromkeys(
        SEQ2SEQ,
        Family(
            seq2seq.Seq2Seq,
            seq2seq_parameters.init_parameter,
            seq2seq_parameters.learning_rate_scale,
            examples.pairs,
            labels=seq2seq.num_labels,
            texts=padding.pair_texts,
        ),
    ),
}
"""Families by the key `name` of the model section."""

assert FAMILIES.keys() == MODELS.keys(), "every schema has a model"


def build_model(config: ModelConfig, *, device: str = "cpu", seed: int = 0) -> nn.Module:
    """Return the module that `config` describes.

    Args:
        config: the model section of a params file.
        device: device of the parameters; on `meta` they take no memory and have no values.
        seed: seed of the initial weights.

    Raises:
        ConfigError: if a pattern in `freeze` is invalid or matches no parameter of the model, or if a weight
            has more elements than torch can count.
    """
    try:
        with torch.device(device):
            model = FAMILIES[config.name].model(config, seed=seed)
    except RuntimeError as error:
        if "overflowed" not in str(error):
            raise
        raise ConfigError(
            f"the sizes of the model are too large: {error}",
            where="model",
            remedy="set smaller sizes, such as hidden_size or vocab_size",
        ) from error
    _freeze(model, getattr(config, "freeze", ()))
    return model


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns.

    Raises:
        ConfigError: if a pattern is invalid or matches no parameter.
    """
    for pattern in patterns:
        try:
            frozen = [value for name, value in model.named_parameters() if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"{pattern!r} is not a valid regular expression: {error}",
                where="model.freeze",
                remedy="correct the pattern",
            ) from error
        if not frozen:
            parts = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(
                f"{pattern!r} matches no parameter of the model",
                where="model.freeze",
                remedy=f"use a pattern of names, which begin with {parts}",
            )
        for parameter in frozen:
            parameter.requires_grad_(False)


def meta_batch(config: ModelConfig, size: int, length: int | None = None) -> Example:
    """Return a batch without values, on the meta device, for the model that `config` describes.

    Args:
        config: the model section of a params file.
        size: number of samples.
        length: tokens per sample; by default the model's maximum.
    """
    return FAMILIES[config.name].batch(config, size, length)


def init_parameter(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of a parameter of the model that `config` describes, fp32 on the CPU.

    Args:
        name: qualified name of the parameter.
        shape: shape of the parameter.
        config: the model section of a params file.
        seed: seed of the run.
    """
    return FAMILIES[config.name].init_parameter(name, shape, config, seed)


def learning_rate_scale(name: str, config: ModelConfig) -> float:
    """Return the factor on the learning rate of a parameter of the model that `config` describes."""
    return FAMILIES[config.name].learning_rate_scale(name, config)
