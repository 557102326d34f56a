"""Example batches on the meta device: shapes and dtypes of the batches that a model reads, without values.

Each function takes the model's section, the number of samples, and the tokens per sample (`None`: the model's
maximum), and returns a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwater.config.models.diffusion import DiTConfig
from headwater.config.models.encoder import BertConfig, DPRConfig, ExtractiveSummarizationConfig
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.models.multimodal import MultimodalSection
from headwater.config.models.preference import DPOConfig
from headwater.config.models.self_supervised import DinoConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.config.models.vision import FCMnistConfig, UNetConfig, ViTConfig

Example = dict[str, Tensor]
"""A batch without values, on the meta device."""


def _int64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _fp32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def texts(*more: str) -> Callable[[Any, int, int | None], Example]:
    """Return a function that makes batches of tokens, a mask, and `more` tensors of the same shape."""

    def batch(config: Any, size: int, length: int | None) -> Example:
        names = ("input_ids", "attention_mask", *more)
        return {name: _int64(size, length or config.max_position_embeddings) for name in names}

    return batch


def preferences(config: DPOConfig, size: int, length: int | None) -> Example:
    """Return a batch of chosen and rejected answers."""
    seq = length or config.policy_model.max_position_embeddings
    example = {name: _int64(size, seq) for name in ("input_ids", "labels")}
    return {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in example.items()}


def masked_texts(config: BertConfig, size: int, length: int | None) -> Example:
    """Return a batch of texts with masked tokens."""
    example = texts(*(["token_type_ids"] if config.num_segments else []))(config, size, length)
    predictions = math.ceil(0.15 * example["input_ids"].shape[1])
    for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
        example[name] = _int64(size, predictions)
    return example if config.disable_nsp else example | {"next_sentence_label": _int64(size)}


def labelled_texts(*labels: str) -> Callable[[Any, int, int | None], Example]:
    """Return a function that makes batches of texts with `labels` [batch] each."""

    def batch(config: Any, size: int, length: int | None) -> Example:
        return texts("token_type_ids")(config, size, length) | {name: _int64(size) for name in labels}

    return batch


def sentences(config: ExtractiveSummarizationConfig, size: int, length: int | None) -> Example:
    """Return a batch of texts with up to 50 labelled sentences."""
    example = texts("token_type_ids")(config, size, length)
    sentences = min(50, example["input_ids"].shape[1])
    names = ("cls_indices", "cls_label", "cls_weights")
    return example | {name: _int64(size, sentences) for name in names}


def questions(config: DPRConfig, size: int, length: int | None) -> Example:
    """Return a batch of questions with two passages each."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    questions = length or config.q_encoder.max_position_embeddings
    passages = length or config.ctx_encoder.max_position_embeddings
    return {f"questions_{name}": _int64(size, questions) for name in names} | {
        f"ctx_{name}": _int64(size, 2, passages) for name in names
    }


def digits(config: FCMnistConfig, size: int, length: int | None) -> Example:
    """Return a batch of handwritten digits."""
    return {"inputs": _fp32(size, 1, 28, 28), "labels": _int64(size)}


def pairs(config: Seq2SeqConfig, size: int, length: int | None) -> Example:
    """Return a batch of sources and targets."""
    source = length or config.src_max_position_embeddings
    example = {name: _int64(size, source) for name in ("input_ids", "attention_mask")}
    names = ("decoder_input_ids", "decoder_attention_mask", "labels")
    return example | {name: _int64(size, config.tgt_max_position_embeddings) for name in names}


def images(config: ViTConfig, size: int, length: int | None) -> Example:
    """Return a batch of images with one class each."""
    return {"inputs": _fp32(size, config.num_channels, *config.image_size), "labels": _int64(size)}


def segmented_images(config: UNetConfig, size: int, length: int | None) -> Example:
    """Return a batch of images with a class for each pixel."""
    inputs = _fp32(size, config.input_channels, *config.image_size)
    return {"inputs": inputs, "labels": _int64(size, *config.image_size)}


def noised_images(config: DiTConfig, size: int, length: int | None) -> Example:
    """Return a batch of images with noise and timesteps."""
    numbers = {name: _int64(size) for name in ("timesteps", "labels", "no_label")}
    return {name: _fp32(size, *config.latent_shape) for name in ("inputs", "noise")} | numbers


def texts_with_images(config: MultimodalSection, size: int, length: int | None) -> Example:
    """Return a batch of texts with one image each."""
    return texts("labels")(config.text_model, size, length) | {
        "images": _fp32(size, 1, *config.image_shape),
        "image_places": _int64(size, 1, config.num_features),
    }


def views(config: DinoConfig, size: int, length: int | None) -> Example:
    """Return a batch of two global and eight local views of each image."""
    model = config.image_model_trunks[0].image_model
    height, width = model.image_size
    patch_height, patch_width = model.patch_size
    half = max(1, height // patch_height // 2), max(1, width // patch_width // 2)
    rows, columns = model.interpolate_position_embedding.local_patch_dims or half
    return {
        "global_view": _fp32(size, 2, model.num_channels, height, width),
        "local_view": _fp32(size, 8, model.num_channels, rows * patch_height, columns * patch_width),
        "collated_masks": torch.empty(size, 2, model.num_patches, dtype=torch.bool, device="meta"),
    }


def library_batch(config: HuggingFaceConfig, size: int, length: int | None) -> Example:
    """Return a batch for a model of the transformers library."""
    seq = length or config.example_length
    texts = {name: _int64(size, seq) for name in ("input_ids", "attention_mask")}
    match config.kind:
        case "causal_lm":
            return texts | {"labels": _int64(size, seq)}
        case "masked_lm":
            names = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
            return texts | {name: _int64(size, math.ceil(0.15 * seq)) for name in names}
        case "seq2seq":
            names = ("decoder_input_ids", "decoder_attention_mask", "labels")
            return texts | {name: _int64(size, seq) for name in names}
        case "sequence_classification":
            return texts | {"token_type_ids": _int64(size, seq), "labels": _int64(size)}
        case "image_classification":
            inputs = _fp32(size, config.num_channels, *config.image_size)
            return {"inputs": inputs, "labels": _int64(size)}
