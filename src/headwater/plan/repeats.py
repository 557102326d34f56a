"""Equal stages of a dry run: the first two and the last two run, the others get the costs of the second.

[Note: repeated stages]
A model of 126 equal blocks has 126 times the operators of one block, and a dry run spends up to a millisecond
on an operator. A class that is marked by `costs_by_shapes` promises that a call depends on its attributes and
inputs alone, and has no effect but its output. If equal modules of such a class are called with equal inputs,
the first one runs since it may save tensors that all share. The second one is the original of the others. The
last ones run since their backwards come first, before there are sums of gradients. A call between these
returns tensors like those of the original, with one node in the graph of autograd. If calls turn out to
differ from their originals in a way that is known only at the end, all stages run in another dry run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from headwater.core.dry_run import has_costs_by_shapes
from headwater.core.module_parameters import parameters_of
from headwater.core.stage import StageSpec
from headwater.core.user_functions import HOOKS
from headwater.plan.alive import has_storage, memory_key
from headwater.plan.partition import Partition
from headwater.plan.step_trace import members_of

_FIRST, _LAST = 2, 2
"""How many of the equal stages run: the first ones with like inputs, and the last ones of the model."""
_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has. `_module_key` compares them separately from the attributes of a class."""
_KNOWN_PACKAGES = ("torch.nn.modules.", "headwater.models.")
"""Packages whose modules may be in a stage that is skipped. Costs of a user's own module are unknown."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A recorded call of a module. Equal modules are not run: their outputs are made like those of this one.

    Attributes:
        inputs: leaves of the arguments.
        structure: structure of the arguments.
        outputs: for each leaf of the output, the description of a new tensor, the index of the input that is
            returned, or a value.
        output_structure: structure of the output.
        modes: modes of torch that decide costs.
        uses: the stages that it used, as positions among the stages of its block.
    """

    inputs: tuple[Any, ...]
    structure: TreeSpec
    outputs: tuple[Any, ...]
    output_structure: TreeSpec
    modes: Hashable
    uses: tuple[int, ...]

    def fits(self, inputs: Sequence[Any], structure: TreeSpec) -> bool:
        """True if a call with these inputs costs the same as the recorded one."""
        return (
            structure == self.structure
            and _modes() == self.modes
            and all(map(_is_like, inputs, self.inputs))
            and _sharing(inputs) == _sharing(self.inputs)
        )

    def output(self, inputs: Sequence[Any]) -> Any:
        """Return an output like the recorded one, whose tensors autograd sees as computed from `inputs`."""
        given = list({id(leaf): leaf for leaf in inputs if _needs_gradient(leaf)}.values())
        made = iter(_Repeated.apply(self._new, *given))  # type: ignore[no-untyped-call]
        leaves = [
            next(made) if isinstance(each, _New) else inputs[each.index] if isinstance(each, _Input) else each
            for each in self.outputs
        ]
        return tree_unflatten(leaves, self.output_structure)

    @property
    def _new(self) -> tuple[_New, ...]:
        return tuple(each for each in self.outputs if isinstance(each, _New))


@final
class Repeats:
    """Stages that the dry run skips because equal stages have run, and the calls of the stages that ran.

    Attributes:
        original: skipped stage -> the stage whose costs it has.

    Args:
        model: the model; its modules have no layers of the dry run yet.
        partition: its stages.
    """

    def __init__(self, model: nn.Module, partition: Partition) -> None:
        self.original: dict[int, int] = {}
        self._as_expected = True
        self._members = members_of(partition.stages)
        self._equal = {stage: equal for equal in _equal_stages(model, partition) for stage in equal}
        self._calls: dict[tuple[int, int], Call] = {}  # by stage and number of the call
        self._counts: Counter[int] = Counter()

    @property
    def consistent(self) -> bool:
        """True if the costs that were taken over are right: each skipped stage was called like its original.

        This is known only at the end of the step.
        """
        return not self.original or (
            self._as_expected
            and all(
                self._counts[stage] == self._counts[original] for stage, original in self.original.items()
            )
        )

    def members(self, stage: int) -> tuple[int, ...]:
        """Return the parts of a divided block and its own stage, or a single stage in a tuple."""
        return self._members.get(stage, (stage,))

    def refuse(self) -> None:
        """Record that backward has recomputed forwards: those of skipped stages were not counted then."""
        self._as_expected = False

    def call_like(
        self, stage: int, inputs: Sequence[Any], structure: TreeSpec, *, may_skip: bool
    ) -> Call | None:
        """Return the recorded call whose costs this stage's call can take over; `None` if the stage must run.

        Args:
            stage: index of the stage.
            inputs: leaves of the arguments.
            structure: structure of the arguments.
            may_skip: False if the call must run.
        """
        # Calls that must run are counted too: `consistent` compares the counts of all calls.
        number = self._counts[stage]
        self._counts[stage] += 1
        if number > 0 and stage not in self.original:
            return None
        call = self._repeated_call(stage, number, inputs, structure) if may_skip else None
        if number > 0 and call is None:
            self._as_expected = False  # the costs of a stage are those of all its calls
        return call

    def _repeated_call(
        self, stage: int, number: int, inputs: Sequence[Any], structure: TreeSpec
    ) -> Call | None:
        """Return a recorded call that costs the same, or `None`. A stage's first call sets its original."""
        if number > 0:
            call = self._calls.get((self.original[stage], number))
            return call if call is not None and call.fits(inputs, structure) else None
        equal = self._equal.get(stage, [])
        if stage in equal[-_LAST:]:
            return None
        # The calls have the order in which they ran, which may differ from the order of stages in the model.
        first_calls = [(other, call) for (other, index), call in self._calls.items() if index == 0]
        fitting = [
            (other, call) for other, call in first_calls if other in equal and call.fits(inputs, structure)
        ]
        if len(fitting) < _FIRST:
            return None
        self.original[stage], call = fitting[_FIRST - 1]
        return call

    def note(
        self, stage: int, inputs: Sequence[Any], structure: TreeSpec, output: Any, uses: Sequence[int]
    ) -> None:
        """Record the call of a stage that has run, so that equal stages can be skipped.

        Args:
            stage: index of the stage.
            inputs: leaves of the arguments.
            structure: structure of the arguments.
            output: the output.
            uses: the stages that the call has used.
        """
        members = self.members(stage)
        if stage not in self._equal or not uses or not set(uses) <= set(members):
            return
        leaves, output_structure = tree_flatten(output)
        described = _described(leaves, inputs)
        if described is not None:
            # `call_like` has counted this call already.
            key = stage, self._counts[stage] - 1
            places = tuple(map(members.index, uses))
            self._calls[key] = Call(tuple(inputs), structure, described, output_structure, _modes(), places)


@dataclasses.dataclass(frozen=True)
class _New:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class _Input:
    index: int


class _Repeated(torch.autograd.Function):
    """Autograd function that makes new tensors, which depend on the inputs of a call."""

    @staticmethod
    def forward(ctx: Any, news: tuple[_New, ...], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.likes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs]
        made = tuple(
            torch.empty_strided(new.shape, new.stride, dtype=new.dtype, device="cpu") for new in news
        )
        ctx.mark_non_differentiable(
            *(tensor for tensor, new in zip(made, news, strict=True) if not new.requires_grad)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (
            None,
            *(
                torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
                for shape, stride, dtype in ctx.likes
            ),
        )


def _equal_stages(model: nn.Module, partition: Partition) -> list[list[int]]:
    """Return lists of stages that cost the same if their inputs do, each in the order of the model."""
    # A global hook may do something different for each module.
    if _has_any_global_hook():
        return []
    groups: dict[Hashable, list[int]] = {}
    members = members_of(partition.stages)
    for stage, unit in zip(partition.stages, partition.units, strict=True):
        module = model.get_submodule(unit.path)
        key = None
        if not unit.direct_only and stage.part_of is None and has_costs_by_shapes(module):
            inside = members.get(stage.index, (stage.index,))
            key = _stage_key(module, unit.path, [partition.stages[member] for member in inside])
        if key is not None:
            groups.setdefault((unit.path.rpartition(".")[0], key), []).append(stage.index)
    return [equal for equal in groups.values() if len(equal) > _FIRST + _LAST]


def _stage_key(module: nn.Module, path: str, stages: Sequence[StageSpec]) -> Hashable | None:
    """Return what the costs of a module depend on, apart from its inputs; `None` if it shares parameters.

    Args:
        module: the module.
        path: its qualified name.
        stages: its stage, or the stages of the divided block.
    """
    params = [param for stage in stages for param in stage.params]
    if sum(1 for _ in parameters_of(module)) != len(params) or any(param.aliases for param in params):
        return None
    keys = tuple(
        (
            stage.name.removeprefix(path),
            tuple(dataclasses.replace(param, name=param.name.removeprefix(path)) for param in stage.params),
        )
        for stage in stages
    )
    inside = _module_key(module)
    return None if inside is None else (keys, inside)


def _module_key(module: nn.Module) -> Hashable | None:
    """Return what the costs of a call depend on; `None` if hooks or foreign code make that unknown."""
    values = vars(module)
    if not (has_costs_by_shapes(module) or type(module).__module__.startswith(_KNOWN_PACKAGES)):
        return None
    if any(values[name] for name in HOOKS) or not values.keys().isdisjoint(("_call_impl", "forward")):
        return None
    own = tuple((name, _value_key(values[name])) for name in sorted(values.keys() - _OF_MODULES))
    params = tuple((name, param is None) for name, param in module._parameters.items())
    buffers = tuple((name, id(buffer)) for name, buffer in module._buffers.items())  # must be shared
    children = tuple(
        (name, None if child is None else _module_key(child)) for name, child in module._modules.items()
    )
    if any(key is None and module._modules[name] is not None for name, key in children):
        return None
    return type(module), module.training, own, params, buffers, children


def _value_key(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, slice):
        return slice, _value_key((value.start, value.stop, value.step))
    # The type is a part of the key: 1, 1.0 and True are equal, but may lead to other code.
    return (type(value), value) if type(value) in _SIMPLE else id(value)


def _modes() -> Hashable:
    """Return the modes of torch that decide the costs of a call."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _is_like(leaf: Any, original: Any) -> bool:
    """True if a call with `leaf` costs the same as with `original`. Floating-point values do not matter."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(original, torch.Tensor):
        # An object may have changed since the original's call, even if both are the same object.
        return type(leaf) is type(original) and type(leaf) in _SIMPLE and bool(leaf == original)
    if leaf is original:
        return True
    return leaf.is_floating_point() and has_storage(leaf) and _tensor_key(leaf) == _tensor_key(original)


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _sharing(leaves: Sequence[Any]) -> list[int]:
    """Return for each tensor the index of the first leaf that shares its storage."""
    first: dict[int, int] = {}
    return [
        first.setdefault(memory_key(leaf), index)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    ]


def _described(leaves: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return how to make an output like `leaves` from other inputs; `None` if that cannot be done."""
    indices = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)}
    taken = {memory_key(leaf) for leaf in inputs if isinstance(leaf, torch.Tensor)}
    with_gradients = any(map(_needs_gradient, inputs))
    described: list[Any] = []
    for leaf in leaves:
        if id(leaf) in indices:
            described.append(_Input(indices[id(leaf)]))
        elif isinstance(leaf, torch.Tensor):
            wrong = leaf.requires_grad and not with_gradients  # only because of the original's parameters
            if wrong or not leaf.is_floating_point() or not has_storage(leaf) or memory_key(leaf) in taken:
                return None
            taken.add(memory_key(leaf))
            described.append(_New(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif type(leaf) in _SIMPLE:
            described.append(leaf)
        else:
            return None
    return tuple(described)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
