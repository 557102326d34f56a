"""Evaluation: loss and metrics on a data set, during training or alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping

from headwater.core.batches import num_samples
from headwater.core.errors import DataError, NonFiniteError
from headwater.stream.engine import Engine
from headwater.trainer.job import Batch, Trainable
from headwater.trainer.metrics import metric_values


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        loss: mean over the labels, or over the samples if the model's loss is a mean over samples.
        batches: batches evaluated.
        metrics: value of each metric of the model, by name.
    """

    loss: float
    batches: int
    metrics: Mapping[str, float]


def evaluate(
    engine: Engine,
    trainable: Trainable,
    batches: Iterable[Batch],
    *,
    max_batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Return the mean loss and the metrics over `batches` in eval mode.

    Batches are divided into the micro-batches of the plan if the model allows it.

    Args:
        engine: holds the weights.
        trainable: the model.
        batches: one pass over the data. With several ranks, each rank has a part of each batch.
        max_batches: largest number of batches to evaluate.
        stop: called before each batch; the evaluation ends if it returns True.

    Returns:
        The result; `None` if `stop` returned True on any rank.

    Raises:
        DataError: if there is no batch.
        NonFiniteError: if the loss is not finite.
    """
    total, weights, count, stopped = 0.0, 0.0, 0, False
    if engine.fabric.size > 1:
        engine.store.flush()  # so that each rank can read weights without the others
    for metric in trainable.metrics.values():
        metric.reset()
    training = engine.model.training
    engine.model.eval()
    try:
        for batch in itertools.islice(batches, max_batches):
            if stop():
                stopped = True
                break
            size = engine.plan.micro_batch_size if trainable.divisible else num_samples(batch)
            for micro_batch in trainable.micro_batches(batch, size):
                weight = trainable.weight(micro_batch)
                total += engine.evaluate(micro_batch).item() * weight
                weights += weight
            count += 1
    finally:
        engine.model.train(training)
    # All ranks gather, even those that have stopped. Otherwise ranks with data would wait for them forever.
    if any(engine.fabric.gather(stopped)):
        return None
    # A rank has counted fewer batches if its part of the last one was empty.
    count = int(max(engine.fabric.gather(count)))
    loss = _checked(sum(engine.fabric.gather(total)), sum(engine.fabric.gather(weights)), count)
    return Evaluation(loss, count, metric_values(trainable.metrics, engine.fabric))


def _checked(total: float, weights: float, count: int) -> float:
    if count == 0:
        raise DataError(
            "the validation data have fewer samples than one batch",
            where="val_dataloader.batch_size",
            remedy="write a smaller batch_size, or drop_last: false",
        )
    if weights == 0:
        raise DataError(
            "no label of the validation data counts in the loss",
            where="val_dataloader",
            remedy="look at samples: headwater data show DIR --out page.html",
        )
    loss = total / weights
    # True for NaN and for the infinities, whose difference is NaN.
    if loss - loss != 0:
        raise NonFiniteError(
            f"expected a finite validation loss, got {loss}",
            where="val_dataloader",
            remedy="look for damaged validation data, or go back to an earlier checkpoint: --checkpoint_path",
        )
    return loss
