"""Opens trained language models for evaluation, with a plan for their largest pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.encoder import BertConfig
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.config.models.preference import DPOConfig
from headwater.config.run import RunConfig
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.loss_function import LossFunction
from headwater.data.codec import mask_token_id, open_tokenizer
from headwater.evaluation.scorer import Scorer, check_length, largest_pass
from headwater.fabric.fabric import ALONE, Fabric
from headwater.generation.batcher import ACTIVE_PER_ROW, Batcher
from headwater.generation.fill_mask import MaskFiller, MaskModel, likely
from headwater.generation.requests import Limits
from headwater.models.sequences import LanguageModel, read_largest
from headwater.stream.engine import Engine
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.engines import open_engine, trained_model
from headwater.trainer.huggingface import weights_folder
from headwater.trainer.planning import Workload
from headwater.trainer.tokenizer import tokenizer_path
from headwater.trainer.zoo_job import language_model, masked_model, policy_names, zoo_trainable

PASS_TOKENS = 512
"""Largest number of new tokens of one pass over the weights, if the user sets no other number."""


@dataclasses.dataclass(frozen=True)
class Inference:
    """Settings for the evaluation of a language model.

    Attributes:
        batch_size: largest number of sequences of full length that all ranks compute at once. The plan may
            choose fewer.
        max_length: largest number of tokens that the model may read at once; its positions if not given.
        checkpoint: the checkpoint; the newest in the model_dir if not given. A transformers model without one
            has the weights in its folder.
        generates: True if the model generates text, which needs memory for keys and values.
    """

    batch_size: int
    max_length: int | None = None
    checkpoint: Path | None = None
    generates: bool = False


@dataclasses.dataclass(frozen=True)
class Opened:
    """A language model that is open for inference.

    Attributes:
        engine: has the model, in eval mode, with a plan for its largest pass.
        vocab_size: tokens in the model's vocabulary.
        length: largest number of tokens that the model may read at once.
    """

    engine: Engine
    vocab_size: int
    length: int


@contextmanager
def open_scorer(config: RunConfig, inference: Inference, fabric: Fabric = ALONE) -> Iterator[Scorer]:
    """Open the language model of a run with the weights of a checkpoint.

    Args:
        config: the run.
        inference: how the model is evaluated.
        fabric: the ranks that evaluate together. All of them call this.

    Yields:
        The model, as a scorer.

    Raises:
        ConfigError: if the model does not continue texts.
        CheckpointError: if the weights are missing.
        DoesNotFitError: if not even one sequence fits into the memory of the params.
    """
    largest = functools.partial(largest_pass, generates=inference.generates)
    with _opened(config, language_model(config), inference, largest, fabric) as model:
        size = model.engine.plan.micro_batch_size
        yield make_scorer(model.engine, model.vocab_size, model.length, size)


@contextmanager
def open_batcher(
    config: RunConfig, inference: Inference, pass_tokens: int = PASS_TOKENS
) -> Iterator[tuple[Opened, Batcher]]:
    """Open the language model of a run for generation.

    Args:
        config: the run.
        inference: the model and its memory: keys and values of `batch_size` sequences of full length.
        pass_tokens: largest number of new tokens that are read in one pass over the weights.

    Yields:
        The model, and the batcher that generates with it.

    Raises:
        ConfigError: if the model does not continue texts.
        CheckpointError: if the weights are missing.
        DoesNotFitError: if not even one sequence fits into the memory of the params.
    """

    def largest(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        input_ids = batch["input_ids"].long()
        return read_largest(cast(LanguageModel, model), input_ids, pass_tokens, ACTIVE_PER_ROW)

    with _opened(config, language_model(config), inference, largest) as model:
        engine, rows = model.engine, model.engine.plan.micro_batch_size
        active = min(ACTIVE_PER_ROW * rows, pass_tokens)
        limits = Limits(rows * model.length, pass_tokens, active, model.length)
        yield (
            model,
            Batcher(cast(LanguageModel, engine.model), engine.plan.device, limits, engine.inference),
        )


@contextmanager
def open_filler(
    config: RunConfig, inference: Inference, tokenizer: Path | None = None
) -> Iterator[MaskFiller]:
    """Open the encoder of a run to fill masked places of texts.

    Args:
        config: the run.
        inference: the model and its memory: `batch_size` texts of full length in a pass.
        tokenizer: see `model_codec` in `trainer.tokenizer`.

    Yields:
        An object that fills masked places with the model.

    Raises:
        ConfigError: if the model does not predict masked tokens.
        CheckpointError: if the weights are missing.
        DataError: if the tokenizer or its mask token is missing.
        DoesNotFitError: if not even one text fits into the memory of the params.
    """
    section = masked_model(config)
    if section is None:
        raise ConfigError(
            f"a {config.init.model.name} does not predict masked tokens",
            where=f"{config.source}: trainer.init.model.name",
            remedy="name a run whose model is a BERT",
        )
    path = tokenizer_path(config, tokenizer)
    loaded = open_tokenizer(path)
    mask = mask_token_id(loaded, path if path.is_dir() else path.parent)

    def largest(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        input_ids, attention_mask = (batch[name].long() for name in ("input_ids", "attention_mask"))
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return likely(cast(MaskModel, model), input_ids, attention_mask, torch.zeros_like(places), places)

    with _opened(config, section, inference, largest) as model:
        engine = model.engine
        yield MaskFiller(
            cast(MaskModel, engine.model),
            loaded,
            mask,
            engine.plan.device,
            engine.plan.micro_batch_size,
            model.length,
            engine.inference,
        )


@contextmanager
def _opened(
    config: RunConfig,
    model: DecoderConfig | BertConfig | HuggingFaceConfig,
    inference: Inference,
    largest: LossFunction,
    fabric: Fabric = ALONE,
) -> Iterator[Opened]:
    """Open a model with a plan for the pass that `largest` runs. Several ranks divide its batch."""
    length = check_length(model.max_position_embeddings, inference.max_length)
    init = config.init.model_copy(update={"model": model})
    trainable = dataclasses.replace(zoo_trainable(init, length), loss=largest)
    # Rounded up, because each rank plans memory for the largest part of a batch that any rank gets.
    batch_size = math.ceil(inference.batch_size / fabric.num_csx)
    work = Workload(batch_size, micro_batch_size=config.init.backend.micro_batch_size)
    if _has_library_weights(config, inference.checkpoint):
        # This comes before the plan, because an error about the weights says more than one about the plan.
        trainable.check_initial()
        opened = open_engine(init, trainable, work, blank=False, fabric=fabric)
    else:
        names = policy_names if isinstance(config.init.model, DPOConfig) else None
        opened = trained_model(init, trainable, work, inference.checkpoint, names=names, fabric=fabric)
    with opened as engine:
        engine.model.eval()
        yield Opened(engine, model.vocab_size, length)


def make_scorer(engine: Engine, vocab_size: int, max_length: int, batch_size: int) -> Scorer:
    """Return a scorer of an engine whose plan allows `batch_size` sequences of `max_length` tokens."""
    return Scorer(engine, vocab_size, max_length, batch_size * max_length)


def _has_library_weights(config: RunConfig, checkpoint: Path | None) -> bool:
    """True if the weights are those in the folder of a transformers model, because the run has no checkpoint.

    Raises:
        CheckpointError: if such a folder has no weights.
    """
    model = config.init.model
    if not isinstance(model, HuggingFaceConfig) or checkpoint is not None:
        return False
    # The weights in the folder are those from before the training, so a checkpoint comes first.
    if CheckpointManager(config.init.model_dir).newest_whole() is not None:
        return False
    if weights_folder(model) is None:
        raise CheckpointError(
            "the folder of the model has no weights",
            where=str(model.hf),
            remedy="save the model there with save_pretrained, or name a checkpoint with --checkpoint_path",
        )
    return True
