"""Hooks on the modules whose forward reads weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class SiteHooks:
    """Calls `enter` with the stages of a module before its forward and `leave` after it, also if it fails.

    Args:
        model: the model.
        sites: qualified module name -> stages read while that module's forward runs.
        enter: called with them before.
        leave: called with them after.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, Sequence[int]],
        enter: Callable[[Sequence[int]], None],
        leave: Callable[[Sequence[int]], None],
    ) -> None:
        self._handles: list[RemovableHandle] = []
        for path, stages in sites.items():
            module = model.get_submodule(path)
            self._handles += [
                module.register_forward_pre_hook(_before(stages, enter), prepend=True),
                module.register_forward_hook(_after(stages, leave), always_call=True),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _before(
    stages: Sequence[int], enter: Callable[[Sequence[int]], None]
) -> Callable[[nn.Module, Any], None]:
    return lambda module, args: enter(stages)


def _after(
    stages: Sequence[int], leave: Callable[[Sequence[int]], None]
) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, args, output: leave(stages)
