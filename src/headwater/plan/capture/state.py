"""Size of an optimizer's state, found on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.core.stage import ParamSpec
from headwater.optim.spec import OptimizerSpec
from headwater.plan.stand_ins import call_operator
from headwater.store.layout import stored_dtype
from headwater.store.rule import UpdateRule


def total_state_bytes(optimizer: OptimizerSpec, params: Iterable[ParamSpec]) -> int:
    """Return the bytes of optimizer state that the weight store keeps for all `params` together.

    Raises:
        ConfigError: if the optimizer does not accept its arguments.
    """
    # Options become numbers, because no operator accepts a real tensor together with fake ones.
    rule, total = UpdateRule(optimizer.with_numbers()), 0
    with FakeTensorMode(), _StandIns():  # type: ignore[no-untyped-call]
        for param in params:
            for state in rule.state_layout(param).values():
                total += math.prod(state.shape_for(param)) * stored_dtype(param, state).itemsize
    return total


class _StandIns(TorchDispatchMode):
    """Returns a number if an optimizer reads one from a fake tensor, such as its step count."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_operator(func, args, kwargs or {})
