"""Parameters of the user's model, bound to weights while they are used and loud while they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.stage import ParamSpec, StageSpec


def placeholder(param: ParamSpec, device: torch.device) -> torch.Tensor:
    """What an unbound parameter holds: right shape and dtype, NaN everywhere, one element of memory."""
    return _loud(param.shape, param.wire_dtype, device)


def _loud(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


class Binder:
    """Owns the `nn.Parameter` objects of a model.

    Args:
        model: whose parameters are bound and unbound, once they are adopted.
        stages: all stages of the model.
        device: where it computes.
        writable: whether what the model writes into a bound weight reaches the store.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[StageSpec], device: torch.device, *, writable: bool = False
    ) -> None:
        self._model = model
        self._device = device
        self._stages = stages
        self._params: list[list[nn.Parameter]] = [[] for _ in stages]
        self._placeholders = [[placeholder(spec, device) for spec in stage.params] for stage in stages]
        self._writable = writable
        self._versions: dict[int, int] = {}  # of bound stages
        self._bound: dict[int, int] = {}
        self._stage_at: dict[int, int] = {}

    def values(self, stage: int) -> list[torch.Tensor]:
        """What the parameters of a stage hold now."""
        return [self._model.get_parameter(spec.name).detach() for spec in self._stages[stage].params]

    def adopt(self, stage: int) -> None:
        """Take over the parameters of a stage; what they hold is forgotten."""
        self._params[stage] = [self._adopted(spec) for spec in self._stages[stage].params]

    def _adopted(self, spec: ParamSpec) -> nn.Parameter:
        """The parameter object, made anew if dtype or device of the placeholder differ from it."""
        param = self._model.get_parameter(spec.name)
        if (param.dtype, param.device) == (spec.wire_dtype, self._device):
            param.data = placeholder(spec, self._device)
            return param
        if not param.is_meta:  # who else holds the old object must not go on with old weights
            param.data = _loud(param.shape, param.dtype, param.device)
        param = nn.Parameter(placeholder(spec, self._device), requires_grad=spec.requires_grad)
        for name in (spec.name, *spec.aliases):
            path, _, leaf = name.rpartition(".")
            setattr(self._model.get_submodule(path), leaf, param)
        return param

    def parameters(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        """(stage, index in the stage, parameter) of every parameter."""
        for stage, params in enumerate(self._params):
            for index, param in enumerate(params):
                yield stage, index, param

    def bind(self, stage: int, image: torch.Tensor) -> None:
        """Let the parameters of a stage be views of `image`."""
        address = image.data_ptr()
        if self._bound.get(stage) == address:
            return
        for param, view in zip(self._params[stage], self._stages[stage].views(image), strict=True):
            param.data = view
        self._bound[stage] = address
        self._versions[stage] = self._version(stage)
        self._stage_at[address] = stage

    def stage_of(self, tensor: torch.Tensor) -> int | None:
        """The stage in whose memory a tensor lies, if it is a view of bound weights."""
        return self._stage_at.get(tensor.untyped_storage().data_ptr())

    def unbind(self, stage: int) -> None:
        """Let the parameters of a stage be placeholders.

        Raises:
            StreamError: if the model wrote into one of them, and that would be lost.
        """
        if self._bound.pop(stage, None) is None:
            return
        for param, value in zip(self._params[stage], self._placeholders[stage], strict=True):
            param.data = value
        if not self._writable and self._version(stage) != self._versions[stage]:
            raise StreamError(
                "the forward changes a weight in place, and streamed weights are only read",
                where=f"stage {self._stages[stage].name!r}",
                remedy="change it between steps, or train in fp32 with the model in memory",
            )

    def _version(self, stage: int) -> int:
        """Grows with every in-place operation on the parameters."""
        return sum(param._version for param in self._params[stage])

    def unbind_all(self) -> None:
        """Let every parameter be a placeholder."""
        for stage in list(self._bound):
            self.unbind(stage)
