"""Models to compare: a module of the user, a params file, or a folder in Hugging Face's format."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from headwater.core.errors import ConfigError
from headwater.core.trees import tensors_in

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Function (model, batch) -> scalar loss."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Function that makes the optimizer of a model."""

_WHERE = "what the factory returned"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to compare, with its data, its loss and its optimizer.

    Attributes:
        model: the module, with its initial values.
        batches: batches that are used in turn, one in each step.
        loss: returns the loss of a batch.
        optimizer: returns the optimizer of the model.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss: Loss
    optimizer: MakeOptimizer


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return a fused AdamW for the model: the default optimizer of a comparison."""
    return torch.optim.AdamW(trained(model), lr=1e-3, fused=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model with a batch, and return its loss, or else the sum of the mean squares of its outputs.

    A mapping is passed as keyword arguments, a tuple or list as positional arguments, and any other batch as
    the only argument.

    Raises:
        ConfigError: if no output has a gradient.
    """
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    elif isinstance(batch, tuple | list):
        outputs = model(*batch)
    else:
        outputs = model(batch)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
        return outputs
    tensors = [each for each in tensors_in(_plain_tree(outputs)) if each.requires_grad]
    # A model may mask outputs with -inf. `abs`: an output may be complex.
    squares = [torch.where(each.isfinite(), each, 0.0).abs().square().mean() for each in tensors]
    if not squares:
        raise ConfigError(
            "expected an output with a gradient, found none",
            where="the model's forward",
            remedy="return (model, batches, loss) with a loss function of model and batch",
        )
    return torch.stack([each.float() for each in squares]).sum()


def _plain_tree(outputs: Any) -> Any:
    """Return `outputs`, or a tuple of its values if it is a mapping that torch's pytrees may not know."""
    return tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    # numpy refuses larger seeds.
    np.random.seed(seed % 2**32)
    random.seed(seed)


def load_subject(target: str) -> Subject:
    """Return the model that a command line names.

    Args:
        target: `MODULE:FACTORY`, `FILE.py:FACTORY`, a params file, or a folder with a `config.json`.

    Raises:
        HeadwaterError: if the model cannot be found or loaded.
    """
    path = Path(target).expanduser()
    if (path / "config.json").is_file():
        from headwater.conform.pretrained import load_pretrained_subject

        return load_pretrained_subject(path)
    module, colon, factory = target.rpartition(":")
    if colon and module and factory.isidentifier():
        return _from_factory(module, factory)
    from headwater.conform.zoo import load_zoo_subject

    return load_zoo_subject(target)


def _from_factory(module_name: str, factory_name: str) -> Subject:
    """Return the subject that a factory in a Python module describes."""
    module = _import(module_name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise ConfigError(
            f"expected a function {factory_name!r} in {module_name}, found none",
            where="command line",
            remedy=f"write one of: {', '.join(names[:20])}" if names else "define it",
        )
    return subject_of(factory())


def subject_of(made: Any) -> Subject:
    """Return the subject that a factory's result describes.

    Args:
        made: a `Subject`, or a tuple of two to four entries: a model, a list of batches, a loss function of
            model and batch, and a function that returns the optimizer of a list of parameters.

    Raises:
        ConfigError: if `made` is of another form.
    """
    if isinstance(made, Subject):
        return made
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(
            f"expected (model, batches), with a loss and an optimizer after them if wanted; found {found}",
            where=_WHERE,
            remedy="return model, [batch, …]",
        )
    model, batches, loss, optimizer = itertools.islice(itertools.chain(made, (None, None)), 4)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"expected a torch module first, found {type(model).__name__}",
            where=_WHERE,
            remedy="return model, [batch, …]",
        )
    if not isinstance(batches, list) or not batches:
        found = "an empty list" if isinstance(batches, list) else type(batches).__name__
        raise ConfigError(
            f"expected a list of batches second, found {found}",
            where=_WHERE,
            remedy="return model, [batch, …]; each batch holds the arguments of the model",
        )
    for position, value in (("third", loss), ("fourth", optimizer)):
        if value is not None and not callable(value):
            raise ConfigError(
                f"expected a function {position}, found {type(value).__name__}",
                where=_WHERE,
                remedy="return model, [batch, …], and then functions that return the loss and the optimizer",
            )
    make = (lambda model: optimizer(trained(model))) if optimizer else fused_adamw
    return Subject(model, batches, loss or loss_of_outputs, make)


def _import(name: str) -> ModuleType:
    """Return the module of a dotted name, or of a file's path.

    Raises:
        ConfigError: if the module is not found.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ConfigError("file not found", where=name, remedy="write the path of a Python file")
        sys.path.insert(0, str(path.resolve().parent))
        module = importlib.util.module_from_spec(spec)
        # Before the module runs: dataclasses look up the module in which they are defined.
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself was found; one that it imports is missing.
        if error.name is None or not name.startswith(error.name):
            raise
        raise ConfigError(
            f"module {error.name!r} not found",
            where=f"{name}, in {Path.cwd()}",
            remedy="write MODULE:FACTORY with a module of this folder, or FILE.py:FACTORY",
        ) from error
