"""Optimizer options that differ between parameters: schedules for parameters with certain tags."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping

from headwater.config.optimizers import ScheduleConfig
from headwater.core.errors import ConfigError
from headwater.optim.schedules import Constant, Schedule
from headwater.optim.spec import is_bias_or_norm
from headwater.trainer.job import Job

logger = logging.getLogger(__name__)

Options = Callable[[str], Mapping[str, float]]
"""Function: name of a parameter -> its optimizer options."""


def options_by_name(job: Job) -> Callable[[int], Options] | None:
    """Return a function that returns the optimizer options of a parameter at a step.

    Args:
        job: the run.

    Returns:
        A function of the step, from 0; `None` if one learning rate applies to all parameters.

    Raises:
        ConfigError: if a trained parameter has no learning rate.
    """
    init = job.init
    # Usually all parameters have the same rate. Then no function is called for each parameter.
    if all(entry.option == "lr" and not entry.tags for entry in init.schedulers):
        return None
    rate = init.optimizer.arguments.learning_rate
    schedules: dict[str, dict[str, Schedule]] = {}
    for name, tags in _tags_by_name(job).items():
        own = schedules[name] = {} if rate is None else {"lr": Constant(rate)}
        for entry in init.schedulers:
            if tags.intersection(entry.tags) or (not entry.tags and _is_for_all(entry, name, job)):
                own[entry.option] = entry.build()
    without = [name for name, own in schedules.items() if "lr" not in own]
    if without:
        more = f" and {len(without) - 1} more parameters" if without[1:] else ""
        raise ConfigError(
            f"no schedule sets the learning rate of {without[0]}{more}",
            where="trainer.init.schedulers",
            remedy="add a schedule without param_group_tags, or a tag for it to the optimizer's params",
        )

    def at(step: int) -> Options:
        return lambda name: {option: each.value(step) for option, each in schedules[name].items()}

    return at


def _is_for_all(entry: ScheduleConfig, name: str, job: Job) -> bool:
    """True if a schedule without tags applies to this parameter. A weight decay skips biases and norms."""
    shape = tuple(job.trainable.model.get_parameter(name).shape)
    return entry.option == "lr" or not is_bias_or_norm(name, shape)


def _tags_by_name(job: Job) -> dict[str, set[str]]:
    """Return the tags of each parameter that is trained."""
    model = job.trainable.model
    tags: dict[str, set[str]] = {name: set() for name, p in model.named_parameters() if p.requires_grad}
    for group in job.init.optimizer.arguments.params:
        found = [name for name in tags if _is_meant(name, job, group.params)]
        if not found:
            logger.warning(
                "no trainable parameter matches %s: the tag %s has no parameters",
                " or ".join(group.params),
                group.tag,
            )
        for name in found:
            tags[name].add(group.tag)
    return tags


def _is_meant(name: str, job: Job, patterns: tuple[str, ...]) -> bool:
    # Users write the names of public checkpoints, in which stacked parameters are separate.
    names = (name, *(public for public, _ in job.trainable.parts(name)))
    return any(fnmatch.fnmatchcase(each, pattern) for each in names for pattern in patterns)
