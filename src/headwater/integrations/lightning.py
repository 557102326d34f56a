"""A Lightning `Strategy` that streams the weights of an unchanged `LightningModule`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.api.backend import Backend
from headwater.api.backend import backend as make_backend
from headwater.api.building import BuildInFiles
from headwater.api.compile import compile, is_compiled
from headwater.core.errors import ConfigError
from headwater.core.module_calls import Layer, surround

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import LightningModule
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ConfigError(
        "StreamedStrategy needs lightning", remedy="pip install 'headwater[trainers]'"
    ) from error


class StreamedStrategy(SingleDeviceStrategy):
    """Weights live in a weight store; everything else is Lightning on one device.

    Each module that `training_step` (or another step) calls is compiled for the backend at its first call:
    the `LightningModule` itself if the step calls `self(...)`, otherwise the parts that it calls, such as
    `self.model`, or the generator and the discriminator. Each has a plan and a weight store of its own.
    What no step calls is not streamed, nor is a copy of the module. After training the module stays streamed;
    `headwater.release` of a compiled part ends that.

    Args:
        backend: what `headwater.backend` gave, or its name.
        accelerator: as in other strategies.
        checkpoint_io: as in other strategies; `FileCheckpointIO` if none is given here or to the Trainer.
        precision_plugin: as in other strategies.
        **options: of `headwater.backend`, if the backend is given by name.

    Raises:
        ConfigError: if there is no such backend or option.
    """

    strategy_name = "streamed"

    def __init__(
        self,
        backend: Backend | str = "CSX",
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        if isinstance(backend, Backend) and options:
            raise ConfigError(
                f"a backend that is made already takes no option {min(options)!r}",
                where="StreamedStrategy",
                remedy="give the options to headwater.backend",
            )
        self._backend = make_backend(backend, **options) if isinstance(backend, str) else backend
        super().__init__(self._backend.torch_device, accelerator, checkpoint_io, precision_plugin)
        self._waiting: dict[nn.Module, Callable[[], None]] = {}  # for a first call; ends the wait
        self._streamed: set[nn.Parameter] = set()

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()

    def model_to_device(self) -> None:
        """Leave the weights on the host, and wait for the steps to call modules."""
        assert self.model is not None, "Lightning connects the model first"
        if self._backend.kind != "CSX":
            super().model_to_device()
            return
        for module in self.model.modules():
            if any(True for _ in module.parameters()):
                self._waiting[module] = surround(module, self._at_first_call_of(module))
            else:
                self._bring_own(module)
        for module in self.model.modules():
            if is_compiled(module):
                self._take(module)
        self._bring_own(self.model)

    def _at_first_call_of(self, module: nn.Module) -> Layer:
        """Return a layer that compiles the module unless a module around it is compiled."""

        def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._streamed.isdisjoint(module.parameters()):
                self._bring_own(module)  # a part of what is streamed, or one that shares weights with it
                return call(*args, **kwargs)
            compile(module, self._backend)
            self._take(module)
            return module(*args, **kwargs)  # this call began outside of the layers that it has now

        return layer

    def _take(self, module: nn.Module) -> None:
        """Note that a module is streamed with all its parts."""
        self._streamed.update(module.parameters())
        for part in module.modules():
            if part in self._waiting:
                self._waiting.pop(part)()

    def _bring_own(self, module: nn.Module) -> None:
        """Bring to the device what the module holds itself and nothing streams."""
        params = [param for param in module.parameters(recurse=False) if param not in self._streamed]
        for tensor in (*params, *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Within it the model is built: on the host, or in files on the backend's disk."""
        with super().tensor_init_context(empty_init), torch.device("cpu"), self._backend.device:
            yield

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load it to where the parameters are: on the host, until they are streamed."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """What other strategies do, but for moving weights to the host: there they are."""
        if self._backend.kind != "CSX":
            super().teardown()
            return
        for end_wait in self._waiting.values():
            end_wait()
        self._waiting.clear()
        self._streamed.clear()
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "Lightning gives every strategy one"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints in local files, written and read without being whole in memory."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; it has its name when it is complete."""
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".partial")
        try:
            with BuildInFiles(path.parent):  # the tensors that `torch.save` makes of lazy ones
                torch.save(checkpoint, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; its tensors are mapped into memory."""
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
        return checkpoint


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
