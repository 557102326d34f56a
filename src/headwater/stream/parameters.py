"""What a parameter is while its weights are in the store: every use of its values goes there.

[Note: parameters at rest]
Inside the forward of its module a parameter is a plain `nn.Parameter` over a slab. Between forwards the same
object has the class `ParameterAtRest`, which sees every torch operation on it: shapes and dtypes are answered
at once, values are read from the store, what an operation writes goes back to the store, and gradients go to
where the others are. So nothing can read a weight that is not there, wherever a model or a loop does it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor
from headwater.core.stage import ParamSpec
from headwater.store.store import WeightStore

logger = logging.getLogger(__name__)

_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA = frozenset({
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.element_size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.get_device,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed,
    torch.Tensor.is_contiguous, torch.Tensor.is_shared, torch.Tensor.is_pinned,
    torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.requires_grad_, torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Home:
    """Where the values and the gradient of a parameter are.

    Attributes:
        store: the weight store.
        stage: its stage.
        index: its index in the stage.
        device: where the values go that are read.
    """

    store: WeightStore
    stage: int
    index: int
    device: torch.device

    @property
    def spec(self) -> ParamSpec:
        return self.store.stages[self.stage].params[self.index]

    def read(self) -> torch.Tensor:
        """A copy of the master."""
        return self.store.read_param(self.stage, self.index).to(self.device)

    def pieces(self) -> Iterator[torch.Tensor]:
        """The master in pieces, each valid until the next is asked for."""
        with closing(self.store.read(self.stage, with_states=False, params={self.index})) as pieces:
            for piece in pieces:
                yield piece.master

    def lazy(self) -> LazyTensor:
        """The master as a tensor that is read when it is used: then, and not now."""
        return LazyTensor(self.pieces, self.spec.shape, self.spec.dtype)

    def write(self, value: torch.Tensor) -> None:
        """Replace the master by a tensor of its shape."""
        self.store.write_param(self.stage, self.index, value.detach())

    def gradient(self) -> torch.Tensor | None:
        """The sum that no optimizer has used yet."""
        return self.store.gradients.expose(self.stage, self.index)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Replace or drop it."""
        if gradient is None:
            self.store.gradients.drop(self.stage, self.index)
        else:
            self.store.gradients.replace(self.stage, self.index, gradient.to("cpu"))


class ParameterAtRest(nn.Parameter):
    """A parameter whose values are in the weight store. Never built: a parameter becomes one, for a while.

    Attributes:
        home: where its values are.
    """

    home: Home

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in the store, which may be changed in place; `None` once a step has used it."""
        return self.home.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.home.set_gradient(value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            attribute = _attribute(func)
            if func in _METADATA or (attribute is not None and attribute not in _VALUE_ATTRIBUTES):
                return func(*args, **kwargs)
            if func is torch.Tensor.detach:
                return args[0].home.lazy()
            if attribute == "data" and func.__name__ == "__set__":
                return args[0].home.write(args[1])
            if func is torch.Tensor.copy_ and isinstance(args[0], cls) and args[0].shape == args[1].shape:
                args[0].home.write(args[1])
                return args[0]
            return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.home.spec
        return f"Parameter in the weight store: {spec.name}, shape {list(spec.shape)}, {spec.dtype}"

    def __deepcopy__(self, memo: object) -> nn.Parameter:
        raise self._refusal("copied")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self._refusal("pickled")

    def _refusal(self, done: str) -> StreamError:
        return StreamError(
            f"a module whose weights are streamed cannot be {done}",
            where=self.home.spec.name,
            remedy="use its state_dict(): load it into a module of the same class",
        )


def _attribute(func: Any) -> str | None:
    """The attribute that `func` gets or sets, if it does."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__"):
        return None
    name: str = getattr(func.__self__, "__name__", "")
    return name


class _Read(torch.autograd.Function):
    """The wire values of a parameter; their gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, param: ParameterAtRest, home: Home) -> torch.Tensor:
        return home.read().to(home.spec.wire_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with values from the store; what it changes in place goes back there."""
    params = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ParameterAtRest)}
    values = {key: _value(param) for key, param in params.items()}
    versions = {key: value._version for key, value in values.items()}

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        return values.get(id(tensor), tensor)

    result = func(
        *tree_map_only(torch.Tensor, value_of, args), **tree_map_only(torch.Tensor, value_of, kwargs)
    )
    own = {id(value): key for key, value in values.items()}
    for key, value in values.items():
        if value._version != versions[key]:
            if value.requires_grad:
                raise StreamError(
                    "a parameter that requires a gradient is changed in place",
                    where=params[key].home.spec.name,
                    remedy="do it within torch.no_grad(), as in plain PyTorch",
                )
            params[key].home.write(value)
    return tree_map_only(torch.Tensor, lambda t: params[own[id(t)]] if id(t) in own else t, result)


def _value(param: ParameterAtRest) -> torch.Tensor:
    if not (torch.is_grad_enabled() and param.requires_grad):
        return param.home.read()
    _note_read(param.home.spec.name)
    value: torch.Tensor = _Read.apply(param, param.home)  # type: ignore[no-untyped-call]
    return value


_noted: set[str] = set()


def _note_read(name: str) -> None:
    """Say once of each parameter that it is read where streaming does not expect it."""
    if name not in _noted:
        _noted.add(name)
        logger.info("%s is read outside of its module's forward: it is fetched for that each time", name)
