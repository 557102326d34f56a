"""The parameters of one stage: views of a wire image while they are bound, parameters at rest otherwise."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.modes import apart_from_modes
from headwater.core.stage import StageSpec
from headwater.core.tensor_memory import return_free_memory
from headwater.plan.writes import changed_in_place
from headwater.stream.addresses import forget_address
from headwater.stream.home import Home, MakePlain
from headwater.stream.parameter_memory import enter_store, leave_memory
from headwater.stream.parameters import ParameterAtRest, class_at_rest
from headwater.stream.saved_tensors import WeightHandle
from headwater.stream.transform_inputs import read_before_transforms
from headwater.stream.transforms import in_transform
from headwater.stream.unbound_memory import UnboundMemory, version_of

if TYPE_CHECKING:
    from headwater.store.store import WeightStore
    from headwater.stream.unseen_writes import UnseenWrites


@final
class StageParameters:
    """The `nn.Parameter` objects of one stage. They point to an image of the weights, or to placeholders.

    Attributes:
        params: the parameters. A dummy replaces each parameter that has become a plain one.
        is_watched: true if a change by a forward that the dry run did not see must be found.
        unseen: finds such changes that torch does not count; `None` if nothing checks this.

    Args:
        spec: the stage.
        params: the parameters, which are plain ones until `adopt`.
        store: the place of their values while they are at rest.
        device: the device that computes.
        stable: true if the stage is always bound to the same memory.
        writable: true if bound weights are the memory of the store, so that writes to them reach it.
        written: indices of the parameters that the model's forward changed in the dry run.
        watched: true if a change of another parameter by a forward must be found: it would be lost, or made
            twice by a forward that runs again.
    """

    def __init__(
        self,
        spec: StageSpec,
        params: Sequence[nn.Parameter],
        store: WeightStore,
        device: torch.device,
        *,
        stable: bool,
        writable: bool,
        written: Collection[int],
        watched: bool,
    ) -> None:
        self.params = list(params)
        self._spec = spec
        self._store = store
        self._device = device
        self._stable = stable
        self._writable = writable
        self._written = frozenset(written)
        self.is_watched = watched
        self.unseen: UnseenWrites | None = None
        self._classes = [type(param) for param in params]
        self._unbound = UnboundMemory(spec.params, device)
        self._address: int | None = None  # address of the image to which the parameters point
        self._views: list[torch.Tensor] = []  # views of that image
        self._versions: list[int] | None = None  # versions at the time of binding; `None` at rest

    # life of a parameter

    def adopt(self, make_plain: MakePlain) -> None:
        """Turn plain parameters into parameters at rest, and free the memory of their values.

        The objects stay the same. A gradient that a parameter has already moves to the store.

        Args:
            make_plain: bound method that turns a parameter of the store into a plain one; only a weak
                reference to it is kept.

        Raises:
            StreamError: if another compiled model streams a parameter already.
        """
        read_before_transforms()
        for index, param in enumerate(self.params):
            if isinstance(param, ParameterAtRest):
                raise StreamError(
                    "a parameter is streamed by another compiled model already",
                    where=self._spec.params[index].name,
                    remedy="compile one module that holds both models, or release the other one first",
                )
            self._adopt(index, param)
            kind = self._classes[index] = type(param)
            home = Home(
                self._store, self._spec.index, index, kind, self._device, weakref.WeakMethod(make_plain)
            )
            param.home = home  # type: ignore[attr-defined]
            param.__class__ = class_at_rest(kind)

    def _adopt(self, index: int, param: nn.Parameter) -> None:
        """Replace a parameter's values by its placeholder, and move its gradient to the store."""
        # This comes before `param.data` changes, because it compares the old memory.
        enter_store(param)
        gradient, param.grad = param.grad, None
        if gradient is not None:  # from a backward before streaming began
            self._store.set_gradient((self._spec.index, index), gradient)
        self._unbound.keep(index, param)
        value = self._unbound.tensors[index]
        if param.is_meta:  # torch forbids `.data =` here, but allows to swap the objects
            other = nn.Parameter(value, requires_grad=self._spec.params[index].requires_grad)
            other.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, other)
        else:
            param.data = value

    def make_plain(self, index: int) -> nn.Parameter:
        """Turn a parameter into a plain parameter whose values the caller sets. A dummy replaces it here."""
        param = self.params[index]
        requires_grad = self._spec.params[index].requires_grad
        self.params[index] = dummy = nn.Parameter(self._unbound.tensors[index], requires_grad)
        if self._address is not None:
            # `bind` skips a stage that is bound to the same memory again, so the dummy gets its view here.
            dummy.data = self._views[index]
        param.__class__ = self._classes[index]
        forget_address(param)
        # The gradient hook treats a parameter without `home` as a plain one.
        del param.home  # type: ignore[attr-defined]
        return param

    def release(self) -> None:
        """Turn every parameter into a plain parameter that holds NaN. All of them must be unbound."""
        self._set_classes()
        self._point_to_placeholders()
        for param in self.params:
            forget_address(param)
            vars(param).pop("home", None)

    def _set_classes(self) -> None:
        for param, cls in zip(self.params, self._classes, strict=True):
            param.__class__ = cls

    # binding

    @property
    def is_bound(self) -> bool:
        """True if the parameters are views of an image now."""
        return self._versions is not None

    def bind(self, image: torch.Tensor) -> None:
        """Bind the parameters: they become ordinary `nn.Parameter` objects that are views of `image`."""
        self._set_classes()
        address = image.data_ptr()
        if self._address != address:
            # Inference tensors could not be trained later, and tensors of a transform end with it.
            with apart_from_modes() if in_transform() else torch.inference_mode(False):
                self._views = self._spec.views(image)
                self._address = address
                self._point(self._views)
            # Stable parameters point to the image from now on, which has the same values as former memory.
            if self._unbound.drop(self.params, always=self._stable):
                return_free_memory()  # the plan does not count this memory
        self._versions = self._present_versions()
        if self.unseen is not None:
            self.unseen.begin(self._spec, image)

    def put_at_rest(self) -> None:
        """Turn bound parameters into parameters at rest that still point to their slab.

        Tensors that autograd has saved may be views of it.

        Raises:
            StreamError: if the model wrote into one of them where the dry run did not.
        """
        self._put_at_rest(self._values_to_keep())

    def unbind(self) -> None:
        """Turn bound parameters into parameters at rest.

        They no longer point to their slab, which another stage may use next. If the stage is always bound to
        the same memory, they still point to that memory.

        Raises:
            StreamError: see `put_at_rest`.
        """
        # The values are read before the parameters point to placeholders.
        values = self._values_to_keep()
        if self._address is not None and not self._stable:
            self._point_to_placeholders()
        self._put_at_rest(values)

    def _point_to_placeholders(self) -> None:
        self._address, self._views = None, []
        is_dropped = self._unbound.drop(self.params, always=self._stable)
        self._point(self._unbound.tensors)
        if is_dropped:
            return_free_memory()

    def _point(self, values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # else a parameter at rest would write to the store
            for param, value in zip(self.params, values, strict=True):
                param.data = value

    def _values_to_keep(self) -> dict[int, torch.Tensor]:
        """Return the values that the forward has written to parameters, and that must go to the store.

        A parameter that got other memory by `param.data = ...` gets the memory of the stage again.
        """
        if not self.is_bound:
            return {}
        if self.unseen is not None:
            self.unseen.end(self._spec, self._written)
        pairs = list(zip(self.params, self._views, strict=True))
        moved = {index for index, (param, view) in enumerate(pairs) if not param.is_set_to(view)}
        changed = moved if self._writable else moved | self._written
        values = {index: self.params[index].data for index in changed}
        for index in moved:
            param, view = pairs[index]
            leave_memory(param)
            param.data = view
        return values

    def _put_at_rest(self, values: Mapping[int, torch.Tensor]) -> None:
        """Turn bound parameters into parameters at rest, and write `values` to the store."""
        before, self._versions = self._versions, None
        if before is None:
            return
        for param, kind in zip(self.params, self._classes, strict=True):
            param.__class__ = class_at_rest(kind)
        changed = set(values)
        if self.is_watched:
            pairs = enumerate(zip(self._present_versions(), before, strict=True))
            changed.update(index for index, (now, then) in pairs if now != then)
        # A change of another parameter would be lost, or made twice by a forward that runs again.
        if not changed <= self._written:
            raise StreamError(
                "the forward changes a weight that it did not change in the dry run before the first step",
                where=f"stage {self._spec.name!r}",
                remedy="change the weight between steps, or also in the first forward in training mode",
            )
        if self.unseen is not None:
            self.unseen.raise_found()
        if self._writable and self._written:
            self._store.access.note_change(self._spec.index)
        for index, value in values.items():
            self._keep(index, value)
            if self._stable and not self._writable:
                # Autograd may have saved the parameter itself, which points to this slab until backward.
                self._views[index].copy_(value)

    def _keep(self, index: int, value: torch.Tensor) -> None:
        """Write a value that the forward has assigned to a parameter to the store.

        Raises:
            StreamError: if its shape or dtype is not that of the parameter.
        """
        spec = self._spec.params[index]
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise StreamError(
                f"the forward makes {spec.name} a tensor of {value.dtype} and shape {list(value.shape)}; "
                f"expected {spec.dtype} and {list(spec.shape)}",
                where=f"stage {self._spec.name!r}",
                remedy="assign it between steps, not in the forward",
            )
        self._store.parameters.write_param((self._spec.index, index), value)

    # what autograd saves

    def handle_of(self, view: torch.Tensor) -> WeightHandle:
        """Return a handle of `view`: a view of the image to which this stage is or was bound."""
        offset_bytes = int(view.storage_offset()) * view.element_size()
        # A view may begin anywhere inside a parameter.
        index = bisect_right(self._spec.offsets, offset_bytes) - 1
        return WeightHandle.of(view, self._spec.index, index, version_of(self.params[index]))

    def check_unchanged(self, handle: WeightHandle) -> None:
        """Raise if a weight was changed after autograd saved it.

        Raises:
            StreamError: if it was updated or written to since then.
        """
        if version_of(self.params[handle.param]) != handle.version:
            raise changed_in_place(self._spec.params[handle.param].shape)

    def _present_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in self.params]
