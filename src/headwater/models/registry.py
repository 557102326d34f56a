"""Models by the name that a params file gives them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.config.models import (
    DECODERS,
    MODELS,
    SEQ2SEQ,
    ModelConfig,
)
from headwater.core.errors import ConfigError
from headwater.models import (
    bert,
    decoder,
    dino,
    dit,
    dpo,
    examples,
    huggingface,
    llava,
    mnist,
    question_answering,
    seq2seq,
    unet,
    vit,
)
from headwater.models.examples import Example


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package knows about a kind of model.

    Attributes:
        model: makes the module from config, `fused_loss` and `seed`. Its `forward(batch)` gives the loss.
        init_parameter: initial value of one parameter from name, shape, config and seed.
        learning_rate_scale: factor on the learning rate of one parameter from name and config.
        batch: a batch without values from config, samples, and tokens of a sample (its longest if `None`).
        divisible: whether the mean of the losses of the parts of a batch, weighted with `labels`, is the loss
            of the batch.
        labels: what a batch counts for in such a mean, from config and batch; its samples if not given.
        pretrained_names: names under which a parameter may be found in a checkpoint that a run starts from,
            the best first, from its own name and config; `MAY_BE_MISSING` last where it need not be there.
        public_parts: what the public Model Zoo calls the parameters that are stacked in one of ours, each
            with its rows (-1: all), from name and config; empty where it has none such.
        averages: parameters that are moving averages of other ones, from config: what the names of those that
            are followed begin with, those of the averages, and the share that stays after a step.
    """

    model: Callable[..., nn.Module]
    init_parameter: Callable[[str, Sequence[int], Any, int], Tensor]
    learning_rate_scale: Callable[[str, Any], float]
    batch: Callable[[Any, int, int | None], Example]
    divisible: bool = True
    labels: Callable[[Any, Any], Tensor | None] = lambda config, batch: None
    pretrained_names: Callable[[str, Any], Sequence[str]] = lambda name, config: (name,)
    public_parts: Callable[[str, Any], Sequence[tuple[str, int]]] = lambda name, config: ()
    averages: Callable[[Any], Sequence[tuple[str, str, Callable[[int], float]]]] = lambda config: ()


_DECODER = Family(
    decoder.Decoder,
    decoder.init_parameter,
    decoder.learning_rate_scale,
    examples.texts("labels"),
    labels=decoder.num_labels,
    pretrained_names=lambda name, config: decoder.pretrained_names(name),
    public_parts=decoder.public_parts,
)


def _encoder(model: Callable[..., nn.Module], batch: Callable[[Any, int, int | None], Example]) -> Family:
    return Family(model, bert.init_parameter, bert.learning_rate_scale, batch, labels=bert.num_labels)


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
    ),
    "llava": _LLAVA,
    "multimodal_simple": _LLAVA,
    "hf": Family(
        huggingface.HuggingFaceModel,
        huggingface.init_parameter,
        lambda name, config: 1.0,
        examples.library_batch,
        labels=huggingface.num_labels,
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
    # The passages of a batch are told from each other.
    "dpr": dataclasses.replace(_encoder(bert.DPR, examples.questions), divisible=False),
    "fc_mnist": Family(mnist.FCMnist, mnist.init_parameter, lambda name, config: 1.0, examples.digits),
    "vision_transformer": Family(vit.ViT, vit.init_parameter, lambda name, config: 1.0, examples.images),
    # Batch norm and Dice's loss are of the whole batch.
    "unet": Family(
        unet.UNet, unet.init_parameter, lambda name, config: 1.0, examples.segmented_images, divisible=False
    ),
    # The center follows the mean over a batch.
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
            seq2seq.init_parameter,
            seq2seq.learning_rate_scale,
            examples.pairs,
            labels=seq2seq.num_labels,
        ),
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
