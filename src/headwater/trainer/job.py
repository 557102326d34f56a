"""What a run is about: a model with its loss, and data. All else is the same for every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from headwater.config.run import SetupConfig
from headwater.core.errors import ConfigError
from headwater.plan.trace import LossFunction, call_model
from headwater.store.snapshot_load import Names
from headwater.stream.engine import Initial
from headwater.trainer.batches import num_samples
from headwater.trainer.metrics import Metric
from headwater.trainer.run_dir import RunDir

Batch = Any
"""Tensors in any nesting; their first dimension is the sample."""


@dataclasses.dataclass(frozen=True)
class Average:
    """Weights that follow other ones.

    Attributes:
        source: what the names of those that are followed begin with.
        target: what the names of those that follow begin with; what comes after it is the same.
        momentum: the share of their value that they keep after a step, by its number from 1.
    """

    source: str
    target: str
    momentum: Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A model, and how a loss comes of it.

    Attributes:
        model: the module; its parameters may be on the meta device if `initial` is given.
        example: number of samples -> a batch of so many, of which only the shapes matter.
        loss: computes the scalar loss of a batch; the model itself if not given.
        initial: initial value of a parameter; what the model holds if not given.
        learning_rate_scale: factor on the learning rate of a parameter, by name.
        divisible: whether the mean of the losses of micro-batches, weighted with `weight`, is the loss of the
            batch, so that the plan may divide it without being asked to.
        weight: what a batch counts for in a mean of losses: the labels or samples that its own is a mean of.
        metrics: what the loss function gathers in eval mode, by name.
        pretrained_names: what a parameter may be called in a checkpoint that training starts from.
        parts: what patterns of names are compared with, of a parameter in which several are stacked: names
            with their rows (-1: all); the parameter's own name where empty.
        averages: weights that follow other ones of the model.
    """

    model: nn.Module
    example: Callable[[int], Batch]
    loss: LossFunction = call_model
    initial: Initial | None = None
    learning_rate_scale: Callable[[str], float] = lambda name: 1.0
    divisible: bool = False
    weight: Callable[[Batch], float] = lambda batch: float(num_samples(batch))
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    pretrained_names: Names = lambda name: (name,)
    parts: Callable[[str], Sequence[tuple[str, int]]] = lambda name: ()
    averages: Sequence[Average] = ()


class TrainingData(Protocol):
    """Batches without end, and the position in them."""

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the position on."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """The position after the batch that was given last, as plain values and tensors."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Let the next iteration begin there."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        init: how it is trained.
        trainable: what is trained.
        train: on which data.
        batch_size: samples of one step.
        evaluations: data to evaluate on in between; each iteration is one pass.
        steps_per_epoch: batches in one pass over the training data, where that is known.
        checkpoint: where to start, if not from the run's own checkpoints.
        data_workers: processes of each rank that read data.
        write: writes into the run's folder what it takes to go on, params above all.
    """

    init: SetupConfig
    trainable: Trainable
    train: TrainingData
    batch_size: int
    evaluations: Sequence[Iterable[Batch]] = ()
    steps_per_epoch: int | None = None
    checkpoint: Path | None = None
    data_workers: int = 0
    write: Callable[[RunDir], None] = lambda run_dir: None

    def end_step(self, start: int) -> int:
        """Step at which a run that starts at `start` ends.

        Raises:
            ConfigError: if that is a number of epochs, and nobody knows how long one is.
        """
        loop = self.init.loop
        if loop.num_epochs and not loop.steps_per_epoch and not self.steps_per_epoch:
            raise ConfigError(
                "num_epochs needs training data of known length",
                where="trainer.init.loop.num_epochs",
                remedy="write max_steps, or add steps_per_epoch",
            )
        return loop.end_step(start, self.steps_per_epoch)
