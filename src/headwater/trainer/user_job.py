"""Runs of a model and data of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from headwater.config.user import UserConfig
from headwater.fabric.fabric import ALONE, Fabric
from headwater.trainer.base_model import BaseModelLoss, ModelClass, build_base_model
from headwater.trainer.batches import num_samples, split_batch
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.job import Batch, Job, Trainable
from headwater.trainer.metrics import find_metrics
from headwater.trainer.session import evaluate_data
from headwater.trainer.user_data import Passes, RepeatedPass, RepeatedPasses, seed_everything
from headwater.utils.data.parts import Parts

DataFunction = Callable[[dict[str, dict[str, Any]]], Any]
"""Makes a data loader from the sections of a params file."""


def user_trainable(
    config: UserConfig, model_class: ModelClass, first: Batch, *, without_values: bool = False
) -> Trainable:
    """The user's model, built with torch's own initialisation from the seed of the run.

    Args:
        config: the params.
        model_class: makes the model.
        first: a batch, of which only the shapes matter.
        without_values: build it on the meta device, where it takes no memory.

    Raises:
        ConfigError: if it is no `PyTorchBaseModel`, or not complete.
    """
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
    """What a function of the user's gives for the params.

    Raises:
        DataError: if that cannot be iterated over.
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
    """A training run, with evaluations in between if there are data for them.

    Args:
        config: the params.
        model_class: makes the model.
        get_train_dataloader: makes what gives the batches of training.
        get_eval_dataloader: likewise for evaluations.
        fabric: the ranks that train together.

    Raises:
        ConfigError: if the model is no `PyTorchBaseModel`.
        DataError: if a loader gives no batches.
    """
    train = open_loader(config, get_train_dataloader)
    first, parts = train.first(), Parts()
    parts.look_at(first)
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
    """The user's model without values, and the batch size: for what can be said before training.

    Raises:
        ConfigError: if the model is no `PyTorchBaseModel`.
        DataError: if the loader gives no batches.
    """
    first = open_loader(config, get_train_dataloader).first()
    return user_trainable(config, model_class, first, without_values=True), num_samples(first)


def evaluate_user_model(
    config: UserConfig, model_class: ModelClass, get_eval_dataloader: DataFunction
) -> Evaluation:
    """Evaluate a checkpoint: the one that the params name, or the newest.

    Raises:
        ConfigError: if the model is no `PyTorchBaseModel`.
        DataError: if the loader gives no batches.
        CheckpointError: if there is no checkpoint.
    """
    passes = open_loader(config, get_eval_dataloader)
    first = passes.first()
    trainable = user_trainable(config, model_class, first)
    return evaluate_data(config.init, trainable, RepeatedPass(passes), num_samples(first), config.checkpoint)
