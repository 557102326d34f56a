"""Recipes: values of cheap operators that backward computes again instead of keeping them.

[Note: recipes]
Autograd saves the value of a normalization or of an activation function because the next matrix product needs
it. Often the inputs of this cheap operator are saved too, for its own backward. Then the value need not be
kept: the operator runs again when backward asks for the value. It is the same operator with the same inputs,
below autograd and autocast, so the value has the same bits.

`Recipes` watches the operators of a forward and the tensors that autograd saves. A value has a recipe if it
was made by a cheap operator whose inputs are weights, tensors that are kept anyway, or values that have
recipes. Nothing here keeps a tensor alive that autograd would not keep: operators are remembered with weak
references, and only a recipe that is used holds its inputs.

An operator may change a tensor in place later. Values that are made from it are then computed first. A value
that is changed itself is kept from then on, so backward gets what plain PyTorch would give it. This is so
while the module runs whose operators are watched. A later change raises an error if it increases the version
counter of the tensor; `tensor.data.mul_(2)` does not.

A backward node runs on the stream on which its forward ran, and a value that is computed again stays for the
next node that needs it. So all operators of a recipe, and the saving of its value, are on one stream: then
the order of this stream is enough.

[Note: memory that kernels write]
A custom `autograd.Function` may write memory by a kernel that torch does not know, for example one in
Triton. torch does not notice this. So the tensors that such a function saves are kept, and values that are
made without gradients, as inside its forward, have no recipes. A function of this package says with
`saves_unchanged_inputs` that its kernels do not write to the tensors that it saves. A kernel outside of a
custom function, or one that changes an input without `mark_dirty`, must not write into values of cheap
operators.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from headwater.core.streams import current_stream_id
from headwater.plan.alive import has_storage, memory_key
from headwater.plan.writes import changed_by, changed_in_place

_DEEPEST = 12
"""Maximum number of operators between a value and the tensors that are kept."""

_CHEAP = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "where", "masked_fill", "clamp"),
        *("clamp_min", "clamp_max", "abs", "neg", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "log"),
        *("sin", "cos", "tanh", "sigmoid", "erf", "relu", "gelu", "silu", "mish", "elu", "leaky_relu"),
        *("softplus", "hardswish", "hardsigmoid", "hardtanh", "mean", "_to_copy", "clone"),
        *("native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    )
)
"""Operators without random numbers that take no more than a few passes over their inputs."""

APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""The code that runs the forward of a custom autograd function."""
_HOOKS = ("headwater.core.interrupts", "headwater.plan.", "headwater.stream.")
"""Where the hooks are that autograd calls when it saves a tensor."""

HandleOf = Callable[[torch.Tensor], Any]
"""A function that returns the handle of a weight; `None` for other tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """The place of a tensor in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with this layout in the storage of `tensor`."""
        return tensor.as_strided(self.size, self.stride, self.offset)


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """The content of a storage at one moment.

    Attributes:
        key: identity of the storage.
        changes: number of operators that had changed it, counted by `Recipes`.
        version: the version counter of the tensor.
    """

    key: int
    changes: int
    version: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    """A tensor among the arguments of an operator, without its memory.

    Attributes:
        memory: its content.
        layout: its place there.
        handle: its handle, if it is a weight.
        storage: a weak reference, so that no other storage gets the same identity.
    """

    memory: _Memory
    layout: _Layout
    handle: Any
    storage: StorageWeakRef


@dataclasses.dataclass(slots=True)
class _Made:
    """A value of a cheap operator: the operator and its arguments.

    Attributes:
        func: the operator.
        leaves: its arguments, flattened, with `_Input` for tensors.
        structure: their structure.
        memory: the content of the value's storage.
        layout: the layout of the value.
        num_bytes: its bytes.
        storage: a weak reference.
        stream: the identity of the stream on which the operator ran.
        recipe: the value's recipe, if it has been asked for.
    """

    func: Any
    leaves: list[Any]
    structure: TreeSpec
    memory: _Memory
    layout: _Layout
    num_bytes: int
    storage: StorageWeakRef
    stream: int
    recipe: Recipe | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that autograd keeps, and the layout in which an operator takes it as an argument."""

    tensor: torch.Tensor
    version: int
    layout: _Layout

    def value(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise changed_in_place(self.layout.size)
        return self.layout.view(self.tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """A weight, which is fetched when the value is computed again."""

    handle: Any
    resolve: Callable[[Any], torch.Tensor]

    def value(self) -> torch.Tensor:
        return self.resolve(self.handle)


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
    """The value of another recipe, and the layout in which an operator takes it as an argument."""

    recipe: Recipe
    layout: _Layout

    def value(self) -> torch.Tensor:
        return self.layout.view(self.recipe.value())


_Source = _Kept | _Weight | _Again


@final
class Recipe:
    """The way to compute a value again.

    Args:
        func: the operator.
        leaves: its arguments, flattened, with sources for tensors.
        structure: their structure.
        stream: the identity of the stream on which the operator ran, and backward will run.
    """

    def __init__(self, func: Any, leaves: list[Any], structure: TreeSpec, stream: int) -> None:
        self._stream = stream
        self._func = func
        self._leaves = leaves
        self._structure = structure
        self._value: torch.Tensor | None = None
        self._is_pinned = False
        self._saved = 0  # how many times autograd has saved the value
        self._left = 0  # how many of these saved tensors backward has not asked for yet

    def saved(self, layout: _Layout) -> Callable[[], torch.Tensor]:
        """Note that autograd saves the value. Return the function by which backward gets it."""
        self._saved += 1
        self._left = self._saved
        return functools.partial(self._take, layout)

    def value(self) -> torch.Tensor:
        """Return the value. It is kept while backward will ask for it again."""
        value = self._value
        if value is None:
            value = self._computed()
            if self._left > 0:
                self._value = value
        return value

    def pin(self) -> None:
        """Compute the value now, and keep it: an input is about to change."""
        value = self.value()
        # Backward reads the value on the recipe's stream, so the current stream must have computed it before.
        if current_stream_id(value.device) != self._stream:
            torch.accelerator.current_stream(value.device).synchronize()
        self._value, self._is_pinned = value, True

    def follow(self, memory: torch.Tensor) -> None:
        """Keep the memory of the value, which an operator is about to change in place."""
        if self._saved > 0:
            self._value, self._is_pinned = memory, True

    def _take(self, layout: _Layout) -> torch.Tensor:
        value = self.value()
        self._left -= 1
        if self._left <= 0:
            self._left = self._saved  # the graph may be kept for another backward
            if not self._is_pinned:
                self._value = None
        with torch.no_grad():
            return layout.view(value)

    def _computed(self) -> torch.Tensor:
        # The operator was recorded below autocast, which would cast its arguments once more.
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunctionSubclass():
            leaves = [leaf.value() if isinstance(leaf, _Source) else leaf for leaf in self._leaves]
            args, kwargs = tree_unflatten(leaves, self._structure)
            value: torch.Tensor = _first(self._func(*args, **kwargs))
        return value


@final
class Recipes:
    """The recipes of the running forward, which say which values can be computed again. See [Note: recipes].

    Attributes:
        num_bytes: bytes of all values that the recipes made so far compute.

    Args:
        handle_of: returns the handle of a weight; `None` for other tensors.
        resolve: returns the weight of a handle.
    """

    def __init__(self, handle_of: HandleOf, resolve: Callable[[Any], torch.Tensor]) -> None:
        self._handle_of = handle_of
        self._resolve = resolve
        self._made: dict[int, _Made] = {}
        self._kept: dict[int, tuple[torch.Tensor, _Memory]] = {}
        self._changes: Counter[int] = Counter()
        self._used: dict[int, list[Recipe]] = {}  # by kept storage, the recipes that read it
        self.num_bytes = 0

    def before_change(self, changed: Iterable[torch.Tensor]) -> None:
        """Compute and keep the values that depend on `changed`, which an operator is about to change."""
        for tensor in filter(_is_plain, changed):
            key = memory_key(tensor)
            for recipe in self._used.pop(key, ()):
                recipe.pin()
            made = self._made.get(key)
            if made is not None and made.recipe is not None:
                memory = torch.empty(0, dtype=made.layout.dtype, device=tensor.device)
                made.recipe.follow(memory.set_(tensor.untyped_storage()))

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator of the forward that has run."""
        for tensor in filter(_is_plain, changed_by(func, args, kwargs)):
            self._forget(memory_key(tensor))
        # Values that are made without gradients have no recipes: see [Note: memory that kernels write].
        if func._schema.is_mutable or not torch.is_grad_enabled():
            return
        value = _first(out) if _is_cheap(func) else None
        if not isinstance(value, torch.Tensor) or not _is_plain(value) or value.storage_offset() != 0:
            return
        leaves, structure = tree_flatten((args, kwargs))
        if not all(_is_plain(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            return
        inputs = [self._input(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        memory, storage = self._memory(value), StorageWeakRef(value.untyped_storage())
        self._made[memory.key] = _Made(
            func=func,
            leaves=inputs,
            structure=structure,
            memory=memory,
            layout=_Layout.of(value),
            num_bytes=value.nbytes,
            storage=storage,
            stream=current_stream_id(value.device),
        )

    def keep(self, tensor: torch.Tensor) -> None:
        """Record a tensor that autograd keeps."""
        if _is_plain(tensor):
            self._kept.setdefault(memory_key(tensor), (tensor, self._memory(tensor)))

    def function_for(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return a function that computes a saved tensor again, or `None` if the tensor must be kept."""
        if not _is_plain(tensor) or memory_key(tensor) in self._kept or _is_saved_by_custom_function():
            return None
        memory, layout = self._memory(tensor), _Layout.of(tensor)
        recipe = self._recipe(memory, layout.dtype, current_stream_id(tensor.device), 0)
        return None if recipe is None else recipe.saved(layout)

    def clear(self) -> None:
        """Forget the operators and tensors of a forward that has ended. Recipes that are in use stay."""
        self._made.clear()
        self._kept.clear()
        self._used.clear()
        self._changes.clear()

    def _recipe(self, memory: _Memory, dtype: torch.dtype, stream: int, depth: int) -> Recipe | None:
        made = self._made.get(memory.key)
        if made is None or made.memory != memory or made.layout.dtype != dtype or depth > _DEEPEST:
            return None
        if made.stream != stream:
            return None
        if made.recipe is None:
            leaves: list[Any] = []
            for leaf in made.leaves:
                source = self._source(leaf, stream, depth) if isinstance(leaf, _Input) else None
                if isinstance(leaf, _Input) and source is None:
                    return None
                leaves.append(leaf if source is None else source)
            made.recipe = Recipe(made.func, leaves, made.structure, stream)
            self.num_bytes += made.num_bytes
            for leaf in made.leaves:
                if isinstance(leaf, _Input) and leaf.handle is None:
                    self._used.setdefault(leaf.memory.key, []).append(made.recipe)
        return made.recipe

    def _source(self, given: _Input, stream: int, depth: int) -> _Source | None:
        if given.handle is not None:
            return _Weight(given.handle, self._resolve)
        kept, memory = self._kept.get(given.memory.key, (None, None))
        if kept is not None and memory == given.memory and kept.dtype == given.layout.dtype:
            return _Kept(kept, given.memory.version, given.layout)
        recipe = self._recipe(given.memory, given.layout.dtype, stream, depth + 1)
        return None if recipe is None else _Again(recipe, given.layout)

    def _input(self, tensor: torch.Tensor) -> _Input:
        storage = StorageWeakRef(tensor.untyped_storage())
        return _Input(self._memory(tensor), _Layout.of(tensor), self._handle_of(tensor), storage)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        key = memory_key(tensor)
        return _Memory(key, self._changes[key], tensor._version)

    def _forget(self, key: int) -> None:
        """Forget a storage whose content has changed."""
        self._made.pop(key, None)
        self._kept.pop(key, None)
        self._changes[key] += 1


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is a view of one storage, with a version counter and without pending operations."""
    return has_storage(tensor) and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


def _is_saved_by_custom_function() -> bool:
    """True if autograd calls the hooks that run now because a custom `autograd.Function` saves a tensor."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    return frame.f_code is APPLY and not getattr(frame.f_locals["cls"], "saves_unchanged_inputs", False)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def _is_cheap(func: Any) -> bool:
    return func.name().partition(".")[0] in _CHEAP
