"""Runs of the user's own model and data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from headwater.config.user import UserConfig
from headwater.core.batches import num_samples, split_batch
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import ALONE, Fabric
from headwater.trainer.base_model import BaseModelLoss, ModelClass, build_base_model
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.job import Batch, Job, Trainable
from headwater.trainer.metrics import find_metrics
from headwater.trainer.session import evaluate_data
from headwater.trainer.user_data import Passes, RepeatedPass, RepeatedPasses, seed_everything
from headwater.utils.data.parts import Parts

DataFunction = Callable[[dict[str, dict[str, Any]]], Any]
"""Function that returns a data loader, given the sections of a params file."""


def user_trainable(
    config: UserConfig, model_class: ModelClass, first: Batch, *, without_values: bool = False
) -> Trainable:
    """Return the user's model, built with torch's own initialization from the seed of the run.

    Args:
        config: the params.
        model_class: class of the model.
        first: a batch; only its shapes are used.
        without_values: build the model on the meta device, where it takes no memory.

    Raises:
        ConfigError: if `model_class` is not a subclass of PyTorchBaseModel, or the model is not complete.
    """
    config.init.backend.refuse_loss("trainer.init.backend.loss")
    config.init.backend.refuse_padding("trainer.init.backend.skip_padding")
    # Seeded again: random numbers that loaders have drawn must not change the initial weights.
    seed_everything(config.init.seed)
    base = build_base_model(model_class, config.params, without_values=without_values)
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), first)
    return Trainable(
        model=base.model,
        example=lambda size: next(split_batch(shapes, size)),
        loss=BaseModelLoss(base),
        metrics=find_metrics(base),
    )


def open_loader(config: UserConfig, function: DataFunction) -> Passes:
    """Call a user's function for the params, and return passes over the loader that it returns.

    Raises:
        DataError: if the loader cannot be iterated over.
    """
    seed_everything(config.init.seed)
    return Passes(
        function(copy.deepcopy(config.params)), config.init.seed, getattr(function, "__name__", "data loader")
    )


def user_job(
    config: UserConfig,
    model_class: ModelClass,
    get_train_dataloader: DataFunction,
    get_eval_dataloader: DataFunction | None = None,
    fabric: Fabric = ALONE,
) -> Job:
    """Return a training run, with evaluations if there are data for them.

    Args:
        config: the params.
        model_class: class of the model.
        get_train_dataloader: returns the loader of training data.
        get_eval_dataloader: returns the loader of evaluation data.
        fabric: the ranks that train together.

    Raises:
        ConfigError: if `model_class` is not a subclass of PyTorchBaseModel, or the params ask for an
            evaluation on tasks.
        DataError: if a loader has no batches.
    """
    if config.init.evaluates_tasks:
        raise ConfigError(
            "evaluations on tasks need a model of a params file",
            where="trainer.init.callbacks",
            remedy="remove the callback",
        )
    train = open_loader(config, get_train_dataloader)
    first, parts = train.first(), Parts()
    parts.compare_first(first)
    evaluations = (
        [] if get_eval_dataloader is None else [RepeatedPass(open_loader(config, get_eval_dataloader))]
    )
    return Job(
        init=config.init,
        trainable=user_trainable(config, model_class, first),
        train=RepeatedPasses(train, parts),
        batch_size=num_samples(first) * (fabric.num_csx if parts.are_shares else 1),
        evaluations=evaluations,
        steps_per_epoch=train.length,
        checkpoint=config.checkpoint,
        write=lambda run_dir: run_dir.write_user_params(config),
    )


def user_example(
    config: UserConfig, model_class: ModelClass, get_train_dataloader: DataFunction
) -> tuple[Trainable, int]:
    """Return the user's model without values, and the batch size, for checks before training.

    Raises:
        ConfigError: if `model_class` is not a subclass of PyTorchBaseModel.
        DataError: if the loader has no batches.
    """
    first = open_loader(config, get_train_dataloader).first()
    return user_trainable(config, model_class, first, without_values=True), num_samples(first)


def evaluate_user_model(
    config: UserConfig, model_class: ModelClass, get_eval_dataloader: DataFunction
) -> Evaluation:
    """Evaluate the checkpoint that the params name, or else the newest.

    Raises:
        ConfigError: if `model_class` is not a subclass of PyTorchBaseModel.
        DataError: if the loader has no batches.
        CheckpointError: if there is no checkpoint.
    """
    passes = open_loader(config, get_eval_dataloader)
    first = passes.first()
    trainable = user_trainable(config, model_class, first)
    return evaluate_data(config.init, trainable, RepeatedPass(passes), num_samples(first), config.checkpoint)
