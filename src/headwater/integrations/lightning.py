"""A Lightning `Strategy` that streams the weights of an unchanged `LightningModule`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed import ReduceOp

from headwater.api.backend import Backend
from headwater.api.backend import backend as make_backend
from headwater.api.compile import compile, is_compiled
from headwater.api.ranks import note_part
from headwater.core.errors import ConfigError
from headwater.core.file_memory import copies_in_files
from headwater.core.files import sync_file
from headwater.core.module_calls import Layer, surround
from headwater.core.scratch import scratch_folder
from headwater.core.units import counted
from headwater.fabric.fabric import Fabric
from headwater.fabric.membership import current

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import ParallelStrategy
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lightning":
        raise
    raise ConfigError(
        "StreamedStrategy needs lightning", remedy="pip install 'headwater[trainers]'"
    ) from error


class StreamedStrategy(ParallelStrategy):
    """A Lightning strategy that streams weights from a weight store. Each rank trains on one device.

    Each module that `training_step` (or another step) calls is compiled for the backend at its first call:
    the `LightningModule` itself if the step calls `self(...)`, otherwise the parts that it calls, such as
    `self.model`, or the generator and the discriminator. Each compiled module has a separate plan and weight
    store. Modules that no step calls, and copies of the module, are not streamed. After training the module
    stays streamed; `headwater.release` of a compiled part ends that.

    With a backend of several ranks (`num_csx`), each rank computes its part of the data, as in Lightning's
    `DDPStrategy`.

    Args:
        backend: a backend made by `headwater.backend`, or its name.
        accelerator: as in other strategies.
        checkpoint_io: as in other strategies; by default the one of the Trainer, or else `FileCheckpointIO`.
        precision_plugin: as in other strategies.
        **options: options of `headwater.backend`, if the backend is passed by name.

    Raises:
        ConfigError: if the backend or an option is unknown, or options are passed with an existing backend.
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
                f"option {min(options)!r} cannot be set on an existing backend",
                where="StreamedStrategy",
                remedy="pass the options to headwater.backend, or pass the backend by name",
            )
        self._backend = make_backend(backend, **options) if isinstance(backend, str) else backend
        super().__init__(accelerator, [self._backend.torch_device], None, checkpoint_io, precision_plugin)
        self._fabric = current()
        # Modules that were not called yet, each with a function that removes the hook on its first call.
        self._waiting: dict[nn.Module, Callable[[], None]] = {}
        self._streamed: set[nn.Parameter] = set()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._backend.torch_device

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self._fabric.rank

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self._fabric.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._fabric.size

    @property
    def is_distributed(self) -> bool:
        """True if the Trainer divides the data among ranks."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments of the sampler that divides the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device as Lightning does."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self.is_distributed:
            note_part(moved)  # the sampler has divided the data among the ranks
        return moved

    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over the ranks. Other objects stay as they are."""
        is_tensor = isinstance(tensor, torch.Tensor)
        return _sync_ddp_if_available(tensor, group, reduce_op) if is_tensor else tensor

    def barrier(self, name: str | None = None) -> None:
        """Block until every rank has called this."""
        self._fabric.barrier(name or "Lightning's Trainer")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks."""
        objects = [obj]
        if self.is_distributed:
            torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()

    def setup(self, trainer: Trainer) -> None:
        """Set up the module as Lightning does.

        Raises:
            ConfigError: if the Trainer was asked for another number of devices or nodes than the backend has.
        """
        _refuse_other_ranks(trainer, self._fabric)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Keep the weights on the host, and add hooks that compile each module at its first call."""
        assert self.model is not None, "Lightning calls connect first"
        if self._backend.kind != "CSX":
            self.model.to(self.root_device)
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
        """Return a hook that compiles the module at its first call, unless its parent is compiled."""

        def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._streamed.isdisjoint(module.parameters()):
                self._bring_own(module)  # part of a streamed module, or shares weights with one
                return call(*args, **kwargs)
            compile(module, self._backend)
            self._take(module)
            return module(*args, **kwargs)  # not `call`: it would bypass the hooks that `compile` has added

        return layer

    def _take(self, module: nn.Module) -> None:
        """Record that a module is streamed, and remove the hooks on its parts."""
        self._streamed.update(module.parameters())
        for part in module.modules():
            if part in self._waiting:
                self._waiting.pop(part)()

    def _bring_own(self, module: nn.Module) -> None:
        """Move the module's own buffers, and its own parameters that are not streamed, to the device."""
        params = [param for param in module.parameters(recurse=False) if param not in self._streamed]
        for tensor in (*params, *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context in which a model is built in host memory, or in files on the backend's disk."""
        with super().tensor_init_context(empty_init), torch.device("cpu"), self._backend.device:
            yield

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states without moving them to the device: parameters are on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End the strategy as Lightning does, but do not move the weights: they are on the host already."""
        if self._backend.kind != "CSX":
            super().teardown()
            return
        for end_wait in self._waiting.values():
            end_wait()
        self._waiting.clear()
        self._streamed.clear()
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "Lightning sets an accelerator on every strategy"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _refuse_other_ranks(trainer: Trainer, fabric: Fabric) -> None:
    """Raise if the Trainer was asked for several devices or nodes that are not those of the backend."""
    flags = trainer._accelerator_connector  # Lightning passes `devices` to its own strategies only
    devices, num_nodes = flags._devices_flag, flags._num_nodes_flag
    num_devices = len(devices) if isinstance(devices, list) else devices
    # Without `devices`, Lightning counts the devices of the machine.
    asked_for_devices = num_devices not in (1, trainer.accelerator.auto_device_count())
    ranks, hosts = fabric.local_size, fabric.num_hosts
    what = None
    if asked_for_devices and num_devices != ranks:
        what = f"devices={num_devices}, but the backend has {counted(ranks, 'rank', 'ranks')} on this host"
    elif num_nodes not in (1, hosts):
        what = f"num_nodes={num_nodes}, but the backend has {counted(hosts, 'host', 'hosts')}"
    if what is not None:
        raise ConfigError(
            what,
            where="lightning.pytorch.Trainer",
            remedy="leave devices and num_nodes out, and write StreamedStrategy(num_csx=N) for N ranks; "
            "docs/several_hosts.md shows how to start ranks on several hosts",
        )


class FileCheckpointIO(TorchCheckpointIO):
    """A checkpoint plugin for local files that never holds a whole checkpoint in memory."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; the file appears when it is complete.

        Args:
            checkpoint: its content; tensors may be lazy.
            path: the file. A remote path is left to Lightning.
            storage_options: options of a remote file system; if they are given, Lightning writes the file.
        """
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The next save removes what a killed one has left there.
        with copies_in_files(path.parent), scratch_folder(path.parent, ".saving-") as folder:
            unfinished = folder / path.name
            torch.save(checkpoint, unfinished)
            sync_file(unfinished)
            unfinished.replace(path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the content of a checkpoint; its tensors are memory-mapped.

        Args:
            path: the file. A remote path is left to Lightning.
            map_location: as for `torch.load`.
            weights_only: as for `torch.load`.
        """
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
        return checkpoint


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
