"""Wrappers around the calls of a module.

[Note: layers, not hooks]
Hooks of torch would do most of this, but models see them: `nn.TransformerEncoderLayer` takes its fast path
only where no module in it has a hook, and a scripted module refuses hooks. So the wrappers replace the
module's `_call_impl`, the method in which torch runs all hooks and the forward.

[Note: copied attributes]
`copy.copy` and libraries for meta learning copy all attributes of a module to another module, which may have
other parameters. Then the replaced call or forward is an attribute of that module too, but calls the first
module. It does not get the called module as an argument, so it looks it up in the frame of its caller.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from headwater.core.errors import StreamError
from headwater.core.interrupts import interruptible, uninterrupted
from headwater.core.module_parameters import parameters_of
from headwater.core.uncompiled import uncompiled

Layer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A wrapper: function (inner call, args, kwargs) -> output of the call."""


def surround(
    module: nn.Module,
    layer: Layer,
    *,
    outermost: bool = False,
    if_compiled: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Wrap every later call of a module, with its hooks, in `layer`.

    Args:
        module: stays the same object.
        layer: is placed inside the existing layers.
        outermost: place it outside of the existing layers instead.
        if_compiled: is called before each call of the module from code that `torch.compile` has compiled.

    Returns:
        A function that removes the layer.
    """
    own = vars(module).get("_call_impl")
    if not isinstance(own, _Layered):
        own = _Layered(module)
    position = 0 if outermost else len(own.layers)
    own.layers.insert(position, layer)
    own.if_compiled = if_compiled or own.if_compiled
    return lambda: own.remove(layer)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of a module, inside its hooks.

    Args:
        module: stays the same object.
        forward: the new forward.

    Returns:
        A function that restores the original forward, unless the user has replaced the new one.
    """
    before = vars(module).get("forward")
    replaced = _ReplacedForward(module, forward, before)

    def restore() -> None:
        if vars(module).get("forward") is not replaced:
            return
        if before is None:
            del module.forward
        else:
            module.forward = before
        _copy_as_usual(module)

    module.forward = replaced
    vars(module).setdefault("__deepcopy__", _deep_copy)
    return restore


def forward_of_user(attributes: dict[str, Any]) -> Any:
    """Return the forward that the user has set on a module, from the attributes of the module, or `None`."""
    forward = attributes.get("forward")
    while isinstance(forward, _ReplacedForward):
        forward = forward.before
    return forward


def cannot_be_pickled(module: nn.Module | None) -> StreamError:
    """Return the error for a pickle of a compiled module."""
    return StreamError(
        f"a {type(module).__name__} that is compiled cannot be pickled",
        remedy="save its state_dict(), or pickle copy.deepcopy(model), which is a plain module",
    )


class _ReplacedForward:
    """The forward of one module, replaced by another function.

    Attributes:
        before: see the arguments.

    Args:
        module: the module.
        forward: the new forward.
        before: the forward that was set on the module before, if one was.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], before: Callable[..., Any] | None
    ) -> None:
        functools.update_wrapper(self, forward)
        self._module = weakref.ref(module)
        self._forward, self.before = forward, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other = _copy_that_calls(self, "forward", self._module(), depth=2)
        if other is None:
            return self._forward(*args, **kwargs)
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(other).forward(other, *args, **kwargs)


class _Layered:
    """The `_call_impl` of one module, with wrappers (`layers`) around the call, the outermost first.

    A wrapper may change the wrappers inside it, because these are looked up when it makes its call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers: list[Layer] = []
        self.if_compiled: Callable[[], None] | None = None
        self._module = weakref.ref(module)
        # The call that `module.compile()` made ignores `_call_impl`, so it becomes the innermost call.
        self._compiled = vars(module).pop("_compiled_call_impl", None)
        vars(module)["_call_impl"] = self
        vars(module).setdefault("__deepcopy__", _deep_copy)

    def _note_compiler(self, *args: Any, **kwargs: Any) -> None:
        if self.if_compiled is not None:
            self.if_compiled()

    @functools.partial(uncompiled, if_compiled=_note_compiler)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        other = _copy_that_calls(self, "_call_impl", self._module(), depth=3)
        if other is not None:
            return type(other)._call_impl(other, *args, **kwargs)
        return self._call_uninterrupted(0, *args, **kwargs)

    def _call(self, depth: int, /, *args: Any, **kwargs: Any) -> Any:
        if depth < len(self.layers):
            return self.layers[depth](functools.partial(self._call, depth + 1), args, kwargs)
        module = self._module()
        assert module is not None, "a module that is called is alive"
        if self._compiled is not None:
            return interruptible(self._compiled, *args, **kwargs)
        # Looked up at each call: the class may be patched meanwhile.
        return interruptible(type(module)._call_impl, module, *args, **kwargs)

    _call_uninterrupted = uninterrupted(_call)

    def remove(self, layer: Layer) -> None:
        """Remove a wrapper. If none is left, the module gets its original call back."""
        if layer in self.layers:
            self.layers.remove(layer)
        module = self._module()
        if self.layers or module is None or vars(module).get("_call_impl") is not self:
            return
        del vars(module)["_call_impl"]
        if self._compiled is not None:
            vars(module)["_compiled_call_impl"] = self._compiled
        _copy_as_usual(module)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise cannot_be_pickled(self._module())


def _copy_that_calls(
    attribute: object, name: str, module: nn.Module | None, *, depth: int
) -> nn.Module | None:
    """Return the module that calls an attribute of another module; see [Note: copied attributes].

    Args:
        attribute: the attribute.
        name: its name.
        module: the module that it belongs to.
        depth: number of frames between this function and the method of torch that calls the attribute.

    Returns:
        The caller, or `None` if the caller is `module`, or is not a module.
    """
    caller = sys._getframe(depth).f_locals.get("self")
    if caller is module or not isinstance(caller, nn.Module) or vars(caller).get(name) is not attribute:
        return None
    return caller


def _deep_copy(memo: dict[int, Any]) -> Any:
    """Return a deep copy without replaced calls and forwards. It is the `__deepcopy__` of modules with these.

    It belongs to no module, because `copy.copy` copies it to other modules. So it looks up the argument `x`
    of `copy.deepcopy`, which calls it.
    """
    module = sys._getframe(1).f_locals["x"]
    forward = forward_of_user(vars(module))
    # Another object with the same attributes: another thread may call the module meanwhile.
    plain = object.__new__(type(module))
    for name, value in dict(vars(module)).items():
        if value is not _deep_copy and not isinstance(value, _Layered | _ReplacedForward):
            vars(plain)[name] = value
    if forward is not None:
        vars(plain)["forward"] = forward
    for param in parameters_of(module):
        home = getattr(param, "home", None)
        # In its forward, a weight that is streamed in 16 bits is an ordinary parameter of 16 bits.
        if home is not None and id(param) not in memo and param.dtype != home.spec.dtype:
            memo[id(param)] = home.plain_copy(requires_grad=param.requires_grad)
    copier = getattr(plain, "__deepcopy__", None)
    if copier is not None:
        memo.setdefault(id(memo), []).append(plain)  # alive, so that no other object gets its `id`
        return copier(memo)
    # Unlike `copy.deepcopy(plain, memo)`, this makes references to the module in the copy refer to the copy.
    return copy._reconstruct(module, memo, *plain.__reduce_ex__(4))  # type: ignore[attr-defined]


def _copy_as_usual(module: nn.Module) -> None:
    """Remove `_deep_copy` from a module without replaced calls and forwards."""
    own = vars(module)
    is_changed = any(isinstance(value, _Layered | _ReplacedForward) for value in own.values())
    if not is_changed and own.get("__deepcopy__") is _deep_copy:
        del own["__deepcopy__"]
