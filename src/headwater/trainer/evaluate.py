"""The loss on a data set, the same in the middle of training and on its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from headwater.core.errors import DataError, NonFiniteError
from headwater.data.loader import Batch
from headwater.stream.engine import Engine
from headwater.trainer.datasets import num_samples, split_batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        loss: mean over the samples.
        batches: batches evaluated.
    """

    loss: float
    batches: int


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    *,
    max_batches: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The mean loss over `batches`, in eval mode and in the micro-batches of the plan.

    Args:
        engine: holds the model.
        batches: one pass over the data.
        max_batches: take no more than these.
        stop: asked before each batch whether to give up.

    Returns:
        `None` if `stop` said so.

    Raises:
        DataError: if there is no batch.
        NonFiniteError: if the loss is not finite.
    """
    total, samples, count = 0.0, 0, 0
    training = engine.model.training
    engine.model.eval()
    try:
        for batch in itertools.islice(batches, max_batches):
            if stop():
                return None
            for micro_batch in split_batch(batch, engine.plan.micro_batch_size):
                total += engine.evaluate(micro_batch).item() * num_samples(micro_batch)
            samples, count = samples + num_samples(batch), count + 1
    finally:
        engine.model.train(training)
    return Evaluation(_checked(total, samples), count)


def _checked(total: float, samples: int) -> float:
    if samples == 0:
        raise DataError(
            "the validation data do not fill one batch",
            where="val_dataloader.batch_size",
            remedy="write a smaller batch_size, or drop_last: false",
        )
    loss = total / samples
    if loss - loss != 0:
        raise NonFiniteError(f"the validation loss is {loss}", remedy="look at the validation data")
    return loss
