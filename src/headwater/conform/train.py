"""Trains a model for some steps, and records the values to compare."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from headwater.conform.record import Shown, settled
from headwater.conform.subject import Subject, seed_all
from headwater.core.module_calls import surround
from headwater.core.precision import Precision, autocast
from headwater.core.trees import map_tensors, tensors_in

_MOST_BYTES = 512 << 20

FP32 = Precision()


@dataclasses.dataclass(frozen=True)
class Course:
    """The settings of one run: its steps, its seed, and the values to read.

    Attributes:
        steps: number of optimizer steps.
        seed: seed from which the seed of each step is derived.
        observed: true if gradients, parameters and buffers are read in each step. If false, only losses and
            outputs are read in each step, and the other values after the last step. The two take different
            code paths in the engine.
        precision: the precision of the forwards and losses; all but fp32 run under autocast.
    """

    steps: int
    seed: int
    observed: bool
    precision: Precision = FP32


class Record:
    """The recorded values of a run.

    After the first 512 MiB of tensors, a digest is recorded instead of a tensor with several elements.
    """

    def __init__(self) -> None:
        self.shown: list[Shown] = []
        self._bytes = 0

    def add(self, name: str, value: Any) -> None:
        """Record a value."""
        value = settled(value)
        if isinstance(value, torch.Tensor):
            value = value.cpu()
            self._bytes += value.nbytes
            # A loss stays a number: the report shows it.
            if self._bytes > _MOST_BYTES and value.numel() > 1:
                value = _digest(value)
        self.shown.append((name, value))

    def add_all(self, what: str, values: Iterable[tuple[str, Any]]) -> None:
        """Record named values, with `what` before each name."""
        for name, value in values:
            self.add(f"{what} {name}", value)


def _digest(tensor: torch.Tensor) -> str:
    """Return a text with dtype, shape and a hash of a tensor's values.

    As in `first_difference`, zeros of both signs are equal, and NaN equals NaN.
    """
    if tensor.is_floating_point() and tensor.itemsize > 1:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor).masked_fill_(tensor == 0, 0.0)
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} with digest {digest}"


def train(subject: Subject, course: Course, prepare: Callable[[nn.Module], nn.Module]) -> list[Shown]:
    """Train a subject and return the recorded values.

    Args:
        subject: the model; its values are changed.
        course: the settings of the training.
        prepare: returns the model that is called; compiles it for a streamed run.
    """
    record = Record()
    record.add_all("initial value", subject.model.named_parameters())
    record.add_all("initial buffer", subject.model.named_buffers())
    outputs: list[torch.Tensor] = []
    model = prepare(subject.model)
    _watch_calls(model, outputs)
    optimizer = subject.optimizer(model)
    for step in range(course.steps):
        # In each step: a dry run or a longer forward must not shift the random numbers of later steps.
        seed_all(course.seed + step)
        outputs.clear()
        with autocast(course.precision, "cpu"):
            loss = subject.loss(model, batch_of(subject, step))
        loss.backward()
        at = f"step {step}:"
        record.add(f"{at} loss", loss)
        record.add_all(f"{at} output", ((str(index), output) for index, output in enumerate(outputs)))
        if course.observed:
            grads = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            record.add_all(f"{at} gradient", grads)
        optimizer.step()
        optimizer.zero_grad()
        if course.observed or step == course.steps - 1:
            record.add_all(f"{at} parameter", model.named_parameters())
            record.add_all(f"{at} buffer", model.named_buffers())
    record.add_all("optimizer state", _states(optimizer))
    return record.shown


def batch_of(subject: Subject, step: int) -> Any:
    """Return a copy of the batch of a step: models may change it."""
    batch = subject.batches[step % len(subject.batches)]
    return map_tensors(lambda tensor: tensor.detach().clone(), batch)


def _watch_calls(model: nn.Module, outputs: list[torch.Tensor]) -> None:
    """Append the outputs of each later outermost call of a model to a list.

    A forward hook would also get the calls of the dry run, which runs within the first call.
    """
    depth = 0

    def watched(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            outputs.extend(_tensors(output))
        return output

    surround(model, watched, outermost=True)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return copies of the tensors in an output, because a later step may change them."""
    tree = tuple(output.values()) if isinstance(output, Mapping) else output
    return [tensor.detach().clone() for tensor in tensors_in(tree)]


def _states(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, Any]]:
    """Yield the state of an optimizer, by parameter and key."""
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            yield f"of parameter {index}: {key}", value
