"""Comparison of two compute ranks with one, which holds up to rounding only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from headwater.api.ranks import take_part, whole
from headwater.conform.record import Difference, Shown
from headwater.conform.subject import Subject, seed_all
from headwater.conform.train import Course, batch_of
from headwater.core.batches import num_samples, slice_batch
from headwater.core.errors import ModelError
from headwater.core.precision import PrecisionName, autocast
from headwater.core.units import counted

NUM_CSX = 2
TOLERANCES: Mapping[PrecisionName, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-3}
"""Largest relative difference of a loss. Matrix products of other sizes are rounded differently."""


def train_in_parts(subject: Subject, course: Course) -> list[Shown]:
    """Train in plain PyTorch, with each batch divided into one part for each rank, and return the losses.

    Raises:
        ModelError: if the model draws random numbers, because each rank draws different ones.
    """
    subject.model.train()
    optimizer = subject.optimizer(subject.model)
    shown: list[Shown] = []
    for step in range(course.steps):
        seed_all(course.seed + step)
        batch = batch_of(subject, step)
        samples = num_samples(batch)
        if samples % NUM_CSX:
            raise ModelError(
                f"a batch of {counted(samples, 'sample', 'samples')} cannot be divided among {NUM_CSX} ranks",
                where=f"step {step}",
                remedy=f"use batches of {samples + 1} samples to compare ranks",
            )
        size, before, total = samples // NUM_CSX, torch.get_rng_state(), 0.0
        for part in range(NUM_CSX):
            with autocast(course.precision, "cpu"):
                loss = subject.loss(subject.model, slice_batch(batch, part * size, (part + 1) * size))
            loss = loss / NUM_CSX
            loss.backward()
            total += loss.item()
        if not torch.equal(before, torch.get_rng_state()):
            raise ModelError(
                "the model draws random numbers, which differ between ranks",
                remedy="set its dropout to 0 to compare ranks",
            )
        optimizer.step()
        optimizer.zero_grad()
        shown.append((f"step {step}: loss", total))
    return shown


def train_ranks(subject: Subject, course: Course, prepare: Callable[[nn.Module], nn.Module]) -> list[Shown]:
    """Train as one of the ranks, and return the losses of the whole batches."""
    model = prepare(subject.model)
    optimizer = subject.optimizer(model)
    shown: list[Shown] = []
    for step in range(course.steps):
        seed_all(course.seed + step)
        with autocast(course.precision, "cpu"):
            loss: Any = subject.loss(model, take_part(batch_of(subject, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown.append((f"step {step}: loss", whole(loss).item()))
    return shown


def rounded_difference(plain: list[Shown], ranks: list[Shown], tolerance: float) -> Difference | None:
    """Return the first loss whose relative difference is larger than the tolerance, or `None`."""
    for (name, expected), (_, found) in zip(plain, ranks, strict=True):
        off = abs(expected - found) / max(abs(expected), 1e-12)
        # Not `off > tolerance`: NaN must count as a difference.
        if not off <= tolerance:
            return Difference(name, repr(expected), repr(found), f"relative difference {off:.3g}")
    return None
