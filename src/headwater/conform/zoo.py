"""Models of params files, with the data that the params name."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn

from headwater.config.files import find_params
from headwater.config.run import load_params
from headwater.conform.subject import Subject
from headwater.core.loss_function import call_model
from headwater.core.stage import ParamSpec
from headwater.models.registry import build_model
from headwater.stream.options import Initial
from headwater.trainer.planning import optimizer_of
from headwater.trainer.run_dir import RunDir
from headwater.trainer.zoo_job import zoo_job

_BATCHES = 4


def load_zoo_subject(name: str) -> Subject:
    """Return the model of a params file, a shipped one or a `model_dir`, with its first training batches.

    The model is trained in fp32, by the optimizer of the params with its initial learning rate.

    Raises:
        HeadwaterError: if params or data are wrong or missing.
    """
    folder = Path(name).expanduser()
    config = load_params(RunDir(folder).require_params() if folder.is_dir() else find_params(name), [])
    job = zoo_job(config)
    assert job.trainable.initial is not None, "models of params files draw their own values"
    model = build_model(config.init.model)
    _fill(model, job.trainable.initial)
    optimizer = optimizer_of(config.init, job.trainable)
    return Subject(
        model=model,
        batches=list(itertools.islice(iter(job.train), _BATCHES)),
        loss=call_model,
        optimizer=lambda model: optimizer.build(
            optimizer.groups((key, value) for key, value in model.named_parameters() if value.requires_grad)
        ),
    )


def _fill(model: nn.Module, initial: Initial) -> None:
    """Set every parameter to the initial value of a run."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = ParamSpec(name, tuple(parameter.shape), parameter.dtype, parameter.dtype)
            parameter.copy_(initial(spec))
