"""Schedulers, which write the values of a schedule to an optimizer's parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from headwater.core.errors import CheckpointError, ConfigError
from headwater.optim.arguments import make_schedule
from headwater.optim.schedules import Chained, Schedule, Sequential

Tags = str | Sequence[str | None] | None
"""Tags of the parameter groups that a scheduler changes; `None` for all groups.

In a sequence, the entry `None` stands for groups without tags.
"""

ADJUSTMENT_KEYS = ("adjust_learning_rate", "adjust_val")
"""Keys under which a parameter group can have a factor on the value; the first that is present counts."""

NO_WEIGHT_DECAY = "no_weight_decay"
"""Key of a parameter group that weight-decay schedulers change only if they name the group's tag."""


class Scheduler:
    """A scheduler of one option of an optimizer, such as its learning rate.

    The value of step 0 is set at once. Each `step()`, called after the optimizer's `step()`, sets the next
    value. A scheduler can be limited to parameter groups with given tags: `group["tags"]`, a collection of
    names.

    Subclasses define the option (`option`) and the class of the schedule (`schedule_class`), which is
    constructed from the scheduler's arguments.

    Attributes:
        optimizer: the optimizer whose parameter groups are written.
        schedule: the value as a function of the step.
        last_epoch: the current step, 0 at first (named as in torch).
    """

    option: ClassVar[str]
    schedule_class: ClassVar[type[Schedule] | None] = None
    names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.schedule_class is not None:
            # `help` shows this signature: the schedule's fields, under the argument names of this family.
            cls.__signature__ = _signature(cls.schedule_class, cls.names)  # type: ignore[attr-defined]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        param_group_tags: Tags = None,
        **kwargs: Any,
    ) -> None:
        owner = type(self).__name__
        if self.schedule_class is None:
            raise ConfigError(
                f"expected a scheduler with a schedule, got {owner}, which has no schedule_class",
                remedy="use one of its subclasses, or set schedule_class in your own",
            )
        schedule = make_schedule(self.schedule_class, args, kwargs, names=self.names, owner=owner)
        self._attach(optimizer, schedule, _as_set(param_group_tags))

    def _attach(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, tags: frozenset[str | None] | None
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.param_group_tags = tags
        self.last_epoch = 0
        self._step_count = 1
        self._ahead = False
        if any(self.option not in group for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(self).__name__} sets {self.option}, which {type(optimizer).__name__} does not have",
                remedy="remove the scheduler, or use another optimizer",
            )
        if not any(self._applies(group) for group in optimizer.param_groups):
            present = sorted({str(tag) for group in optimizer.param_groups for tag in _tags_of(group) if tag})
            wanted = "" if tags is None else f" with one of the tags {', '.join(map(str, tags))}"
            raise ConfigError(
                f"{type(self).__name__} found no parameter group{wanted} to change",
                remedy=f"the tags of the groups are: {', '.join(present) or 'none'}",
            )
        self._write()

    @classmethod
    def argument_names(cls) -> list[str]:
        """Return the names of the constructor's arguments except the optimizer, in order."""
        return [name for name in inspect.signature(cls).parameters if name != "optimizer"]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step, or to step `epoch`, and set the option of the optimizer to the value there."""
        # `step_with_optimizer` has already taken this step.
        if self._ahead and epoch is None:
            self._ahead = False
            return
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._step_count += 1
        self._write()

    def step_with_optimizer(self) -> None:
        """Go to the next step, after a step of the optimizer. The next call of `step` then does nothing."""
        # `_ahead` is still true if the user's loop did not call `step` after the optimizer's last step. Then
        # `step` would do nothing below.
        self._ahead = False
        self.step()
        self._ahead = True

    def get_last_value(self) -> list[float]:
        """Return the current value of every parameter group."""
        return list(self._last_values)

    def state_dict(self) -> dict[str, Any]:
        """Return the current step of the scheduler. The schedule itself is not part of the state."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step in `state_dict`, and set the option of the optimizer to the value there.

        Raises:
            CheckpointError: if `state_dict` is not the state of a scheduler.
        """
        if "last_epoch" not in state_dict:
            raise CheckpointError(
                f"expected the state of a scheduler with the key last_epoch, got keys {sorted(state_dict)}",
                remedy="pass the return value of state_dict to load_state_dict",
            )
        self._ahead = False
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("_step_count", self.last_epoch + 1))
        self._write()

    def _applies(self, group: Mapping[str, Any]) -> bool:
        if self.param_group_tags is None:
            return not (self.option == "weight_decay" and group.get(NO_WEIGHT_DECAY))
        return bool(self.param_group_tags & _tags_of(group))

    def _factor(self, group: Mapping[str, Any]) -> float:
        return 1.0

    def _write(self) -> None:
        value = self.schedule.value(self.last_epoch)
        for group in self.optimizer.param_groups:
            if not self._applies(group):
                continue
            # A tensor is changed in place: a compiled or captured step reads this tensor.
            if isinstance(group[self.option], torch.Tensor):
                group[self.option].fill_(value * self._factor(group))
            else:
                group[self.option] = value * self._factor(group)
        self._last_values = [float(group[self.option]) for group in self.optimizer.param_groups]


class Wrapper(Scheduler):
    """A scheduler made of others. It uses their schedules; their `step` need not be called."""

    def _join(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Scheduler],
        schedule: Schedule,
        tags: Tags,
    ) -> None:
        """Attach this scheduler to the optimizer, where it replaces `schedulers`.

        Args:
            optimizer: the optimizer to attach to.
            schedulers: the schedulers that this one replaces.
            schedule: the combined schedule.
            tags: tags of the parameter groups to change; those of the first scheduler if `None`.

        Raises:
            ConfigError: if the schedulers differ in optimizer, tags or option.
        """
        own = schedulers[0].param_group_tags if tags is None else _as_set(tags)
        for part in schedulers:
            same = part.optimizer is optimizer and part.option == self.option
            if not same or part.param_group_tags not in (None, own):
                raise ConfigError(
                    f"{type(self).__name__} cannot contain this {type(part).__name__}: it has another "
                    f"optimizer or other param_group_tags, or sets {part.option} instead of {self.option}",
                    remedy="construct all of them for one optimizer and option, with the same tags",
                )
            if isinstance(part, ScalePerParamScheduler):
                raise ConfigError(
                    f"{type(self).__name__} cannot contain {type(part).__name__}: its factors would be lost",
                    remedy=f"put the combined scheduler into one {type(part).__name__}",
                )
        self._attach(optimizer, schedule, own)


class SequentialScheduler(Wrapper):
    """A sequence of schedulers.

    Args:
        optimizer: the optimizer of all of them.
        schedulers: at least one.
        milestones: the steps at which the second, third, … scheduler starts. If `None`, each starts when the
            one before it has ended.
        param_group_tags: tags of the parameter groups to change.

    Raises:
        ConfigError: if the schedulers differ in optimizer, tags or option, or the milestones do not fit.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Scheduler],
        milestones: Sequence[int] | None = None,
        *,
        param_group_tags: Tags = None,
    ) -> None:
        parts = tuple(scheduler.schedule for scheduler in schedulers)
        schedule = Sequential.of(parts) if milestones is None else Sequential(parts, tuple(milestones))
        self._join(optimizer, schedulers, schedule, param_group_tags)


class ChainedScheduler(Wrapper):
    """A product of schedulers: the value of the first, times the others' values divided by those at step 0.

    Args:
        schedulers: at least one, all for the same optimizer; only the first may start at 0.
        param_group_tags: tags of the parameter groups to change.

    Raises:
        ConfigError: if the schedulers differ in optimizer, tags or option.
    """

    def __init__(self, schedulers: Sequence[Scheduler], *, param_group_tags: Tags = None) -> None:
        schedule = Chained(tuple(scheduler.schedule for scheduler in schedulers))
        self._join(schedulers[0].optimizer, schedulers, schedule, param_group_tags)


class ScalePerParamScheduler(Wrapper):
    """A scheduler whose value is multiplied by a factor of each parameter group.

    The factor is `group["adjust_learning_rate"]`, or else `group["adjust_val"]`, or else 1. Maximal update
    parametrization (muP; Yang et al., arXiv:2203.03466) needs such factors.

    Args:
        optimizer: the optimizer of `scheduler`.
        scheduler: the scheduler to scale.
        param_group_tags: tags of the parameter groups to change.

    Raises:
        ConfigError: if the scheduler has another optimizer, other tags or another option.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, *, param_group_tags: Tags = None
    ) -> None:
        self._join(optimizer, [scheduler], scheduler.schedule, param_group_tags)

    def _factor(self, group: Mapping[str, Any]) -> float:
        return next((float(group[key]) for key in ADJUSTMENT_KEYS if key in group), 1.0)


def _as_set(tags: Tags) -> frozenset[str | None] | None:
    if tags is None:
        return None
    return frozenset((tags,) if isinstance(tags, str) else tags)


def _tags_of(group: Mapping[str, Any]) -> frozenset[str | None]:
    return _as_set(group.get("tags") or None) or frozenset((None,))


def _signature(kind: type[Schedule], names: Mapping[str, str]) -> inspect.Signature:
    first = inspect.Parameter("optimizer", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    theirs = inspect.signature(kind).parameters.values()
    own = [parameter.replace(name=names.get(parameter.name, parameter.name)) for parameter in theirs]
    tags = inspect.Parameter("param_group_tags", inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([first, *own, tags])
