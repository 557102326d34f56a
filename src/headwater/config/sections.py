"""What the sections under `trainer.init` and the data loaders may say, model and optimizer apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import (
    Bytes,
    Choice,
    FilePath,
    JsonSchema,
    NoEffect,
    OneOrMore,
    Reads,
    Section,
    any_case,
)
from headwater.config.data import AnyData
from headwater.core.placement import Placement
from headwater.core.precision import Precision

_Cluster = NoEffect("it tells a wafer-scale cluster how to divide its servers")
_Wafer = NoEffect("there is no wafer here to tune")


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _in_any_case(schema: JsonSchema) -> JsonSchema:
    names = schema.get("enum", [])
    return {"anyOf": [schema, {"type": "string", "pattern": any_case(names)}]}


Upper = Reads(_upper, _in_any_case)
"""Reads text in capitals."""
Tier = Literal["auto", "memory", "disk"]


class ClusterConfig(Section):
    """How many compute ranks take part; most of the rest speaks to a wafer-scale cluster.

    Attributes:
        num_csx: compute ranks.
        num_memx: store ranks, which keep masters and optimizer state and update them; with none the compute
            ranks do.
        rank_timeout_s: how long a rank waits for another before the run ends.
        max_restarts: how often `headwater fit` starts its processes on this machine again when one of them is
            gone.
        job_labels: `name=value` each, to find a job by that is submitted to the queue.
        job_priority: of a job that is submitted to the queue.
    """

    num_csx: int = Field(default=1, ge=1)
    num_memx: int = Field(default=0, ge=0)
    rank_timeout_s: float = Field(default=600.0, gt=0)
    max_restarts: int = Field(default=0, ge=0)
    num_workers_per_csx: Annotated[int | None, _Cluster] = None
    max_wgt_servers: Annotated[int | None, _Cluster] = None
    max_act_per_csx: Annotated[int | None, _Cluster] = None
    mgmt_address: Annotated[str | None, _Cluster] = None
    mgmt_namespace: Annotated[str | None, _Cluster] = None
    mount_dirs: Annotated[Any, _Cluster] = None
    python_paths: Annotated[Any, _Cluster] = None
    job_labels: Annotated[tuple[str, ...], OneOrMore] = ()
    job_priority: Literal["p1", "p2", "p3"] = "p2"


class DiskConfig(Section):
    """The disk tier: a folder and the bytes it may take there."""

    path: FilePath
    size: Bytes | None = None


class BackendConfig(Section):
    """What the run may take of the machine, and what is not left to the plan.

    Attributes:
        backend_type: `CPU`, `GPU`, or `CSX`: the best device there is.
        device_memory: bytes on the compute device; what is free where absent.
        host_memory: bytes of resident host memory; what is free where absent.
        micro_batch_size: samples computed at once.
        num_slabs: slabs that stages stream through.
        activations: what happens to the tensors that the backward needs.
        tier: where masters and optimizer state live.
        gradient_tier: where gradients wait for the update.
        masters: `split` keeps the fp32 masters of bf16 weights in 4 bytes with them, also where `whole`, with
            6 bytes and faster updates, would fit.
        compile: compile each distinct block with `torch.compile`.
        matmul: `fast` lets fp32 matrix products differ from torch's own by rounding.
        allocator: `tuned` keeps large temporaries from going back to the system.
        verify_disk: compare what is read of the disk tier with checksums of what was written.
        compile_only: do not train: write what there is to know of the model.
        validate_only: do not train: check that everything goes together.
        compile_dir: folder that is written to; `compile` in the model_dir where absent.
    """

    backend_type: Annotated[Literal["CSX", "CPU", "GPU"], Upper] = "CSX"
    cluster_config: ClusterConfig = ClusterConfig()
    device_memory: Bytes | None = None
    host_memory: Bytes | None = None
    disk: DiskConfig | None = None
    micro_batch_size: Annotated[int | None, Field(ge=1)] = None
    num_slabs: Annotated[int | None, Field(ge=1)] = None
    activations: Literal["auto", "keep", "recompute", "offload"] = "auto"
    tier: Tier = "auto"
    gradient_tier: Tier = "auto"
    masters: Literal["auto", "split"] = "auto"
    compile: bool = False
    matmul: Literal["exact", "fast"] = "exact"
    allocator: Literal["tuned", "system"] = "tuned"
    verify_disk: bool = False
    compile_only: bool = False
    validate_only: bool = False
    compile_dir: FilePath | None = None
    implicit_casts: Annotated[bool, NoEffect("products of mixed precision are cast as they need it")] = Field(
        default=False, alias="csx.debug.implicit_cast_cb16_to_fp32"
    )

    @model_validator(mode="after")
    def _disk_tier_has_a_folder(self) -> Self:
        if self.disk is None and "disk" in (self.tier, self.gradient_tier):
            raise ValueError("a tier is disk, but there is no disk: {path: …} to put it")
        return self

    @property
    def num_csx(self) -> int:
        """Compute ranks."""
        return self.cluster_config.num_csx

    @property
    def placement(self) -> Placement:
        """Compute ranks and store ranks."""
        return Placement(self.cluster_config.num_csx, self.cluster_config.num_memx)


_DynamicScale = NoEffect("the dynamic loss scale follows fixed rules")


class PrecisionConfig(Section):
    """Precision, loss scale and clipping.

    Attributes:
        enabled: mixed precision; fp32 throughout where false.
        fp16_type: dtype of wire weights and matrix products in mixed precision.
        loss_scaling_factor: used with `float16` only; bfloat16 has the range of fp32.
        max_gradient_norm: clip gradients to this global norm.
        max_gradient_value: clip each element of a gradient to this magnitude.
        log_loss_scale: show the loss scale with the loss; TensorBoard and the history have it always.
    """

    enabled: bool = True
    fp16_type: Literal["bfloat16", "float16", "cbfloat16"] = "bfloat16"
    loss_scaling_factor: Annotated[float, Field(gt=0)] | Literal["dynamic"] = 1.0
    max_gradient_norm: Annotated[float | None, Field(gt=0)] = None
    max_gradient_value: Annotated[float | None, Field(gt=0)] = None
    log_loss_scale: bool = False
    precision_opt_level: Annotated[int | None, _Wafer] = None
    initial_loss_scale: Annotated[float | None, _DynamicScale] = None
    steps_per_increase: Annotated[int | None, _DynamicScale] = None
    min_loss_scale: Annotated[float | None, _DynamicScale] = None
    max_loss_scale: Annotated[float | None, _DynamicScale] = None

    @model_validator(mode="after")
    def _one_way_to_clip(self) -> Self:
        if self.max_gradient_norm is not None and self.max_gradient_value is not None:
            raise ValueError("max_gradient_norm and max_gradient_value exclude each other")
        return self

    @property
    def precision(self) -> Precision:
        if not self.enabled:
            return Precision("fp32")
        if self.fp16_type == "float16":
            return Precision("fp16", self.loss_scaling_factor)
        return Precision("bf16")

    def notices(self) -> Iterator[tuple[str, str]]:
        yield from super().notices()
        if self.fp16_type == "cbfloat16":
            yield "fp16_type", "cbfloat16 is a format of the wafer, bfloat16 is used instead"
        if self.precision.name != "fp16" and self.loss_scaling_factor != 1.0:
            yield "loss_scaling_factor", f"{self.precision.name} needs no loss scale"


class LoopConfig(Section):
    """How long to train and when to evaluate.

    Attributes:
        max_steps: step at which training ends, counted from the first run on.
        num_steps: steps to run from where this run starts.
        num_epochs: passes over the training data. The first limit that is reached ends the run.
        steps_per_epoch: cut each pass short.
        eval_frequency: steps between evaluations, or a fraction of the run (1.0: once, at the end);
            never where 0 or null.
        eval_steps: batches of one evaluation; all there are where absent.
        grad_accum_steps: split each batch into this many micro-batches; the plan chooses where absent.
    """

    max_steps: Annotated[int | None, Field(ge=1)] = None
    num_steps: Annotated[int | None, Field(ge=1)] = None
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    steps_per_epoch: Annotated[int | None, Field(ge=1)] = None
    eval_frequency: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = 1.0
    eval_steps: Annotated[int | None, Field(ge=1)] = None
    grad_accum_steps: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.max_steps is self.num_steps is self.num_epochs is None:
            raise ValueError("expected max_steps, num_steps or num_epochs, found none of them")
        return self

    def end_step(self, start: int, steps_per_epoch: int | None = None) -> int:
        """Step at which a run that starts at `start` ends.

        Args:
            start: steps done before.
            steps_per_epoch: batches in the training data, needed with `num_epochs`.
        """
        ends = [] if self.max_steps is None else [self.max_steps]
        if self.num_steps is not None:
            ends.append(start + self.num_steps)
        if self.num_epochs is not None:
            epoch = self.steps_per_epoch or steps_per_epoch
            assert epoch is not None, "num_epochs needs the number of batches"
            ends.append(self.num_epochs * epoch)
        return min(ends)

    def eval_interval(self, end_step: int) -> int:
        """Steps between two evaluations of a run that ends at `end_step`; 0: none."""
        if not self.eval_frequency:
            return 0
        if isinstance(self.eval_frequency, int):
            return self.eval_frequency
        return max(1, round(self.eval_frequency * end_step))


class CheckpointConfig(Section):
    """When to write checkpoints and how to read them.

    Attributes:
        steps: steps between checkpoints; one at the end is always written.
        keep_n: newest checkpoints to keep; all where absent.
        autoload_last_checkpoint: continue from the newest checkpoint in `model_dir`; otherwise start over.
        disable_strict_checkpoint_loading: allow a checkpoint with missing or further parameters.
    """

    steps: Annotated[int | None, Field(ge=0)] = None
    keep_n: Annotated[int | None, Field(ge=1)] = None
    save_initial_checkpoint: bool = False
    autoload_last_checkpoint: bool = True
    disable_strict_checkpoint_loading: bool = False
    checkpoint_name: Annotated[str | None, NoEffect("checkpoints have names of their own, by step")] = None


class LoggingConfig(Section):
    """What is logged, and how often."""

    log_steps: int = Field(default=1, ge=1)
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Upper] = "INFO"
    wsc_log_level: Annotated[Any, _Cluster] = None
    enable_act_frequency: Annotated[Any, _Wafer] = None


class EmptySection(Section):
    """A section without keys: its name says it all."""


class KeepNCheckpointsConfig(Section):
    """How many of the newest checkpoints to keep."""

    n: int | None = Field(default=None, ge=1)


class LoadCheckpointStatesConfig(Section):
    """Which parts of a checkpoint to read: `all`, or for example `model`."""

    load_checkpoint_states: Annotated[tuple[str, ...], OneOrMore] = ("all",)


_Flags = Annotated[dict[str, Any] | None, _Wafer]
_Profiler = Annotated[dict[str, Any] | None, NoEffect("rates and memory are always logged")]


class CallbackConfig(Choice):
    """One callback: its name with its arguments; null leaves it out."""

    ComputeNorm: EmptySection | None = None
    KeepNCheckpoints: KeepNCheckpointsConfig | None = None
    LoadCheckpointStates: LoadCheckpointStatesConfig | None = None
    CheckLoss: Annotated[EmptySection | None, NoEffect("the loss is always checked")] = None
    RateProfiler: _Profiler = None
    DurationProfiler: _Profiler = None
    FlopUtilization: _Profiler = None
    GlobalFlags: _Flags = None
    ScopedTrainFlags: _Flags = None
    ScopedValidateFlags: _Flags = None
    DebugArgsPath: _Flags = None
    EleutherEvalHarness: Annotated[
        dict[str, Any] | None, NoEffect("export the checkpoint, and run lm-eval on it")
    ] = None


class TensorBoardLoggerConfig(Section):
    """Scalars for TensorBoard, in `summary_dir` or below `model_dir`."""

    summary_dir: FilePath | None = None


class LoggerConfig(Choice):
    """One logger: its name with its arguments; null leaves it out."""

    TensorBoardLogger: TensorBoardLoggerConfig | None = None
    ProgressLogger: Annotated[EmptySection | None, NoEffect("progress is always shown")] = None


Loaders = Annotated[tuple[AnyData, ...], OneOrMore]


class FitConfig(Section):
    """Training: its data, the data of the evaluations in between, and where to start."""

    train_dataloader: AnyData
    val_dataloader: Loaders = ()
    ckpt_path: FilePath | None = None


class ValidateConfig(Section):
    """One evaluation."""

    val_dataloader: AnyData
    ckpt_path: FilePath | None = None


class ValidateAllConfig(Section):
    """Evaluation of several checkpoints on several data sets."""

    val_dataloaders: Loaders
    ckpt_paths: Annotated[tuple[FilePath, ...], OneOrMore] | None = None
