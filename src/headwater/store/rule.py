"""Update rules: optimizers of `torch.optim` that are applied to pieces of parameters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from headwater.core.errors import StreamError
from headwater.core.modes import apart_from_modes
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.catalog import takes_dense_gradients, takes_sparse_gradients
from headwater.optim.probe import STATE_REMEDY, state_tensors, step_without_hooks
from headwater.optim.spec import OptimizerSpec, numbers, state_signature
from headwater.store.layout import PIECE_ELEMENTS, Scalars, StageLayout, StateLayout, StateTensor
from headwater.store.rules import UpdateRules

_PROBE_ELEMENTS = 8
_PLAIN_KERNEL = {"fused": False, "foreach": False}


def needs_plain_kernel(gradient: torch.Tensor) -> bool:
    """True if the fused kernels of torch refuse a gradient, which is sparse or complex."""
    return gradient.is_sparse or gradient.is_complex()


@final
class UpdateRule(UpdateRules):
    """Runs one optimizer class on tensors that callers pass in. Keeps no optimizer state itself.

    Args:
        spec: the optimizer, with its arguments.
        options: arguments of the parameter group that differ from the spec's and decide which state is kept.
    """

    def __init__(self, spec: OptimizerSpec, options: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self._options = dict(options or {})
        self.elementwise = spec.elementwise
        self._layouts: dict[tuple[object, ...], StateLayout] = {}
        self._threads = threading.local()  # an optimizer object serves one thread at a time

    def of(self, name: str) -> UpdateRule:
        return self

    def state_layout(self, param: ParamSpec) -> StateLayout:
        if not param.requires_grad:
            return {}
        # An elementwise optimizer keeps state in the shape of the parameter, whatever that is.
        shape = (_PROBE_ELEMENTS,) if self.elementwise else param.shape
        key = (shape, param.dtype, param.sparse_gradient)
        if key not in self._layouts:
            with apart_from_modes():
                self._layouts[key] = self._probe(*key)
        return self._layouts[key]

    def _probe(self, shape: tuple[int, ...], dtype: torch.dtype, sparse: bool) -> StateLayout:
        """Return the state tensors of a parameter. Found by two steps of the optimizer on a small tensor."""
        probe = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device="cpu"))
        optimizer = self.spec.build([probe], to_compile=False)
        group = optimizer.param_groups[0]
        for key, value in self._options.items():  # a step may change a tensor in place
            group[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if self.spec.foreign_class is None:  # a user's class may need tensors
            group.update({key: numbers(value) for key, value in group.items() if key != "params"})
        # There are two steps, because some optimizers make a state tensor only in the second one.
        for _ in range(2):
            gradient = torch.zeros_like(probe)
            takes_sparse = takes_sparse_gradients(self.spec.name, group)
            is_sparse = takes_sparse and (sparse or not takes_dense_gradients(self.spec.name))
            probe.grad = gradient.to_sparse(1) if is_sparse else gradient
            if needs_plain_kernel(probe.grad):
                group.update(_PLAIN_KERNEL)
            step_without_hooks(optimizer)
        return {
            name: StateTensor(value.dtype, None if value.shape == probe.shape else tuple(value.shape))
            for name, value in state_tensors(optimizer.state[probe]).items()
        }

    def _of_this_thread(self, device: torch.device) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Return an optimizer object of this thread, and the default options of its parameter groups.

        Args:
            device: the device of the tensors that it updates, on which the kernel depends.
        """
        if not hasattr(self._threads, "made"):
            self._threads.made = {}
        made: dict[torch.device, tuple[torch.optim.Optimizer, dict[str, Any]]] = self._threads.made
        if device not in made:
            start = [torch.nn.Parameter(torch.zeros(1, 1, device=device))]
            optimizer = self.spec.build(start, to_compile=False)
            defaults = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            made[device] = optimizer, defaults
        return made[device]

    def all_options(self, options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Return the optimizer's arguments with those that `options` overrides.

        Args:
            options: arguments that differ from the spec's.
            device: the device of the tensors that are updated.
        """
        return {**self._of_this_thread(device)[1], **options}

    def apply(
        self,
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        scalars: Sequence[Scalars | None],
        options: Mapping[str, Any],
        *,
        undoable: bool = False,
    ) -> list[Scalars]:
        """Update masters and states in place.

        Args:
            masters: values; whole parameters, or any runs of them where the rule is elementwise.
            gradients: tensors of the same shapes and dtypes; either all or none need plain kernels.
            states: the tensors of `state_layout` of each; their values before the first update are ignored.
            scalars: the scalars of each, from its last update; `None` before the first.
            options: optimizer arguments that differ from the spec's, such as the current `lr`.
            undoable: change nothing if memory is missing. A fused kernel allocates nothing after its first
                write; for other kernels the tensors are copied first.

        Returns:
            The new scalars of each.

        Raises:
            torch.OutOfMemoryError: if the device has no memory left.
            StreamError: if the optimizer begins to keep a tensor that is not in `state_layout`.
        """
        device = masters[0].device
        optimizer, _ = self._of_this_thread(device)
        kernel = _PLAIN_KERNEL if needs_plain_kernel(gradients[0]) else {}
        group = {"params": list(masters), **self.all_options(options, device), **kernel}
        is_fused = bool(group.get("fused"))
        # State before the first update has no values.
        used = [own for own, old in zip(states, scalars, strict=True) if old is not None]
        # The copies are made before the first write.
        undo = _copies(masters, gradients, used) if undoable and not is_fused else []
        optimizer.param_groups = [group]
        # An earlier call that ended with an error may have left the state of other tensors.
        optimizer.state.clear()
        # torch's fused kernels read scalars on their device, all others in host memory.
        place = device if is_fused else torch.device("cpu")
        for master, gradient, own, old in zip(masters, gradients, states, scalars, strict=True):
            master.grad = gradient
            if old is not None:
                optimizer.state[master] = {**own, **_copied_to(place, old)}
        try:
            step_without_hooks(optimizer)
        except RuntimeError:
            for tensor, before in undo:
                tensor.copy_(before)
            raise
        finally:
            optimizer.param_groups = []  # else it keeps views of slabs, which must be free for other stages
        for master in masters:
            # The gradient's memory is used again for the next batch of pieces.
            master.grad = None
        pairs = zip(masters, states, strict=True)
        return [self._stored(optimizer.state.pop(master, {}), own) for master, own in pairs]

    def _stored(self, state: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> Scalars:
        """Return the scalars of an optimizer's state. Its tensors are `own`, or are copied to them.

        Raises:
            StreamError: if it has other tensors.
        """
        found = state_tensors(state)
        if found.keys() != own.keys():
            raise self._changed_state(found, own)
        for name, value in own.items():
            # Some optimizers replace a state tensor instead of changing it.
            if found[name] is not value:
                if found[name].shape != value.shape:
                    raise self._changed_state(found, own)
                value.copy_(found[name])
        return {name: value for name, value in state.items() if name not in own}

    def _changed_state(
        self, stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
    ) -> StreamError:
        """Return the error for a state without the tensors for which the plan has reserved memory.

        Args:
            stored: the tensors that the optimizer keeps of a parameter after its step.
            own: the tensors that the store has for it.
        """
        expected = {name: tuple(value.shape) for name, value in own.items()}
        found = {name: tuple(value.shape) for name, value in stored.items()}
        name = next(name for name in (*found, *expected) if found.get(name) != expected.get(name))
        before, now = _shape_text(expected.get(name)), _shape_text(found.get(name))
        return StreamError(
            f"{self.spec.name} has changed its state: expected {name!r} {before} as in its first two steps, "
            f"found it {now}",
            where="optimizer.step()",
            remedy=f"{STATE_REMEDY}; set the options of parameter groups before that step",
        )


@final
class SeveralRules(UpdateRules):
    """Several optimizers, each for parameters that it lists by name. Parameters in no list are not updated.

    Args:
        specs: name of a parameter -> its optimizer; equal ones are the same object. At least one.
        options: name of a parameter -> the options of its group that decide which state is kept.
    """

    def __init__(
        self, specs: Mapping[str, OptimizerSpec], options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.spec = next(iter(specs.values()))
        rules: dict[tuple[int, object], UpdateRule] = {}
        self._rules: dict[str, UpdateRule] = {}
        for name, spec in specs.items():
            own = (options or {}).get(name, {})
            key = id(spec), state_signature(own)
            self._rules[name] = rules.setdefault(key, UpdateRule(spec, own))
        self.elementwise = all(rule.elementwise for rule in rules.values())

    def of(self, name: str) -> UpdateRule:
        return self._rules[name]

    def state_layout(self, param: ParamSpec) -> StateLayout:
        rule = self._rules.get(param.name)
        return {} if rule is None else rule.state_layout(param)


def stage_layout(stage: StageSpec, rule: UpdateRules, *, piece_elements: int = PIECE_ELEMENTS) -> StageLayout:
    """Return the layout of a stage's bytes if `rule` updates it; see `StageLayout`."""
    states = [rule.state_layout(param) for param in stage.params]
    return StageLayout(stage, states, elementwise=rule.elementwise, piece_elements=piece_elements)


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "to be absent" if shape is None else f"of shape {list(shape)}"


def _copied_to(place: torch.device, scalars: Scalars) -> dict[str, Any]:
    """Return copies of scalars for one piece. Other pieces of its parameter start from the same scalars."""
    return {
        name: value.to(place, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def _copies(
    masters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tensor, copy) of all dense tensors that an optimizer may change in place.

    Gradients are among them, because some kernels use their memory for other values.
    """
    tensors = [*masters, *gradients, *(each for state in states for each in state.values())]
    return [(tensor, tensor.clone()) for tensor in tensors if not tensor.is_sparse]
