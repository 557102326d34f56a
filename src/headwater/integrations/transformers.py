"""A Hugging Face `Trainer` that streams the weights of its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.serialization.config
from torch import nn

from headwater.api.backend import Backend
from headwater.api.backend import backend as make_backend
from headwater.api.compile import compile, is_compiled, streamed
from headwater.api.pretrained import load_pretrained, save_pretrained
from headwater.api.ranks import note_part
from headwater.core.errors import ConfigError
from headwater.core.file_memory import copies_in_files
from headwater.core.precision import Precision
from headwater.core.units import counted
from headwater.fabric.membership import current
from headwater.integrations.staged_checkpoint import staged_checkpoint

try:
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    from transformers import PreTrainedModel, Trainer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("accelerate", "transformers"):
        raise
    raise ConfigError(
        f"StreamedTrainer needs {error.name}", remedy="pip install 'headwater[trainers]'"
    ) from error


_DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""The ways in which each process has the whole model."""


class StreamedTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that keeps the weights of its model in a weight store.

    Data, optimizer, schedule, evaluation, callbacks and logs are those of `Trainer`. Both classes can resume
    each other's checkpoints. This class never holds all weights or the whole optimizer state in memory.

    With a backend of several ranks (`num_csx`), each rank computes the batches that `Trainer` gives it.

    Before a subclass of `Trainer`, such as a trainer of TRL, it streams the weights of that trainer:
    `class StreamedDPO(StreamedTrainer, DPOTrainer): pass`. Further models that the trainer prepares, such as
    a reference model, are streamed too.

    Args:
        *args: arguments of `Trainer`.
        backend: a backend made by `headwater.backend`, or its name. The model is compiled for it, unless it
            is already compiled.
        **kwargs: keyword arguments of `Trainer`.

    Raises:
        ConfigError: if a training argument is not supported with streaming, or selects another device, or if
            the Trainer has another number of processes than the backend has ranks.
    """

    _staging: str | None = None
    """The folder in which a checkpoint is being saved."""

    def __init__(self, *args: Any, backend: Backend | str = "CSX", **kwargs: Any) -> None:
        self._backend = make_backend(backend) if isinstance(backend, str) else backend
        super().__init__(*args, **kwargs)
        self._stream(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator so that it streams models instead of moving them; batches are still moved.

        `Trainer` calls this in its `__init__`, before a subclass loads further models.
        """
        super().create_accelerator_and_postprocess()
        if self._backend.kind == "CSX":
            self._refuse_what_is_not_streamed()
            self.accelerator.device_placement = False
            self.accelerator.prepare_model = partial(self._prepare_streamed, self.accelerator.prepare_model)

    def _prepare_streamed(
        self,
        prepare: Callable[..., nn.Module],
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Stream `model` and prepare it as the accelerator does, but do not move or wrap it."""
        self._stream(model)
        # With several ranks the accelerator would wrap a trained model to average gradients, but the store
        # averages them. It does not wrap a model that is only evaluated.
        return prepare(model, device_placement=False, evaluation_mode=True)

    def _refuse_what_is_not_streamed(self) -> None:
        args, device = self.args, self._backend.torch_device.type
        processes, ranks = self.accelerator.num_processes, current().size
        refused = [
            (
                processes != ranks,
                f"the Trainer has {counted(processes, 'process', 'processes')}, but the backend "
                f"{counted(ranks, 'rank', 'ranks')}",
                f"write headwater.backend(..., num_csx={processes}) before TrainingArguments(...)",
            ),
            (
                args.n_gpu > 1 or self.accelerator.distributed_type not in _DATA_PARALLEL,
                "the Trainer would distribute the model over several devices",
                "write headwater.backend(..., num_csx=N) for N processes, each with one GPU; or show this "
                "process one GPU with CUDA_VISIBLE_DEVICES",
            ),
            (
                args.save_on_each_node and current().num_hosts > 1,
                "save_on_each_node is not supported, because only rank 0 writes checkpoints",
                "save in a folder that all hosts share",
            ),
            (
                args.device.type != device,
                f"the Trainer computes on {args.device.type}, but the backend on {device}",
                f"set use_cpu={device == 'cpu'}",
            ),
            (
                args.torch_compile,
                "torch_compile is not supported, because it wraps the model",
                "use headwater.backend(compile=True)",
            ),
            (
                args.bf16_full_eval or args.fp16_full_eval,
                "bf16_full_eval and fp16_full_eval would round the weights in the store",
                "set bf16=True or fp16=True, which also apply to evaluation",
            ),
        ]
        for is_asked_for, what, remedy in refused:
            if is_asked_for:
                raise ConfigError(what, where="TrainingArguments", remedy=remedy)

    def _stream(self, model: nn.Module) -> None:
        if not is_compiled(model):
            compile(model, self._backend)
        stream = streamed(model)
        if stream is not None:  # Accelerate enters autocast inside forward, after the stream has begun
            # It does not do so for fp16 on a CPU, whatever `mixed_precision` says.
            has_autocast = self.accelerator.native_amp
            stream.precision = Precision(self.accelerator.mixed_precision if has_autocast else "fp32")

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        if current().size > 1:
            note_part(prepared)  # the accelerator has divided the data among the ranks
        return prepared

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Stream the model, instead of moving it to the device as `Trainer` does."""
        self._stream(model)

    @property
    def _streams_checkpoints(self) -> bool:
        """True if checkpoints hold the whole streamed model; those of adapters are small and not streamed."""
        whole = isinstance(self.model, PreTrainedModel) and not getattr(
            self.model, "_hf_peft_config_loaded", False
        )
        return whole and streamed(self.model) is not None

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder of the run's checkpoints, or the one in which a checkpoint is being saved."""
        return self._staging or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint whose folder gets its name when it is complete.

        A kill would otherwise leave an incomplete `checkpoint-N`, from which the next run would resume.
        """
        if self._backend.kind != "CSX":
            super()._save_checkpoint(model, trial)
            return
        run_folder, name = self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"
        with staged_checkpoint(Path(run_folder), name) as staging:
            self._staging = str(staging)
            self._move_best(run_folder, self._staging)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._move_best(self._staging, run_folder)
                self._staging = None
            if self.args.should_save and (staging / name).is_dir():
                # Again: `Trainer` has written the path of the best checkpoint in the staging folder.
                self.state.save_to_json(str(staging / name / "trainer_state.json"))
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(Path(run_folder) / name))

    def _move_best(self, source: str, target: str) -> None:
        """Change the folder in the recorded path of the best checkpoint, if it is in `source`."""
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == Path(source):
            self.state.best_model_checkpoint = str(Path(target) / Path(best).name)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint as `Trainer` does, but only after its folder has its name."""
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self._streams_checkpoints:
            super()._save(output_dir, state_dict)
            return
        super()._save(output_dir, {})  # saves everything except the weights
        save_pretrained(self.model, output_dir or self.args.output_dir)  # on rank 0; all ranks wait

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._streams_checkpoints:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_pretrained(self.model, resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and streamed(self.model) is not None:
            self.optimizer.state_dict()  # which all ranks must call, and `Trainer` calls on rank 0
        with copies_in_files(Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with torch.utils.serialization.config.patch({"load.mmap": True}):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)
