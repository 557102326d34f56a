"""Parameters of the user's model: bound to weights while they are used, and at rest otherwise."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.stage import ParamKey, ParamSpec
from headwater.plan.alive import has_storage
from headwater.store.store import WeightStore
from headwater.stream.at_rest import enter_store, leave_memory
from headwater.stream.home import Home
from headwater.stream.leaving import give_back
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.saved_tensors import WeightHandle, changed_in_place


def placeholder(param: ParamSpec, device: torch.device) -> torch.Tensor:
    """Return the tensor of an unbound parameter: its shape and wire dtype, NaN, one element of memory."""
    dtype = param.wire_dtype
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(param.shape)


class Binder:
    """The owner of a model's `nn.Parameter` objects, which binds them to weights and unbinds them.

    Attributes:
        departed: the parameters that have become plain ones, by their place in the store.
        on_leave: called with such a parameter; copies its values from the store.

    Args:
        model: the model. Its parameters are bound and unbound after `adopt`.
        store: the place of the values of unbound parameters.
        device: the device that computes.
        stable: true if each stage is always bound to the same memory.
        writable: true if bound weights are the memory of the store, so that writes to them reach it.
        written: names of the parameters that the model's forward changed in the dry run.
    """

    def __init__(
        self,
        model: nn.Module,
        store: WeightStore,
        device: torch.device,
        *,
        stable: bool = False,
        writable: bool = False,
        written: Collection[str] = (),
    ) -> None:
        self._model = model
        self._store = store
        self._device = device
        self._stages = store.stages
        self._params: list[list[nn.Parameter]] = [[] for _ in self._stages]
        self._classes: list[list[type[nn.Parameter]]] = [[] for _ in self._stages]
        self._placeholders = [[placeholder(spec, device) for spec in stage.params] for stage in self._stages]
        self._stable = stable
        self._writable = writable
        self._written = [
            {index for index, spec in enumerate(stage.params) if spec.name in written}
            for stage in self._stages
        ]
        self._views: dict[int, list[torch.Tensor]] = {}  # stage -> the bound views of its parameters
        self._bound: dict[int, list[int]] = {}  # bound stage -> versions of its parameters
        self._address: dict[int, int] = {}  # stage -> address of its parameters' memory
        self._stage_at: dict[int, int] = {}
        self.departed: dict[ParamKey, nn.Parameter] = {}
        self.on_leave: Callable[[ParamKey, nn.Parameter], None] = lambda key, param: give_back(
            store, key, param, None
        )

    def values(self, stage: int) -> list[torch.Tensor]:
        """Return the present values of a stage's parameters."""
        return [self._model.get_parameter(spec.name).detach() for spec in self._stages[stage].params]

    def adopt(self, stage: int) -> None:
        """Make the parameters of a stage parameters at rest, and drop their values from memory.

        The objects stay the same. A gradient that a parameter has already moves to the store.

        Raises:
            StreamError: if another compiled model streams a parameter already.
        """
        self._params[stage] = [self._model.get_parameter(spec.name) for spec in self._stages[stage].params]
        for index, param in enumerate(self._params[stage]):
            if isinstance(param, ParameterAtRest):
                raise StreamError(
                    "a parameter is streamed by another compiled model already",
                    where=self._stages[stage].params[index].name,
                    remedy="compile one module that holds both models, or release the other one first",
                )
            spec = self._stages[stage].params[index]
            value = self._placeholders[stage][index]
            enter_store(param)
            gradient, param.grad = param.grad, None
            if gradient is not None:  # from a backward before streaming began
                self._store.set_gradient(stage, index, gradient.to("cpu"))
            if param.is_meta:  # torch forbids `.data =` here, but allows to swap the objects
                other = nn.Parameter(value, requires_grad=spec.requires_grad)
                other.__dict__.update(param.__dict__)
                torch.utils.swap_tensors(param, other)
            else:
                param.data = value
            let_go = weakref.WeakMethod(self.let_go)
            param.home = Home(self._store, stage, index, self._device, let_go)  # type: ignore[attr-defined]
            self._classes[stage].append(type(param))
            param.__class__ = ParameterAtRest

    def let_go(self, key: ParamKey) -> None:
        """Turn one parameter into a plain one, with its values, gradient and optimizer state.

        A dummy parameter replaces it here until the model is planned again.
        """
        stage, index = key
        param = self._params[stage][index]
        spec = self._stages[stage].params[index]
        self._params[stage][index] = nn.Parameter(self._placeholders[stage][index], spec.requires_grad)
        param.__class__ = self._classes[stage][index]
        del param.home  # type: ignore[attr-defined]
        self.on_leave(key, param)
        self._store.gradients.drop((stage, index))
        self.departed[key] = param

    def release(self) -> None:
        """Turn every parameter into a plain one that holds NaN."""
        self.unbind_all()
        for stage in range(len(self._stages)):
            self._set_classes(stage)  # first: assigning to a parameter at rest would write to the store
            self._point(stage, None)
            for param in self._params[stage]:
                vars(param).pop("home", None)

    def parameters(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        """Yield (stage, index in the stage, parameter) of every parameter."""
        for stage, params in enumerate(self._params):
            for index, param in enumerate(params):
                yield stage, index, param

    def is_bound(self, stage: int) -> bool:
        """True if the parameters of a stage are views of an image now."""
        return stage in self._bound

    def bind(self, stage: int, image: torch.Tensor) -> None:
        """Make the parameters of a stage plain parameters that are views of `image`."""
        address = image.data_ptr()
        if stage in self._bound and self._address.get(stage) == address:
            return
        self._set_classes(stage)
        if self._address.get(stage) != address:
            self._point(stage, image)
        self._bound[stage] = self._versions(stage)

    def _point(self, stage: int, image: torch.Tensor | None) -> None:
        """Point the parameters of a stage to views of `image`, or to placeholders if it is `None`."""
        params = self._params[stage]
        if image is None:
            views = self._placeholders[stage]
            self._address.pop(stage, None)
            self._views.pop(stage, None)
        else:
            with torch.inference_mode(False):  # inference tensors could not be trained later
                views = self._stages[stage].views(image)
            self._views[stage] = views
            self._address[stage] = image.data_ptr()
            self._stage_at[image.data_ptr()] = stage
        with torch._C.DisableTorchFunctionSubclass():  # else a parameter at rest would write to the store
            for param, view in zip(params, views, strict=True):
                param.data = view

    def _set_classes(self, stage: int) -> None:
        for param, cls in zip(self._params[stage], self._classes[stage], strict=True):
            param.__class__ = cls

    def handle_of(self, tensor: torch.Tensor) -> WeightHandle | None:
        """Return the handle of a tensor that is a view of bound weights; `None` for any other tensor."""
        if not has_storage(tensor):
            return None
        stage = self._stage_at.get(tensor.untyped_storage().data_ptr())
        if stage is None:
            return None
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        index = bisect_right(self._stages[stage].offsets, offset_bytes) - 1
        return WeightHandle.of(tensor, stage, index, self._params[stage][index]._version)

    def check_unchanged(self, handle: WeightHandle) -> None:
        """Check that a weight has not changed since autograd saved it.

        Raises:
            StreamError: if it was updated or written to since then.
        """
        param = self._params[handle.stage][handle.param]
        if param._version != handle.version:
            raise changed_in_place(param)

    def forget_saved(self) -> None:
        """Make backward fail in every graph that has saved a parameter object: it will not be bound again."""
        torch.autograd.graph.increment_version([param for _, _, param in self.parameters()])

    def rest(self, stage: int) -> None:
        """Make the parameters of a stage parameters at rest. Their memory stays for autograd's saved tensors.

        Raises:
            StreamError: if the model wrote into one of them where the dry run did not.
        """
        self._rest(stage, self._values_to_keep(stage))

    def unbind(self, stage: int) -> None:
        """Unbind the parameters of a stage. They keep their memory only if it is permanent.

        Raises:
            StreamError: see `rest`.
        """
        values = self._values_to_keep(stage)
        if stage in self._address and not self._stable:
            self._point(stage, None)
        self._rest(stage, values)

    def _values_to_keep(self, stage: int) -> dict[int, torch.Tensor]:
        """Return the values that the forward has assigned to parameters and that the store does not have.

        A parameter that got other memory by `param.data = ...` gets the memory of the stage again.
        """
        if stage not in self._bound:
            return {}
        pairs = list(zip(self._params[stage], self._views[stage], strict=True))
        moved = {index for index, (param, view) in enumerate(pairs) if not param.is_set_to(view)}
        changed = moved if self._writable else moved | self._written[stage]
        values = {index: pairs[index][0].data for index in changed}
        for index in moved:
            param, view = pairs[index]
            leave_memory(param)
            param.data = view
        return values

    def _rest(self, stage: int, values: Mapping[int, torch.Tensor]) -> None:
        versions = self._bound.pop(stage, None)
        if versions is None:
            return
        for param in self._params[stage]:
            param.__class__ = ParameterAtRest
        changed = set(values)
        if not self._writable:
            pairs = enumerate(zip(self._versions(stage), versions, strict=True))
            changed.update(index for index, (now, before) in pairs if now != before)
        if not changed <= self._written[stage]:
            raise StreamError(
                "the forward changes a weight, and did not in the dry run before the first step",
                where=f"stage {self._stages[stage].name!r}",
                remedy="change it between steps, or in the first forward in training mode too",
            )
        for index, value in values.items():
            self._keep(stage, index, value)

    def _keep(self, stage: int, index: int, value: torch.Tensor) -> None:
        """Write the value that the forward has given to a parameter to the store.

        Raises:
            StreamError: if its shape or dtype is not that of the parameter.
        """
        spec = self._stages[stage].params[index]
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise StreamError(
                f"the forward makes {spec.name} a tensor of {value.dtype} and shape {list(value.shape)}; "
                f"expected {spec.dtype} and {list(spec.shape)}",
                where=f"stage {self._stages[stage].name!r}",
                remedy="change it between steps, and in mixed precision always",
            )
        self._store.parameters.write_param((stage, index), value)

    def _versions(self, stage: int) -> list[int]:
        """Return how often each parameter has been changed in place."""
        return [param._version for param in self._params[stage]]

    def unbind_all(self) -> None:
        """Unbind the parameters of all stages."""
        for stage in {**self._address, **self._bound}:
            self.unbind(stage)
