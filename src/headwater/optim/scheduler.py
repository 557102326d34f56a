"""Schedulers: write the values of a schedule to an optimizer's parameter groups, step by step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from headwater.core.errors import CheckpointError, ConfigError
from headwater.optim.arguments import make_schedule
from headwater.optim.schedules import Chained, Schedule, Sequential

Tags = str | Sequence[str | None] | None
"""Which parameter groups a scheduler changes: those with one of the tags (`None`: without any), or all."""

ADJUSTMENT_KEYS = ("adjust_learning_rate", "adjust_val")
"""Keys of a parameter group with its own factor on what is scheduled, the first that is there."""

NO_WEIGHT_DECAY = "no_weight_decay"
"""Key of a parameter group that no weight-decay scheduler changes unless it names the group's tag."""


class Scheduler:
    """Sets one option of an optimizer to what a schedule says for the step.

    The value of step 0 is set at once; each `step()`, to be called after the optimizer's, sets the next.
    Parameter groups may be told apart by tags: `group["tags"]`, a collection of names.

    Subclasses say which option (`option`), and which schedule (`schedule_class`) their arguments make.

    Attributes:
        optimizer: whose parameter groups are written.
        schedule: the value as a function of the step.
        last_epoch: the step that is now set, 0 at first (named as in torch).
    """

    option: ClassVar[str]
    schedule_class: ClassVar[type[Schedule] | None] = None
    names: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.schedule_class is not None:
            # What `help` shows: the fields of the schedule, under the names of this family.
            cls.__signature__ = _signature(cls.schedule_class, cls.names)  # type: ignore[attr-defined]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        param_group_tags: Tags = None,
        **kwargs: Any,
    ) -> None:
        assert self.schedule_class is not None, f"{type(self).__name__} has no schedule_class"
        owner = type(self).__name__
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
                f"{type(optimizer).__name__} has no {self.option} that {type(self).__name__} could set",
                remedy="leave the scheduler out, or take another optimizer",
            )
        if not any(self._applies(group) for group in optimizer.param_groups):
            present = sorted({str(tag) for group in optimizer.param_groups for tag in _tags_of(group) if tag})
            wanted = "" if tags is None else f" with one of the tags {', '.join(map(str, tags))}"
            raise ConfigError(
                f"{type(self).__name__} finds no parameter group{wanted} to change",
                remedy=f"the tags of the groups are: {', '.join(present) or 'none'}",
            )
        self._write()

    @classmethod
    def argument_names(cls) -> list[str]:
        """What the constructor takes beside the optimizer, in order."""
        return [name for name in inspect.signature(cls).parameters if name != "optimizer"]

    def step(self, epoch: int | None = None) -> None:
        """Set the value of the next step, or of step `epoch`."""
        if self._ahead and epoch is None:
            self._ahead = False
            return
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._step_count += 1
        self._write()

    def step_with_optimizer(self) -> None:
        """Step in place of a loop that may or may not do it: if it calls `step` next, that was this one."""
        self._ahead = False
        self.step()
        self._ahead = True

    def get_last_value(self) -> list[float]:
        """The value of every parameter group, as it was last set."""
        return list(self._last_values)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: how far it is. The schedule itself is given by the arguments."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from where another scheduler was, and set the value of that step.

        Raises:
            CheckpointError: if `state_dict` is not that of a scheduler.
        """
        if "last_epoch" not in state_dict:
            raise CheckpointError(
                f"this is not the state of a scheduler: it has {sorted(state_dict)}, and no last_epoch",
                remedy="give load_state_dict what state_dict returned",
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
            if isinstance(group[self.option], torch.Tensor):
                group[self.option].fill_(value * self._factor(group))
            else:
                group[self.option] = value * self._factor(group)
        self._last_values = [float(group[self.option]) for group in self.optimizer.param_groups]


class Wrapper(Scheduler):
    """A scheduler made of others, which are not stepped: their schedules are what counts."""

    def _join(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: Sequence[Scheduler],
        schedule: Schedule,
        tags: Tags,
    ) -> None:
        """Take over from `schedulers`, with their tags where none are given.

        Raises:
            ConfigError: if they do not go together.
        """
        own = schedulers[0].param_group_tags if tags is None else _as_set(tags)
        for part in schedulers:
            same = part.optimizer is optimizer and part.option == self.option
            if not same or part.param_group_tags not in (None, own):
                raise ConfigError(
                    f"{type(self).__name__} cannot hold {type(part).__name__}: it is of another optimizer, "
                    f"has other param_group_tags, or sets {part.option} and not {self.option}",
                    remedy="make all of them of one family, for one optimizer, with the same tags",
                )
            if isinstance(part, ScalePerParamScheduler):
                raise ConfigError(
                    f"{type(self).__name__} cannot hold {type(part).__name__}: the factors would be lost",
                    remedy=f"put the whole of it into one {type(part).__name__}",
                )
        self._attach(optimizer, schedule, own)


class SequentialScheduler(Wrapper):
    """One scheduler after another.

    Args:
        optimizer: that of all of them.
        schedulers: at least one.
        milestones: the steps at which the second, third, … takes over. Where they are not given, each takes
            over when the one before it has ended.
        param_group_tags: which parameter groups are changed.

    Raises:
        ConfigError: if they do not go together.
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
    """The first one's value, times what the others are relative to their beginning.

    Args:
        schedulers: at least one, all for the same optimizer; only the first may begin at 0.
        param_group_tags: which parameter groups are changed.

    Raises:
        ConfigError: if they do not go together.
    """

    def __init__(self, schedulers: Sequence[Scheduler], *, param_group_tags: Tags = None) -> None:
        schedule = Chained(tuple(scheduler.schedule for scheduler in schedulers))
        self._join(schedulers[0].optimizer, schedulers, schedule, param_group_tags)


class ScalePerParamScheduler(Wrapper):
    """Another scheduler's value, times the parameter group's own factor.

    The factor is `group["adjust_learning_rate"]`, or else `group["adjust_val"]`, or else 1, as maximal update
    parametrization needs it (Yang et al., arXiv:2203.03466).

    Args:
        optimizer: that of `scheduler`.
        scheduler: what is scaled.
        param_group_tags: which parameter groups are changed.

    Raises:
        ConfigError: if they do not go together.
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
