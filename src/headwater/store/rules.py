"""The interface of update rules: which optimizer updates a parameter, and which state it keeps."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from headwater.core.stage import ParamSpec
from headwater.store.layout import StateLayout

if TYPE_CHECKING:
    from headwater.optim.spec import OptimizerSpec
    from headwater.store.rule import UpdateRule


class UpdateRules(abc.ABC):
    """The update rule of each parameter of a model.

    Attributes:
        spec: the optimizer; the first one, if there are several.
        elementwise: true if every optimizer updates each element by itself, so that pieces may be updated.
    """

    spec: OptimizerSpec
    elementwise: bool

    @abc.abstractmethod
    def of(self, name: str) -> UpdateRule:
        """Return the update rule of the parameter called `name`. The parameter must have an optimizer."""

    @abc.abstractmethod
    def state_layout(self, param: ParamSpec) -> StateLayout:
        """Return the state tensors that the optimizer keeps for a parameter."""
