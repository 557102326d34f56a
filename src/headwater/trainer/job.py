"""The input of a run: a model with its loss, and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from headwater.core.batches import num_samples, split_batch
from headwater.core.errors import ConfigError
from headwater.core.loss_function import LossFunction, call_model
from headwater.store.saved_weights import Names
from headwater.stream.options import Initial
from headwater.trainer.callback import Callback
from headwater.trainer.metrics import Metric
from headwater.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig

Batch = Any
"""Tensors in any nesting, whose first dimension counts samples."""


@dataclasses.dataclass(frozen=True)
class Average:
    """Weights that are the moving average of other weights of the model.

    Attributes:
        source: prefix of the names of the weights that are averaged.
        target: prefix of the names of the averages; the rest of the name is the same.
        momentum: returns m for the number of a step, from 1, where average = m * average + (1 - m) * weight.
    """

    source: str
    target: str
    momentum: Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A model, and how its loss is computed.

    Attributes:
        model: the module; its parameters may be on the meta device if `initial` is given.
        example: number of samples -> a batch of that size; only its shapes are used.
        loss: computes the scalar loss of a batch; the model itself if not given.
        initial: returns the initial value of a parameter; if not given, the model's values are used.
        check_initial: raises an error if the source of the initial values has other parameters.
        learning_rate_scale: factor on the learning rate of a parameter, by name.
        divisible: True if the mean of the losses of micro-batches, weighted with `weight`, is the loss of the
            batch. The plan may then choose a smaller micro-batch.
        weight: returns the weight of a batch in a mean of losses: the number of labels or samples over which
            the loss of the batch is a mean.
        sort: reorders the samples of a batch before it is divided into micro-batches.
        cut: removes the parts of a micro-batch that need not be computed, such as padding.
        metrics: metrics that the loss function updates in eval mode, by name.
        pretrained_names: names that a parameter may have in a checkpoint that training starts from.
        parts: returns, for a parameter in which several matrices are stacked, the name of each matrix with
            its number of rows (-1: all). Patterns of names are compared with these names; if the result is
            empty, with the parameter's own name.
        averages: weights that are averages of other weights of the model.
    """

    model: nn.Module
    example: Callable[[int], Batch]
    loss: LossFunction = call_model
    initial: Initial | None = None
    check_initial: Callable[[], object] = lambda: None
    learning_rate_scale: Callable[[str], float] = lambda name: 1.0
    divisible: bool = False
    weight: Callable[[Batch], float] = lambda batch: float(num_samples(batch))
    sort: Callable[[Batch], Batch] = lambda batch: batch
    cut: Callable[[Batch], Batch] = lambda batch: batch
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    pretrained_names: Names = lambda name: (name,)
    parts: Callable[[str], Sequence[tuple[str, int]]] = lambda name: ()
    averages: Sequence[Average] = ()

    def micro_batches(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Yield micro-batches as they are computed, of `size` samples each; the last one has the rest."""
        return map(self.cut, split_batch(self.sort(batch), size))


class TrainingData(Protocol):
    """Interface: an endless sequence of batches whose position can be saved and set."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, beginning at the current position."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position after the last batch that was yielded, as plain values and tensors."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Set the position at which the next iteration begins."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """The input of a training run: model, data and settings.

    Attributes:
        init: settings of the run.
        trainable: the model with its loss.
        train: the training data.
        batch_size: samples of one step.
        evaluations: data to evaluate on during training; each iteration is one pass.
        steps_per_epoch: batches in one pass over the training data, if known.
        checkpoint: the checkpoint to start from; the newest of this run if not given.
        data_workers: processes of each rank that read data.
        callbacks: callbacks of the run in addition to those that the settings name.
        write: writes the files that continuing the run needs, such as the params, into the run's folder.
    """

    init: CommonInitConfig
    trainable: Trainable
    train: TrainingData
    batch_size: int
    evaluations: Sequence[Iterable[Batch]] = ()
    steps_per_epoch: int | None = None
    checkpoint: Path | None = None
    data_workers: int = 0
    callbacks: Sequence[Callback] = ()
    write: Callable[[RunDir], None] = lambda run_dir: None

    def end_step(self, start: int) -> int:
        """Return the step at which a run that starts at `start` ends.

        Raises:
            ConfigError: if the run is given in epochs, and the length of an epoch is unknown.
        """
        loop = self.init.loop
        if loop.num_epochs and not loop.steps_per_epoch and not self.steps_per_epoch:
            raise ConfigError(
                "num_epochs needs training data of known length",
                where="trainer.init.loop.num_epochs",
                remedy="write max_steps, or add steps_per_epoch",
            )
        return loop.end_step(start, self.steps_per_epoch)
