"""Selective recomputation: values of cheap operators are computed again in backward; see [Note: recipes]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from headwater.core.torch_settings import has_dispatch_mode
from headwater.plan.recipes import Recipes
from headwater.plan.writes import changed_by, changed_in_place
from headwater.stream.saved_tensors import HandleOf, Resolve


@final
class Selection:
    """Decides for each tensor that autograd saves in a forward whether backward computes it again.

    Args:
        handle_of: returns the handle of a weight; `None` for other tensors.
        resolve: returns the weight of a handle.
    """

    def __init__(self, handle_of: HandleOf, resolve: Resolve) -> None:
        self._recipes = Recipes(handle_of, resolve)
        self._is_watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enter a context that watches the operators of a forward. A nested context has no effect.

        Inside a dispatch mode of the user everything is kept: backward may run outside of this mode.
        """
        if self._is_watching or has_dispatch_mode():
            yield
            return
        self._is_watching = True
        try:
            with _Watch(self._recipes):
                yield
        finally:
            self._is_watching = False
            self._recipes.clear()

    def function_for(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return a function that computes a saved tensor again, or `None` if the tensor must be kept."""
        if not self._is_watching:
            return None
        again = self._recipes.function_for(tensor)
        if again is None:
            self._recipes.keep(tensor.detach())
            return None
        return _Unchanged(again, tensor)


class _Unchanged:
    """A function that computes a tensor again; it raises if the saved tensor was changed in place."""

    def __init__(self, again: Callable[[], torch.Tensor], tensor: torch.Tensor) -> None:
        self._again = again
        self._shape = tensor.shape
        self._version = tensor._version
        self._counter = tensor.detach()  # has the version counter of the tensor
        self._counter.data = tensor.new_empty(0)  # but no longer its memory

    def __call__(self) -> torch.Tensor:
        if self._counter._version != self._version:
            raise changed_in_place(self._shape)
        if not has_dispatch_mode():
            return self._again()
        with _disable_current_modes():  # the user's modes are for the operators of the backward
            return self._again()


class _Watch(TorchDispatchMode):
    """A dispatch mode that shows `Recipes` each operator."""

    def __init__(self, recipes: Recipes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipes = recipes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._recipes.before_change(changed_by(func, args, kwargs))
        out = func(*args, **kwargs)
        self._recipes.note(func, args, kwargs, out)
        return out
