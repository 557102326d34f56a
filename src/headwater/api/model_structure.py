"""Records of a model's structure, to notice when modules, parameters or replaced forwards change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.utils import stateless

from headwater.core.errors import ConfigError, StreamError
from headwater.core.module_calls import forward_of_user
from headwater.core.module_parameters import named_parameters_of
from headwater.core.overlap import overlapping
from headwater.stream.detached import values_of

_FUNCTIONAL_CALL = getattr(getattr(stateless, "_functional_call", None), "__code__", None)
"""The code of torch's `functional_call`, which replaces parameters while the model runs."""

_FORWARD = "forward"

_OF_TENSORS: frozenset[Any] = frozenset({
    torch.Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
    torch._C._disabled_torch_dispatch_impl,
})  # fmt: skip
"""The functions by which torch's own tensors intercept operations. They change no results."""

_Registry = dict[str, Any]

_REGISTRIES = ("_modules", "_parameters")
"""The attributes in which a module keeps its parts."""


class Structure:
    """A record of the modules, parameters and replaced forwards of a model at the time when it is made.

    It holds references to all of them, so that no new object can have the identity of an old one.

    Attributes:
        names: the first name of each parameter, by its identity.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        # The structure of a scripted module cannot change, and it has no registries to compare.
        self._modules = [module for module in model.modules() if not isinstance(module, ScriptModule)]
        self._attributes = [vars(module) for module in self._modules]
        self._registries = self._present_registries()
        self._contents = [dict(registry) for registry in self._registries]
        self._empty = [registry for registry in self._registries if not registry]
        self._filled = [registry for registry in self._registries if registry]
        self._forwards = self._own_forwards()
        self._classes: list[type[nn.Module]] = list(dict.fromkeys(map(type, self._modules)))
        self._identities = self._present_identities()
        self._paths: dict[str, object] = dict(model.named_modules())
        self._paths.update(named_parameters_of(model, remove_duplicate=False))
        self.names = {id(param): name for name, param in named_parameters_of(model)}

    def _present_registries(self) -> list[_Registry]:
        # `del module_list[1]` gives the list another dictionary.
        return [attributes[kind] for attributes, kind in product(self._attributes, _REGISTRIES)]

    def _own_forwards(self) -> list[Any]:
        # Not those of an engine: it may be replaced while the structure of the user is restored.
        return [forward_of_user(each) if _FORWARD in each else None for each in self._attributes]

    def _present_identities(self) -> tuple[object, ...]:
        """Return the identities of all recorded objects now. Kept fast, as it runs before every forward."""
        return (
            *(list(map(id, map(itemgetter(kind), self._attributes))) for kind in _REGISTRIES),
            # A model has many empty registries: one test covers all of them.
            any(self._empty),
            list(map(len, self._filled)),
            list(chain.from_iterable(self._filled)),
            list(map(id, chain.from_iterable([registry.values() for registry in self._filled]))),
            list(map(id, self._own_forwards())),
            list(map(type, self._modules)),
            # A class may be patched. Then the recomputed forward would call the old function.
            [cls.forward for cls in self._classes],
        )

    @property
    def is_current(self) -> bool:
        """True if the model still has this structure."""
        return self._present_identities() == self._identities

    def old_names(self, now: Structure) -> dict[str, str]:
        """Return, for each parameter in both structures: name in `now` -> name in this structure."""
        return {name: self.names[key] for key, name in now.names.items() if key in self.names}

    def difference(self, now: Structure) -> str:
        """Return a phrase that names the first difference between this structure and `now`."""
        before, after = self._paths, now._paths
        replaced = {name for name in before.keys() & after.keys() if before[name] is not after[name]}
        for what, names in (
            ("replaced", replaced),
            ("added", after.keys() - before.keys()),
            ("removed", before.keys() - after.keys()),
        ):
            if names:
                return f"{min(names)} was {what}"
        return "the class or the forward of a module was replaced"

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter a context in which the model has this structure again."""
        registries = self._present_registries()
        contents, forwards = [dict(registry) for registry in registries], self._own_forwards()
        self._write_back(self._registries, self._contents, self._forwards)
        try:
            yield
        finally:
            self._write_back(registries, contents, forwards)

    def _write_back(
        self, registries: Sequence[_Registry], contents: Sequence[_Registry], forwards: Sequence[Any]
    ) -> None:
        for registry, content in zip(registries, contents, strict=True):
            # The entries are replaced, not only updated, because their order counts too.
            registry.clear()
            registry.update(content)
        owners = product(self._attributes, _REGISTRIES)
        for (attributes, kind), registry in zip(owners, registries, strict=True):
            attributes[kind] = registry
        for attributes, forward in zip(self._attributes, forwards, strict=True):
            if forward_of_user(attributes) is forward:
                continue
            if forward is None:
                del attributes[_FORWARD]
            else:
                attributes[_FORWARD] = forward


def has_replaced_parameters(model: nn.Module) -> bool:
    """True if the model's parameters are replaced for the duration of a call, as by `functional_call`."""
    params = chain.from_iterable(module._parameters.values() for module in model.modules())
    if any(param is not None and not isinstance(param, nn.Parameter) for param in params):
        return True
    # The replacements may be parameters too. Then only the call stack shows that `functional_call` runs.
    return _FUNCTIONAL_CALL is not None and any(frame.f_code is _FUNCTIONAL_CALL for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def refuse_no_module(model: object, *, where: str) -> None:
    """Raise if the model that a user passes is not a module.

    Args:
        model: the argument.
        where: the function that gets it.

    Raises:
        ConfigError: if it is not a module.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        found, remedy = f"the class {model.__name__}", f"pass an object of the class: {model.__name__}(…)"
    else:
        found, remedy = f"a {type(model).__name__}", "pass the module whose forward computes the model"
    raise ConfigError(f"expected a torch.nn.Module, got {found}", where=where, remedy=remedy)


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise if two parameters of the model share memory.

    Raises:
        StreamError: if two parameters share memory. Each streamed parameter needs separate memory.
    """
    params = dict(named_parameters_of(model))
    pair = overlapping(params) or _copied_parameter(params)
    if pair is not None:
        first, second = pair
        kept, other = map(_code_of, pair)
        separate = f"separate them, {other}.data = {other}.data.clone()"
        may_tie = params[first].shape == params[second].shape
        raise StreamError(
            f"parameters {first} and {second} share memory, but a streamed parameter needs separate memory",
            where=type(model).__name__,
            remedy=f"tie them as one Parameter, {other} = {kept}, or {separate}" if may_tie else separate,
        )


def _code_of(name: str) -> str:
    """Return an expression for a parameter of `model`; modules and parameters in lists have numbers."""
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))


def refuse_inference_parameters(model: nn.Module) -> None:
    """Raise if a trained parameter was made in inference mode.

    Raises:
        StreamError: if there is one. Autograd computes no gradient for such a parameter.
    """
    with torch._C.DisableTorchFunctionSubclass():  # else a streamed parameter would read its values
        found = [
            name for name, param in named_parameters_of(model) if param.requires_grad and param.is_inference()
        ]
    if found:
        raise StreamError(
            f"parameter {found[0]} was made inside torch.inference_mode(), so it cannot be trained",
            where=type(model).__name__,
            remedy="build the model outside of it; for the first call of a lazy layer use torch.no_grad()",
        )


def refuse_tensor_classes(model: nn.Module) -> None:
    """Raise if a parameter has a class that intercepts operations.

    Raises:
        StreamError: if there is one. Between forwards its operations would be torch's own, and a parameter
            that wraps other tensors has no memory that a store could keep.
    """
    for name, param in named_parameters_of(model):
        kind = type(param)
        if kind.__module__.partition(".")[0] in ("torch", "headwater"):
            continue
        functions = [kind.__torch_dispatch__]
        # Classes of parameters, such as those of libraries for quantization, are for use in forwards only.
        if nn.Parameter not in kind.__mro__:
            functions.append(kind.__torch_function__)
        if not {getattr(each, "__func__", each) for each in functions} <= _OF_TENSORS:
            raise StreamError(
                f"parameter {name} has the class {kind.__qualname__}, which intercepts torch's operations",
                where=type(model).__name__,
                remedy="use a plain nn.Parameter, and convert it in the forward of its module; or compile a "
                "model without this layer",
            )


def _copied_parameter(params: Mapping[str, nn.Parameter]) -> tuple[str, str] | None:
    """Return the names of a parameter and of a second one made by `nn.Parameter(first)`; `None` if none."""
    names = {id(param): name for name, param in params.items()}
    for name, param in params.items():
        original = values_of(param)
        if original is None:
            original = vars(param).pop("taken_from", None)
        source = None if original is param else names.get(id(original))
        if source is not None:
            return source, name
    return None
