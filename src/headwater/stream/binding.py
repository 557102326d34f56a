"""Binding of the user's parameters: views of a slab while their module runs, parameters at rest otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from headwater.core.stage import ParamKey
from headwater.plan.alive import has_storage
from headwater.stream.leaving import give_back
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.saved_tensors import HandleAtRest, WeightHandle
from headwater.stream.stage_parameters import StageParameters
from headwater.stream.unbound_memory import may_be_saved, version_of

if TYPE_CHECKING:
    from headwater.store.store import WeightStore
    from headwater.stream.unseen_writes import UnseenWrites

OnLeave = Callable[[ParamKey, nn.Parameter, torch.device], None]


def _are_tensors_fake() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@final
class Binder:
    """Binds a model's `nn.Parameter` objects to weights on the device, and unbinds them.

    Attributes:
        stages: the parameters of each stage that was adopted.
        departed: the parameters that have become plain ones, by their place in the store.
        on_leave: called with such a parameter; copies its values from the store to a device.
        unseen: finds changes of weights that torch does not count; `None` if no stage needs it.

    Args:
        model: the model. Its parameters are bound and unbound after `adopt`.
        store: the place of the values of unbound parameters.
        device: the device that computes.
        stable: true if each stage is always bound to the same memory.
        writable: stages whose bound weights are the memory of the store, so that writes to them reach it.
        written: names of the parameters that the model's forward changed in the dry run.
        repeats: true if forwards of the model run again in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        store: WeightStore,
        device: torch.device,
        *,
        stable: bool = False,
        writable: Collection[int] = (),
        written: Collection[str] = (),
        repeats: bool = False,
    ) -> None:
        self._store = store
        self.stages = [
            StageParameters(
                stage,
                [model.get_parameter(spec.name) for spec in stage.params],
                store,
                device,
                stable=stable,
                writable=stage.index in writable,
                written=[index for index, spec in enumerate(stage.params) if spec.name in written],
                watched=repeats or stage.index not in writable,
            )
            for stage in store.stages
        ]
        self._stage_at: dict[int, StageParameters] = {}  # address of an image -> its last stage
        self._used: dict[int, StageParameters] = {}  # the stages that were bound since `unbind_all`
        self.departed: dict[ParamKey, nn.Parameter] = {}
        self.on_leave: OnLeave = lambda key, param, device: give_back(store, key, param, None, device)
        self.unseen: UnseenWrites | None = None

    def watch(self, unseen: UnseenWrites) -> None:
        """Check stages in turn for changes that torch does not count, if a forward must not make them."""
        watched = [stage for stage in self.stages if stage.is_watched]
        if watched:
            self.unseen = unseen
        for stage in watched:
            stage.unseen = unseen

    def adopt(self, stage: int) -> None:
        """Make the parameters of a stage parameters at rest; see `StageParameters.adopt`."""
        self.stages[stage].adopt(self.make_plain)

    def make_plain(self, key: ParamKey, device: torch.device) -> None:
        """Turn a parameter into a plain parameter that takes its values, gradient and optimizer state along.

        A dummy parameter replaces it here until the model is planned again.

        Args:
            key: its place in the store.
            device: the device to which all of these are copied.
        """
        stage, index = key
        param = self.stages[stage].make_plain(index)
        # `on_leave` copies the gradient, so it comes before the drop.
        self.on_leave(key, param, device)
        self._store.drop_gradient(key)
        self.departed[key] = param

    def release(self) -> None:
        """Turn every parameter into a plain one that holds NaN."""
        self.unbind_all()
        for stage in self.stages:
            stage.release()

    def forget(self) -> None:
        """Drop all parameters, so that their memory is freed together with the model.

        The executor and its parts are a reference cycle that holds this object. Python's garbage collector
        may free the cycle much later than the model.
        """
        self.stages.clear()
        self._stage_at.clear()
        self.departed.clear()

    def parameters(self) -> Iterator[tuple[ParamKey, nn.Parameter]]:
        """Yield every parameter with its place in the store."""
        for stage, parameters in enumerate(self.stages):
            for index, param in enumerate(parameters.params):
                yield (stage, index), param

    def bind(self, stage: int, require: Callable[[int], torch.Tensor]) -> None:
        """Bind the parameters of a stage, unless they are bound.

        Args:
            stage: the stage.
            require: returns the image of a stage, up to date.
        """
        parameters = self.stages[stage]
        if not parameters.is_bound:
            # A module that another model calls is bound in the dry run of that model, whose tensors are fake.
            with _disable_current_modes() if _are_tensors_fake() else nullcontext():
                image = require(stage)
                parameters.bind(image)
            self._stage_at[image.data_ptr()] = self._used[stage] = parameters

    def note_place(self, stage: int, image: torch.Tensor) -> None:
        """Record that views of `image` are weights of a stage, until `image` holds another stage."""
        self._stage_at[image.data_ptr()] = self.stages[stage]

    def unbind_all(self) -> None:
        """Unbind the parameters of all stages."""
        while self._used:
            # One by one: if a stage raises, the next call continues with the others.
            self._used.pop(next(iter(self._used))).unbind()

    def handle_of(self, tensor: torch.Tensor) -> WeightHandle | HandleAtRest | None:
        """Return the handle of a view of bound weights, or of a parameter at rest; otherwise `None`."""
        if isinstance(tensor, ParameterAtRest):
            return HandleAtRest(tensor, version_of(tensor))
        if not has_storage(tensor):
            return None
        stage = self._stage_at.get(tensor.untyped_storage().data_ptr())
        return None if stage is None else stage.handle_of(tensor)

    def point_saved(self, require: Callable[[int], torch.Tensor]) -> None:
        """Make the parameters of each stage that a graph may have saved point to the stage's weights.

        Args:
            require: returns the image of a stage, up to date. It is the same memory in each call.
        """
        for index, stage in enumerate(self.stages):
            if any(map(may_be_saved, stage.params)):
                self.bind(index, require)
        self.unbind_all()

    def note_update(self, stage: int) -> None:
        """Make a backward raise if it uses saved weights of a stage that is now updated in place."""
        torch.autograd.graph.increment_version(self.stages[stage].params)

    def forget_saved(self) -> None:
        """Make backward raise in every graph that has saved a parameter: its memory will be overwritten."""
        torch.autograd.graph.increment_version([param for _, param in self.parameters()])
