"""Division of a model's parameters into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from headwater.core.errors import PlanError
from headwater.core.module_parameters import named_parameters_of, parameters_of
from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec, StageSpec, dense_strides, with_params

_NORM_LAYERS = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm,
)  # fmt: skip

_LARGE_SHARE = 8
"""A child of a repeated container is divided further if it holds more than 1/8 of the model."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module whose parameters are a stage.

    Attributes:
        path: its qualified name; empty for the model itself.
        direct_only: True if only its own parameters belong to the stage, not those of its children.
    """

    path: str
    direct_only: bool


@dataclasses.dataclass(frozen=True)
class Partition:
    """The stages of a model, and the module of each."""

    stages: tuple[StageSpec, ...]
    units: tuple[Unit, ...]

    def with_params(self, changed: Callable[[ParamSpec], ParamSpec]) -> Partition:
        """Return the same stages, whose parameters are the results of `changed`."""
        return dataclasses.replace(self, stages=with_params(self.stages, changed))


def find_stages(model: nn.Module, precision: Precision) -> Partition:
    """Divide a model into stages.

    Each child of a repeated container (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict` with at least two
    children that have parameters) is a stage. Modules beside a container are stages too. A shared parameter
    belongs to the first stage that holds it.

    Args:
        model: any module; its parameters may be on the meta device.
        precision: decides the wire dtype.

    Returns:
        The stages.

    Raises:
        PlanError: if the model has no parameters.
    """
    names = _names_by_param(model)
    if not names:
        raise PlanError(
            f"{type(model).__name__} has no parameters", remedy="pass a module that has parameters"
        )
    norm_params = _norm_params(model)
    sparse_params = _sparse_params(model)
    taken: set[int] = set()
    stages: list[StageSpec] = []
    kept: list[Unit] = []
    for unit in _divide(model, "", _numel(model)):
        module = model.get_submodule(unit.path)
        params = []
        for param in parameters_of(module, recurse=not unit.direct_only):
            if id(param) not in taken:
                taken.add(id(param))
                spec = _spec(param, names[id(param)], precision, id(param) in norm_params)
                if id(param) in sparse_params:  # sparse gradients update row by row
                    spec = dataclasses.replace(spec, sparse_gradient=True, strides=None)
                params.append(spec)
        if params:
            stages.append(StageSpec(len(stages), unit.path, tuple(params)))
            kept.append(unit)
    return Partition(tuple(stages), tuple(kept))


def _divide(module: nn.Module, path: str, total: int) -> Iterator[Unit]:
    """Yield the units of a module.

    Args:
        module: the module.
        path: its qualified name.
        total: elements of all parameters of the model.
    """
    if not _has_parameters(module):
        return
    if path and not _holds_container(module):
        yield Unit(path, direct_only=False)
        return
    # A class derived from `nn.Sequential` or `nn.ModuleList` can hold parameters beside its layers.
    if next(parameters_of(module, recurse=False), None) is not None:
        yield Unit(path, direct_only=True)
    divide = _divide_repeated if _is_container(module) else _divide
    for name, child in module.named_children():
        yield from divide(child, _join(path, name), total)


def _divide_repeated(child: nn.Module, path: str, total: int) -> Iterator[Unit]:
    """Yield the units of a child of a repeated container: the child, or its parts if it is large."""
    if _numel(child) * _LARGE_SHARE > total and _holds_container(child, nn.ModuleList):
        yield from _divide(child, path, total)
    elif _has_parameters(child):
        yield Unit(path, direct_only=False)


def _is_container(module: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict) if kind is None else (kind,)
    return isinstance(module, kinds) and sum(map(_has_parameters, module.children())) >= 2


def _holds_container(module: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    return any(_is_container(inner, kind) for inner in module.modules())


def _has_parameters(module: nn.Module) -> bool:
    """True if a module has parameters, even empty ones such as those of `nn.Linear(8, 0)`."""
    return next(parameters_of(module), None) is not None


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in parameters_of(module))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _names_by_param(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in named_parameters_of(model, remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def _norm_params(model: nn.Module) -> set[int]:
    # Layers are found by name too, because other libraries define classes such as `LlamaRMSNorm`.
    layers = (m for m in model.modules() if isinstance(m, _NORM_LAYERS) or type(m).__name__.endswith("Norm"))
    return {id(param) for layer in layers for param in parameters_of(layer, recurse=False)}


def _sparse_params(model: nn.Module) -> set[int]:
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse)
    return {id(layer.weight) for layer in layers}


def _spec(param: nn.Parameter, names: list[str], precision: Precision, norm: bool) -> ParamSpec:
    narrow = precision.mixed and param.dtype == torch.float32 and not norm
    return ParamSpec(
        name=names[0],
        shape=tuple(param.shape),
        dtype=param.dtype,
        wire_dtype=precision.wire_dtype if narrow else param.dtype,
        requires_grad=param.requires_grad,
        aliases=tuple(names[1:]),
        strides=dense_strides(param),
    )
