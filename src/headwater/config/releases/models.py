"""Conversion of the keys of older releases that only some models have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from headwater.config.document import Document, move, put, remove
from headwater.config.origins import KeyPath
from headwater.config.releases.rules import Ignored, Renamed, Replaced, Rules, apply_rules
from headwater.core.errors import ConfigError

_ALWAYS = "the model always has this value"
_NORMALIZED = Ignored("only convolutions without a normalization after them have a bias")

MODEL: Mapping[str, Rules] = {
    "unet": {
        "skip_connect": Ignored(_ALWAYS, only=(True,)),
        "residual_blocks": Ignored(_ALWAYS, only=(False,)),
        "use_conv3d": Ignored("images have two dimensions", only=(False,)),
        "downscale_method": Ignored(_ALWAYS, only=("max_pool",)),
        "downscale_first_conv": Ignored(_ALWAYS, only=(False,)),
        "downscale_bottleneck": Ignored(_ALWAYS, only=(False,)),
        "enable_bias": _NORMALIZED,
        "bias_initializer": Ignored(_ALWAYS, only=("zeros",)),
        "initializer": Ignored("the initializer is He's, for the nonlinearity"),
        "eval_metrics": Ignored("compute_eval_metrics: true computes all metrics"),
        "loss": Replaced(
            {
                "bce": ("loss", "bce"),
                "ssce": ("loss", "cross_entropy"),
                "ssce_dice": ("loss", "cross_entropy_dice"),
                "cross_entropy": ("loss", "cross_entropy"),
                "cross_entropy_dice": ("loss", "cross_entropy_dice"),
            }
        ),
        "nonlinearity": Replaced({name: ("nonlinearity", name.lower()) for name in ("ReLU", "GELU", "relu")}),
    },
    "esm2/classifier": {
        "freeze_pretrained_model": Ignored(_ALWAYS, only=(False,)),
        "classifier_dropout": Renamed("task_dropout"),
        "disable_nsp": Ignored("a classifier does not predict the next sentence"),
        "share_embedding_weights": Ignored("a classifier does not predict tokens"),
    },
}
"""Rules for keys of the section `model`, by the model's name."""

_TOWER: Rules = {key: Renamed(("model", key)) for key in ("mixed_precision", "fp16_type")}


def update_model(document: Document) -> Document:
    """Return `document`, which has the older form, with its model's keys converted to the newest release.

    Raises:
        ConfigError: if a key of an older release has a value that is not supported.
    """
    name = document.get(("model", "name"))
    if not isinstance(name, str):
        return document
    document = apply_rules(document, ("model",), MODEL.get(name, {}))
    return _SPECIAL[name](document) if name in _SPECIAL else document


def _unet(document: Document) -> Document:
    """Convert lists of convolutions to their length, and move image size and classes to the model."""
    document = _count_convolutions(document)
    filters, widths = document.get(("model", "decoder_filters")), document.get(("model", "encoder_filters"))
    if filters is not None:
        if not isinstance(widths, list) or filters != widths[-2::-1]:
            raise ConfigError(
                f"expected decoder_filters to be encoder_filters without the last, reversed; got {filters!r}",
                where=str(document.origin(("model", "decoder_filters"))),
                remedy="write encoder_filters, and remove decoder_filters",
            )
        document = remove(document, ("model", "decoder_filters"))
    shape = document.get(("train_input", "image_shape"))
    if isinstance(shape, list) and len(shape) == 3:
        origin = document.origin(("train_input", "image_shape"))
        document = put(document, ("model", "image_size"), shape[:2], origin)
        document = put(document, ("model", "input_channels"), shape[2], origin)
    classes: KeyPath = ("train_input", "num_classes")
    if document.get(classes) is not None and "num_classes" not in document.tree["model"]:
        document = put(
            document, ("model", "num_classes"), document.get(classes), document.origins.at(classes)
        )
    for section in ("train_input", "eval_input"):
        for key in ("image_shape", "num_classes"):
            if key in (document.tree.get(section) or {}):
                document = remove(document, (section, key))
    return document


def _count_convolutions(document: Document) -> Document:
    key: KeyPath = ("model", "convs_per_block")
    kinds = document.get(key)
    if not isinstance(kinds, list):
        return document
    origin = document.origin(key)
    if set(kinds) != {"3x3_conv"}:
        raise ConfigError(
            f"expected 3x3_conv only in convs_per_block, found {kinds!r}",
            where=str(origin),
            remedy="write the number of 3x3 convolutions at each resolution",
        )
    return put(document, key, len(kinds), origin)


def _digits(document: Document) -> Document:
    """Add the name of the data processor, which older releases omit for this model."""
    for section, split in (("train_input", "train"), ("eval_input", "val")):
        given = document.tree.get(section)
        if isinstance(given, dict) and "data_processor" not in given:
            origin = document.origin((section,))
            document = put(document, (section, "data_processor"), "MNISTDataProcessor", origin)
            if "split" not in given:
                document = put(document, (section, "split"), split, origin)
    return document


def _retrieval(document: Document) -> Document:
    """Convert `scale_similarity` to `softmax_temperature`, and the encoders' keys to the newest release."""
    for tower in ("q_encoder", "ctx_encoder"):
        document = apply_rules(document, ("model", tower), _TOWER)
    key: KeyPath = ("model", "scale_similarity")
    if "scale_similarity" not in document.tree["model"]:
        return document
    rule = Replaced({False: None, True: ("softmax_temperature", _root_of_width(document))})
    return rule.apply(document, key)


def _root_of_width(document: Document) -> float:
    width = document.get(("model", "q_encoder", "hidden_size"))
    return math.sqrt(width) if isinstance(width, int) and width > 0 else 1.0


def nest_image_encoders(document: Document, model: KeyPath) -> Document:
    """Return `document` with `image_model`, a list with one entry, converted to `image_encoder`.

    Args:
        document: params in either form.
        model: path of the section `model`.
    """
    path: KeyPath = (*model, "image_model_list", "image_models")
    entries = document.get(path)
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        old: KeyPath = (*path, index, "image_model")
        encoders = document.get(old)
        if isinstance(entry, dict) and isinstance(encoders, list) and len(encoders) == 1:
            encoder, origins = encoders[0], document.origins.at((*old, 0))
            document = put(remove(document, old), (*path, index, "image_encoder"), encoder, origins)
        elif isinstance(encoders, dict):
            document = move(document, old, (*path, index, "image_encoder"))
    return document


_SPECIAL: Mapping[str, Callable[[Document], Document]] = {
    "unet": _unet,
    "fc_mnist": _digits,
    "dpr": _retrieval,
    "multimodal_simple": lambda document: nest_image_encoders(document, ("model",)),
}
"""Conversions that cannot be written as rules, by the model's name."""
