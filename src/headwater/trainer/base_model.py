"""Base class of a user's model with its loss, and the adapter through which the trainer calls it."""

from __future__ import annotations

import abc
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from headwater.core.errors import ConfigError, ModelError
from headwater.core.trees import tensors_in


class PyTorchBaseModel(abc.ABC):
    """A model, its loss and its metrics.

        class Classifier(PyTorchBaseModel):
            def __init__(self, params, device=None):
                self.model = MLP(params["model"]["hidden_size"])
                self.loss_fn = torch.nn.CrossEntropyLoss()
                self.accuracy = AccuracyMetric(name="accuracy")
                super().__init__(params=params, model=self.model, device=device)

            def __call__(self, data):
                inputs, targets = data
                outputs = self.model(inputs)
                if not self.model.training:
                    self.accuracy(labels=targets, predictions=outputs.argmax(1))
                return self.loss_fn(outputs, targets)

    Metrics of `headwater.metrics` or torchmetrics are reported at each evaluation. The parameters of `model`
    are trained.

    Args:
        params: every section of the params file, as dictionaries.
        model: the module.
        device: where the model was built.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        model: nn.Module,
        device: torch.device | str | None = None,
    ) -> None:
        self.params = params
        self.model = model
        self.device = device

    @abc.abstractmethod
    def __call__(self, data: Any) -> torch.Tensor:
        """Return the scalar loss of a batch. The batch's tensors are on the compute device."""


ModelClass = Callable[[dict[str, dict[str, Any]]], PyTorchBaseModel]
"""A class derived from `PyTorchBaseModel`."""


def build_base_model(
    make: ModelClass, params: dict[str, dict[str, Any]], *, without_values: bool = False
) -> PyTorchBaseModel:
    """Build the user's model.

    Args:
        make: its class.
        params: every section of the params file; the class gets a copy.
        without_values: build it on the meta device, where it takes no memory.

    Raises:
        ConfigError: if `make` is not a subclass of PyTorchBaseModel, or the model is not complete.
    """
    name = getattr(make, "__name__", repr(make))
    candidate: object = make
    if not (isinstance(candidate, type) and issubclass(candidate, PyTorchBaseModel)):
        raise ConfigError(
            f"{name} is not a subclass of PyTorchBaseModel",
            where="run",
            remedy="derive it from headwater.run.PyTorchBaseModel; its __call__(data) returns the loss",
        )
    if inspect.isabstract(candidate):
        raise ConfigError(
            f"{name} has no loss", where=name, remedy="define __call__(self, data), which returns the loss"
        )
    with torch.device("meta" if without_values else "cpu"):
        # The class gets a copy: if it changes its params, the params that the run writes must not change.
        base = make(copy.deepcopy(params))
    if not {"params", "model"} <= vars(base).keys() or not isinstance(base.model, nn.Module):
        raise ConfigError(
            f"{name}.__init__ has not set the model",
            where=f"{name}.__init__",
            remedy="call super().__init__(params=params, model=self.model, device=device) with a module",
        )
    _check_parameters(base, name)
    if without_values:
        for module in _apart(base):  # metrics have no method `to_empty`
            module._apply(lambda tensor: torch.empty_like(tensor, device="cpu"))
    return base


def _check_parameters(base: PyTorchBaseModel, name: str) -> None:
    """Raise `ConfigError` for trainable parameters outside of the model: they would not be trained."""
    own = {id(param) for param in base.model.parameters()}
    for attribute, module in _side_modules(base):
        if any(param.requires_grad and id(param) not in own for param in module.parameters()):
            raise ConfigError(
                f"{name}.{attribute} has parameters that are not in the model, and would not be trained",
                where=f"{name}.__init__",
                remedy=f"make {attribute} a part of the model, or freeze it with requires_grad_(False)",
            )


def _side_modules(base: PyTorchBaseModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield (attribute, module) for each module that is not the model, such as losses and metrics."""
    for attribute, value in vars(base).items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, nn.Module) and leaf is not base.model:
                yield attribute, leaf


def _apart(base: PyTorchBaseModel) -> list[nn.Module]:
    """Return the other modules: those that have no submodule in common with the model."""
    inside = set(base.model.modules())
    return [module for _, module in _side_modules(base) if inside.isdisjoint(module.modules())]


class BaseModelLoss:
    """The loss function of a user's model, as the trainer calls it.

    A call raises `ModelError` unless the user's code returns a scalar that depends on a trained parameter.
    """

    def __init__(self, base: PyTorchBaseModel) -> None:
        self._base = base
        self._beside = _apart(base)
        self._device = torch.device("cpu")  # fake tensors of a dry run are here too, so `to` is not called

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._follow(batch)
        loss = self._base(batch)
        if not isinstance(loss, torch.Tensor):
            raise self._error(f"is a {type(loss).__name__}", "return a tensor with one element")
        if loss.numel() != 1:
            raise self._error(f"has shape {list(loss.shape)}", "return a scalar, its mean() for example")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._error("depends on no parameter that is trained", "compute it from the model's output")
        return loss.reshape(())  # a loss of shape [1] is accepted too

    def _follow(self, batch: Any) -> None:
        """Move losses and metrics to the device of the batch. The engine does this for the model itself."""
        device = next((tensor.device for tensor in tensors_in(batch)), None)
        if device is not None and device != self._device:
            self._device = device
            for module in self._beside:
                module.to(device)

    def _error(self, what: str, remedy: str) -> ModelError:
        name = type(self._base).__name__
        return ModelError(f"the loss of {name} {what}", where=f"{name}.__call__", remedy=remedy)
