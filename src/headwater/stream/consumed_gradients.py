"""Gradients that an optimizer step has consumed: the store does not have their values any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.core.uncompiled import uncompiled
from headwater.store.gradients.port import consumed_error
from headwater.stream.at_rest import WithoutValues
from headwater.stream.home import Home
from headwater.stream.placeholders import DATA, is_metadata, stand_in

if TYPE_CHECKING:
    from headwater.stream.parameters import ParameterAtRest

_WITHOUT_VALUES = frozenset({torch.Tensor.detach_, torch._has_compatible_shallow_copy_type})
"""Functions that work on a consumed gradient, because they need no values."""

_ZEROING = frozenset({torch.Tensor.zero_, torch._foreach_zero_})

_REPLACING = frozenset({torch.Tensor.fill_, torch.Tensor.copy_})
"""Functions that replace all values of a gradient, so that they need no old ones."""

_OF_ITSELF = frozenset({torch.Tensor.detach, DATA.__get__})
"""Functions that return a view of a whole consumed gradient."""

_LIKE_IT = frozenset({
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full,
})  # fmt: skip
"""Functions that return new values of the dtype, the device and mostly the shape of a tensor."""

_CONVERSIONS = frozenset({
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.contiguous,
    torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16,
})  # fmt: skip
"""Functions that return the tensor itself if it has the requested dtype, device and layout already."""


class ConsumedGradient(WithoutValues):
    """The `grad` of a parameter after a step has consumed the gradient. It has no values to read.

    It can be dropped, overwritten, or converted to the dtype, device and layout that it has.

    Attributes:
        param: the parameter.
        home_at_step: the place of the parameter in the store when the step had consumed the gradient.
        number: tells it from gradients of the same parameter that other steps have consumed.
    """

    param: ParameterAtRest
    home_at_step: Home
    number: int

    @classmethod
    def of(cls, param: ParameterAtRest) -> ConsumedGradient:
        """Return the gradient of a parameter that the last step has consumed."""
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty((), dtype=param.home.spec.dtype, device=param.device)
            consumed = stand_in(cls, param.shape, like)
        consumed.param, consumed.home_at_step = param, param.home
        consumed.number = param.home.store.gradients.status.consumed[param.home.key]
        return consumed

    @property
    def home(self) -> Home:
        """The place of the parameter in its present store, or in its last store after its release."""
        return getattr(self.param, "home", self.home_at_step)

    @property
    def is_present(self) -> bool:
        """True if the parameter has not dropped this gradient meanwhile."""
        return self.home.store.gradients.status.consumed.get(self.home.key) == self.number

    @property
    def new_values(self) -> torch.Tensor | None:
        """The gradient in the store, if the loop has overwritten this gradient and has not dropped it."""
        is_overwritten = self.home.store.gradients.status.overwritten.get(self.home.key) == self.number
        return self.home.gradient() if is_overwritten else None

    @uninterrupted
    def overwrite(self, values: torch.Tensor | None = None) -> None:
        """Replace the gradient by new values, or by zeros, unless the parameter has dropped it meanwhile."""
        if not self.is_present:
            return
        if values is None:
            self.home.zero_gradient()
        else:
            self.home.set_gradient(values)
        self.home.store.gradients.status.overwrite_consumed(self.home.key, self.number)

    def refusal(self) -> StreamError:
        return consumed_error(self.home.spec.name)

    def with_new_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the result of a function of the gradient that does not use its values.

        If the function overwrites the gradient, the new values become the gradient in the store, unless the
        parameter has dropped this gradient meanwhile.
        """
        if self.home.key in self.home.store.gradients.status.sparse:
            raise self.refusal()
        spec = self.home.spec
        # Unlike the placeholder, this has the strides of the gradient.
        empty = torch.empty(spec.shape, dtype=spec.gradient_dtype, device=self.device)
        like = spec.like_the_parameter(empty)
        found: torch.Tensor = func(like, *args, **kwargs)
        if func not in _REPLACING:
            return found
        self.overwrite(found)
        return self

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        consumed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ConsumedGradient)]
        present = {id(leaf): leaf.new_values for leaf in consumed}
        if any(values is not None for values in present.values()):
            return _on_new_values(func, args, kwargs or {}, present)
        with torch._C.DisableTorchFunctionSubclass():
            if is_metadata(func) or func in _WITHOUT_VALUES:
                return func(*args, **(kwargs or {}))
            # `model.cpu()` and similar methods convert each gradient and assign the result to `grad.data`.
            if func in _CONVERSIONS and _changes_nothing(func, args, kwargs or {}):
                return args[0]
            if func == DATA.__set__ and len(consumed) == 2 and consumed[0].home == consumed[1].home:
                return None
            if func in _OF_ITSELF:
                return args[0]
            if len(consumed) == 1 and args[0] is consumed[0] and func in _LIKE_IT | _REPLACING:
                return args[0].with_new_values(func, args[1:], kwargs or {})
            if func not in _ZEROING:
                raise consumed[0].refusal()
            for gradient in consumed:
                gradient.overwrite()
            if func is torch.Tensor.zero_:
                return args[0]
            rest = [gradient for gradient in args[0] if not isinstance(gradient, ConsumedGradient)]
            return func(rest) if rest else None


def _on_new_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], present: Mapping[int, torch.Tensor | None]
) -> Any:
    """Run a function on the new values of consumed gradients that the loop has overwritten.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        present: identity of a consumed gradient -> its new values; `None` for one that was not overwritten.
    """
    gradients: dict[int, ConsumedGradient] = {}

    def values_of(leaf: Any) -> Any:
        values = present.get(id(leaf))
        if values is None:
            return leaf
        gradients[id(values)] = leaf
        return values

    result = func(*tree_map(values_of, args), **tree_map(values_of, kwargs))
    return tree_map(lambda leaf: gradients.get(id(leaf), leaf), result)


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a conversion of a consumed gradient would return the gradient itself."""
    gradient, *rest = args
    if not isinstance(gradient, ConsumedGradient):  # `tensor.to(gradient)` asks for its dtype
        return False
    options = dict(kwargs)
    default = torch.contiguous_format if func is torch.Tensor.contiguous else torch.preserve_format
    wanted = options.pop("memory_format", default)
    # The placeholder is one expanded element, so its own strides say nothing.
    if wanted is not torch.preserve_format and not gradient.home.meta.is_contiguous(memory_format=wanted):
        return False
    return func is torch.Tensor.contiguous or func(gradient, *rest, **options) is gradient
