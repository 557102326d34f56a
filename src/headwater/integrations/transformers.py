"""A Hugging Face `Trainer` that streams the weights of its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.api.backend import Backend
from headwater.api.backend import backend as make_backend
from headwater.api.compile import compile, is_compiled, streamed
from headwater.api.pretrained import load_pretrained, save_pretrained
from headwater.core.errors import ConfigError
from headwater.core.file_memory import copies_in_files
from headwater.core.precision import Precision

try:
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    from transformers import PreTrainedModel, Trainer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("accelerate", "transformers"):
        raise
    raise ConfigError(
        f"StreamedTrainer needs {error.name}", remedy="pip install 'headwater[trainers]'"
    ) from error


class StreamedTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that keeps the weights of its model in a weight store.

    Data, optimizer, schedule, evaluation, callbacks and logs are those of `Trainer`. Both classes can resume
    each other's checkpoints. This class never holds all weights or the whole optimizer state in memory.

    Before a subclass of `Trainer`, such as a trainer of TRL, it streams the weights of that trainer:
    `class StreamedDPO(StreamedTrainer, DPOTrainer): pass`. Further models that the trainer prepares, such as
    a reference model, are streamed too.

    Args:
        *args: arguments of `Trainer`.
        backend: a backend made by `headwater.backend`, or its name. The model is compiled for it, unless it
            is already compiled.
        **kwargs: keyword arguments of `Trainer`.

    Raises:
        ConfigError: if a training argument is not supported with streaming, or selects another device.
    """

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
        """Stream `model` and prepare it as the accelerator does, but never move it to the device."""
        self._stream(model)
        return prepare(model, device_placement=False, evaluation_mode=evaluation_mode)

    def _refuse_what_is_not_streamed(self) -> None:
        args, device = self.args, self._backend.torch_device.type
        refused = [
            (
                args.n_gpu > 1 or self.accelerator.distributed_type != DistributedType.NO,
                "the Trainer would distribute the model over several devices or processes",
                "run one process without a launcher, and show it one GPU with CUDA_VISIBLE_DEVICES",
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

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self._streams_checkpoints:
            super()._save(output_dir, state_dict)
            return
        super()._save(output_dir, {})  # saves everything except the weights
        save_pretrained(self.model, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._streams_checkpoints:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        load_pretrained(self.model, resume_from_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with copies_in_files(Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with torch.utils.serialization.config.patch({"load.mmap": True}):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)
