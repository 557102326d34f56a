"""The schema of the sections of `trainer`, except model, optimizer, schedulers and data."""

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
    SectionError,
    any_case,
)
from headwater.config.bigcode import BigCodeEvalHarnessConfig
from headwater.config.data import AnyData
from headwater.config.harness import EleutherEvalHarnessConfig
from headwater.core.arithmetic import Kernels, Matmul
from headwater.core.attention import AttentionKernel
from headwater.core.errors import ConfigError
from headwater.core.kernels import choose_kernels
from headwater.core.placement import Placement
from headwater.core.precision import Precision

_Cluster = NoEffect("it only configures the servers of a Cerebras cluster")
_Wafer = NoEffect("it only configures the hardware of a Cerebras system")


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _in_any_case(schema: JsonSchema) -> JsonSchema:
    names = schema.get("enum", [])
    return {"anyOf": [schema, {"type": "string", "pattern": any_case(names)}]}


Upper = Reads(_upper, _in_any_case)
"""Converts text to upper case."""
Tier = Literal["auto", "memory", "disk"]


class ClusterConfig(Section):
    """The ranks of the run, and its job in the queue. Keys for a Cerebras cluster have no effect.

    Attributes:
        num_csx: number of compute ranks.
        num_memx: number of store ranks, which hold and update masters and optimizer state; with 0 the compute
            ranks hold and update them.
        rank_timeout_s: seconds that a rank waits for another rank before the run fails.
        num_workers_per_csx: number of input workers that each compute rank uses at the same time, if a data
            loader names `input_workers`. If absent, the workers are divided among the ranks.
        max_restarts: number of times that `headwater fit` restarts its processes on this machine after one of
            them has died.
        job_labels: labels `name=value` of a job that is submitted to the queue.
        job_priority: priority of a job that is submitted to the queue.
        mgmt_address: `ssh://[user@]host[:port][/path]` submits `headwater fit` to the queue of that machine,
            as `--appliance` does. Other addresses have no effect.
        mount_dirs: folders that an appliance mounts at the same path, so that files in them are not sent.
        python_paths: folders with code that is sent to an appliance, and from which the run imports modules.
    """

    num_csx: int = Field(default=1, ge=1)
    num_memx: int = Field(default=0, ge=0)
    rank_timeout_s: float = Field(default=600.0, gt=0)
    max_restarts: int = Field(default=0, ge=0)
    num_workers_per_csx: Annotated[int | None, Field(ge=1)] = None
    max_wgt_servers: Annotated[int | None, _Cluster] = None
    max_act_per_csx: Annotated[int | None, _Cluster] = None
    mgmt_address: str | None = None
    mgmt_namespace: Annotated[str | None, _Cluster] = None
    mount_dirs: Annotated[tuple[FilePath, ...] | None, OneOrMore] = None
    python_paths: Annotated[tuple[FilePath, ...] | None, OneOrMore] = None
    job_labels: Annotated[tuple[str, ...], OneOrMore] = ()
    job_priority: Literal["p1", "p2", "p3"] = "p2"

    def notices(self) -> Iterator[tuple[str, str]]:
        yield from super().notices()
        if self.mgmt_address is not None and not self.mgmt_address.startswith("ssh://"):
            yield "mgmt_address", "it is not an address ssh://host of an appliance"


class DiskConfig(Section):
    """The disk tier: its folder, and the bytes that it may use.

    Attributes:
        path: folder of the files; it is created if missing.
        size: largest number of bytes that the files may take; 90 % of the free space if absent.
    """

    path: FilePath
    size: Bytes | None = None


class BackendConfig(Section):
    """The resource limits of the run, and settings that the plan chooses if they are absent.

    Attributes:
        backend_type: `CPU`, `GPU`, or `CSX` for the best available device.
        device_memory: limit of the memory on the GPU; 94 % of the free memory if absent.
        host_memory: limit of the resident host memory; if absent, the memory that the process has already,
            plus 90 % of the free memory.
        micro_batch_size: number of samples that are computed together.
        num_slabs: number of slabs: buffers on the device, each for the weights of one stage.
        activations: keep, recompute or offload the tensors that backward needs. `selective` recomputes only
            values of cheap operators: normalizations, activation functions, casts.
        tier: storage of weights, masters (their fp32 values) and optimizer state; `auto` may put some stages
            in memory and the others on disk.
        stages_in_memory: with `tier: disk`, number of stages that stay in host memory; at least one other
            stage is on disk. With `tier: auto` the plan chooses the number.
        stages_on_device: number of stages that are stored in the memory of the GPU and updated there: all
            stages if the model has fewer. If absent, the plan chooses it. All ranks must be on one host.
        gradient_tier: storage of gradients that wait for the update.
        optimizer_state: `bf16` stores optimizer state in half the bytes; it is rounded stochastically, so the
            run is not exact.
        updates: `on_fetch` updates a stage before its next use. `in_backward` updates a stage as soon as the
            backward does not need it any more, so that its gradients are freed early. If a step then fails
            after its first update, it cannot be undone, and the run continues from its last checkpoint.
        compile: compile each distinct block with `torch.compile`. Results then differ from torch's in
            rounding. `auto` measures compiled and eager blocks before a 16-bit training, and compiles if that
            saves time.
        matmul: `exact` multiplies matrices by torch's kernels. `auto` does the same in fp32 and in your own
            loop. In other runs, if a CPU has no instructions for bf16 or fp16, `auto` multiplies these by
            fp32 kernels, which are several times as fast; results differ in rounding. `fast` does that in
            your own loop too, and allows products in fp32 that differ from torch's in rounding. In sparse
            training on a CPU, `fast` leaves masked weights out of the products of linear layers.
        loss: `liger` computes the loss of a decoder by the package liger-kernel, on a CUDA device. `chunked`
            needs no package. Neither of them has the logits of the whole batch in memory.
        attention: `torch` computes all attention by torch's kernels. `auto` lets models of params files use
            the package's kernel for attention in bf16 on processors with AVX-512 and without AMX, if it has
            no dropout and no mask except that of padding. Its results differ from torch's in rounding.
        skip_padding: do not compute the positions at the end of a micro-batch that are padding in all its
            samples. Samples of similar lengths are computed together. Results differ in rounding, and dropout
            draws other values.
        allocator: `tuned` keeps the memory of large CPU tensors for later ones; `system` leaves torch's
            allocator as it is.
        verify_disk: check data read from the disk tier against checksums.
        compile_only: do not train; write the plan, the graphs and a report of operators.
        validate_only: do not train; check that model, loss, optimizer and the shapes of a batch fit together.
        compile_dir: folder for the output of `compile_only`; `compile` in the model_dir if absent.
    """

    backend_type: Annotated[Literal["CSX", "CPU", "GPU"], Upper] = "CSX"
    cluster_config: ClusterConfig = ClusterConfig()
    device_memory: Bytes | None = None
    host_memory: Bytes | None = None
    disk: DiskConfig | None = None
    micro_batch_size: Annotated[int | None, Field(ge=1)] = None
    num_slabs: Annotated[int | None, Field(ge=1)] = None
    activations: Literal["auto", "keep", "selective", "recompute", "offload"] = "auto"
    tier: Tier = "auto"
    stages_in_memory: Annotated[int | None, Field(ge=0)] = None
    stages_on_device: Annotated[int | None, Field(ge=0)] = None
    gradient_tier: Tier = "auto"
    optimizer_state: Literal["exact", "bf16"] = "exact"
    updates: Literal["on_fetch", "in_backward"] = "on_fetch"
    compile: bool | Literal["auto"] = False
    matmul: Matmul = "auto"
    loss: Literal["chunked", "liger"] = "chunked"
    attention: AttentionKernel = "auto"
    skip_padding: bool = False
    allocator: Literal["tuned", "system"] = "tuned"
    verify_disk: bool = False
    compile_only: bool = False
    validate_only: bool = False
    compile_dir: FilePath | None = None
    implicit_casts: Annotated[bool, NoEffect("operands in mixed precision are always cast as needed")] = (
        Field(default=False, alias="csx.debug.implicit_cast_cb16_to_fp32")
    )

    @model_validator(mode="after")
    def _disk_tier_has_a_folder(self) -> Self:
        if self.stages_in_memory is not None and self.tier != "disk":
            raise SectionError(
                f"stages_in_memory needs tier: disk, found tier: {self.tier}",
                "set tier: disk, or leave stages_in_memory out",
            )
        if self.disk is None and "disk" in (self.tier, self.gradient_tier):
            key = "tier" if self.tier == "disk" else "gradient_tier"
            raise SectionError(
                f"{key} is disk, but no disk folder is given",
                "name a folder: disk: {path: FOLDER} in a params file, --disk FOLDER on a command line, "
                "disk=FOLDER in headwater.backend",
            )
        return self

    @model_validator(mode="after")
    def _shapes_do_not_change(self) -> Self:
        if self.skip_padding and self.compile:
            # A compiled block is compiled again for other shapes, and torch gives up after a few of them.
            raise ValueError("skip_padding changes the shapes of batches, and cannot be used with compile")
        return self

    def refuse_loss(self, where: str) -> None:
        """Raise `ConfigError` if `loss` is set in a script: there the user's model computes the loss."""
        if self.loss != "chunked":
            raise ConfigError(
                f"loss: {self.loss} is only for models of params files",
                where=where,
                remedy="leave loss out; a model of your own can call the kernel itself",
            )

    def refuse_padding(self, where: str) -> None:
        """Raise `ConfigError` if `skip_padding` is set in a script: Headwater does not know its padding."""
        if self.skip_padding:
            raise ConfigError(
                "skip_padding is only for models of params files",
                where=where,
                remedy="leave skip_padding out, and let the data loader cut off the padding of each batch",
            )

    def refuse_updates(self, where: str) -> None:
        """Raise `ConfigError` if `updates` is `in_backward` in a script: its loop may need the gradients."""
        if self.updates != "on_fetch":
            raise ConfigError(
                f"updates: {self.updates} is only for runs of params files",
                where=where,
                remedy="leave updates out; in your own loop a step begins when optimizer.step() is called",
            )

    @property
    def num_csx(self) -> int:
        """Number of compute ranks."""
        return self.cluster_config.num_csx

    @property
    def placement(self) -> Placement:
        """Numbers of compute ranks and store ranks."""
        return Placement(self.cluster_config.num_csx, self.cluster_config.num_memx)

    def kernels(self, precision: Precision, device: str, *, own_loop: bool = False) -> Kernels:
        """Return the kernels of matrix products; see `choose_kernels`."""
        return choose_kernels(self.matmul, precision, device, own_loop=own_loop)


_DynamicScale = NoEffect("the rules of the dynamic loss scale are fixed")


class PrecisionConfig(Section):
    """Precision, loss scale and gradient clipping.

    Attributes:
        enabled: true for mixed precision, false for fp32.
        fp16_type: dtype of the weights on the device, and of matrix products, in mixed precision.
        loss_scaling_factor: loss scale, a number or `dynamic`; only used with `float16`, because bfloat16 has
            the range of fp32.
        max_gradient_norm: clip gradients to this global norm.
        max_gradient_value: clip each element of a gradient to this magnitude.
        log_loss_scale: print the loss scale with the loss. TensorBoard and the history always contain it.
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
            raise ValueError("max_gradient_norm and max_gradient_value cannot be used together")
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
            yield "fp16_type", "only Cerebras hardware has cbfloat16, bfloat16 is used instead"
        if self.precision.name != "fp16" and self.loss_scaling_factor != 1.0:
            yield "loss_scaling_factor", f"{self.precision.name} does not need a loss scale"


class LoopConfig(Section):
    """The length of the training and its evaluations. The run ends at the first limit that is reached.

    Attributes:
        max_steps: step at which training ends, counted over all resumed runs.
        num_steps: number of steps to train now.
        num_epochs: number of passes over the training data.
        steps_per_epoch: steps after which a pass ends early.
        eval_frequency: steps between evaluations (an integer), or a fraction of the run (1.0: once at the
            end); 0 or null for no evaluations.
        eval_steps: batches of one evaluation; all batches if absent.
        grad_accum_steps: number of micro-batches of a batch; chosen by the plan if absent.
    """

    max_steps: Annotated[int | None, Field(ge=1)] = None
    num_steps: Annotated[int | None, Field(ge=1)] = None
    num_epochs: Annotated[int | None, Field(ge=1)] = None
    steps_per_epoch: Annotated[int | None, Field(ge=1)] = None
    # Two types: 1 is every step, and 1.0 is once at the end.
    eval_frequency: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] | None = 1.0
    eval_steps: Annotated[int | None, Field(ge=1)] = None
    grad_accum_steps: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if self.max_steps is self.num_steps is self.num_epochs is None:
            raise SectionError(
                "expected max_steps, num_steps or num_epochs, found none of them", "add max_steps: 1000"
            )
        return self

    def end_step(self, start: int, steps_per_epoch: int | None = None) -> int:
        """Return the step at which a run ends.

        Args:
            start: step at which the run starts.
            steps_per_epoch: number of batches of the training data; needed with `num_epochs`.
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
        """Return the steps between evaluations of a run that ends at `end_step`; 0 for no evaluations."""
        if not self.eval_frequency:
            return 0
        if isinstance(self.eval_frequency, int):
            return self.eval_frequency
        return max(1, round(self.eval_frequency * end_step))


class CheckpointConfig(Section):
    """The writing and loading of checkpoints.

    Attributes:
        steps: steps between checkpoints. A checkpoint at the end of the run is always written.
        keep_n: number of newest checkpoints to keep; all if absent.
        save_initial_checkpoint: write a checkpoint before the first step.
        autoload_last_checkpoint: resume from the newest checkpoint in `model_dir`; false to start over.
        disable_strict_checkpoint_loading: accept a checkpoint with missing or additional parameters.
    """

    steps: Annotated[int | None, Field(ge=0)] = None
    keep_n: Annotated[int | None, Field(ge=1)] = None
    save_initial_checkpoint: bool = False
    autoload_last_checkpoint: bool = True
    disable_strict_checkpoint_loading: bool = False
    checkpoint_name: Annotated[str | None, NoEffect("checkpoints are named by their step")] = None


class LoggingConfig(Section):
    """The frequency and the level of log messages.

    Attributes:
        log_steps: steps between records in TensorBoard, and between lines if the output is not a terminal.
        log_level: lowest level of messages to show; `WARNING` and `ERROR` hide the plan and the progress.
    """

    log_steps: int = Field(default=1, ge=1)
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Upper] = "INFO"
    wsc_log_level: Annotated[Any, _Cluster] = None
    enable_act_frequency: Annotated[Any, _Wafer] = None


class EmptySection(Section):
    """A section without keys."""


class KeepNCheckpointsConfig(Section):
    """The number of newest checkpoints to keep.

    Attributes:
        n: number of checkpoints; all if absent.
    """

    n: int | None = Field(default=None, ge=1)


class LoadCheckpointStatesConfig(Section):
    """The parts of a checkpoint to load: `all`, or a list such as `[model]`.

    Attributes:
        load_checkpoint_states: `all`, or `model` for the weights without optimizer state, step and data.
    """

    load_checkpoint_states: Annotated[tuple[str, ...], OneOrMore] = ("all",)


class OpProfilerConfig(Section):
    """A profile of some steps: the time of each module, forward and backward, and of all other work.

    Attributes:
        start_step: first profiled step, from 1.
        end_step: last profiled step.
        depth: number of module levels below a block that get separate rows, such as its attention; 0 for one
            row for each block.
        operators: list the operators inside each module too, by `torch.profiler`, which slows these steps.
    """

    start_step: int = Field(ge=1)
    end_step: int = Field(ge=1)
    depth: int = Field(default=1, ge=0)
    operators: bool = False

    @model_validator(mode="after")
    def _starts_before_its_end(self) -> Self:
        if self.start_step > self.end_step:
            raise ValueError(
                f"expected start_step at most end_step, got start_step {self.start_step} and end_step "
                f"{self.end_step}"
            )
        return self


class NotificationConfig(Section):
    """A message at the end of the training, to a URL or to a command.

    Attributes:
        url: URL that gets the message as JSON by HTTP POST.
        command: program with its arguments, which reads the message from its input.
    """

    url: Annotated[str | None, Field(pattern="^https?://")] = None
    command: Annotated[tuple[str, ...], OneOrMore] = ()

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.url and self.command:
            raise ValueError("expected url or command, got both")
        return self


class EmailConfig(NotificationConfig):
    """An e-mail at the end of the training, sent by a mail server, a service with a URL or a command.

    Attributes:
        mailto: addresses of the recipients.
        mailfrom: address of the sender, for a mail server. If it is missing, the environment variable
            CEREBRAS_NOTIFICATION_MAILFROM is used. The password is in CEREBRAS_NOTIFICATION_PASSWORD.
        server_name: host of the mail server.
        port: port of the mail server: 465 for TLS from the start; otherwise STARTTLS is used if the server
            offers it.
        subject: subject of the e-mail.
        url: URL that gets `{"mailto", "subject", "body"}` by HTTP POST. If it is missing, the environment
            variable CEREBRAS_NOTIFICATION_ENDPOINT is used.
    """

    mailto: Annotated[tuple[str, ...], OneOrMore, Field(min_length=1)]
    mailfrom: str | None = None
    server_name: str = "smtp.office365.com"
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    subject: str = "Headwater notification"
    url: Annotated[str | None, Field(pattern="^https?://")] = Field(
        default=None, alias="notification_endpoint"
    )

    @model_validator(mode="after")
    def _one_sender(self) -> Self:
        if self.mailfrom and (self.url or self.command):
            raise ValueError("expected mailfrom, notification_endpoint or command, got several")
        return self


class SlackConfig(NotificationConfig):
    """Messages to channels of Slack at the end of the training.

    Attributes:
        channels: channels or users; each gets a message.
        url: URL that gets `{"channel", "text"}`, as an incoming webhook of Slack does. If it is missing, the
            environment variable HEADWATER_SLACK_URL is used.
    """

    channels: Annotated[tuple[str, ...], OneOrMore, Field(min_length=1)]


_Flags = Annotated[dict[str, Any] | None, _Wafer]


class CallbackConfig(Choice):
    """A callback: its name with its arguments; null disables it.

    Attributes:
        ComputeNorm: log the norm of the weights at each evaluation.
        RateProfiler: log samples, tokens and steps per second.
        FlopUtilization: log the model's FLOP/s in percent of the FLOP/s of large matrix products.
        SavePerformanceData: write the numbers of RateProfiler and FlopUtilization to `performance.json`.
    """

    ComputeNorm: EmptySection | None = None
    KeepNCheckpoints: KeepNCheckpointsConfig | None = None
    LoadCheckpointStates: LoadCheckpointStatesConfig | None = None
    CheckLoss: Annotated[EmptySection | None, NoEffect("the loss is always checked")] = None
    OpProfiler: OpProfilerConfig | None = None
    RateProfiler: EmptySection | None = None
    FlopUtilization: EmptySection | None = None
    SavePerformanceData: EmptySection | None = None
    DurationProfiler: Annotated[
        dict[str, Any] | None, NoEffect("a terminal always shows the remaining time")
    ] = None
    GlobalFlags: _Flags = None
    ScopedTrainFlags: _Flags = None
    ScopedValidateFlags: _Flags = None
    DebugArgsPath: _Flags = None
    EleutherEvalHarness: EleutherEvalHarnessConfig | None = None
    BigCodeEvalHarness: BigCodeEvalHarnessConfig | None = None
    Notification: NotificationConfig | None = None
    EmailNotification: EmailConfig | None = None
    SlackNotification: SlackConfig | None = None


Loaders = Annotated[tuple[AnyData, ...], OneOrMore]


class FitConfig(Section):
    """Training data, data for evaluations during training, and the checkpoint with which to start.

    Attributes:
        train_dataloader: training data.
        val_dataloader: data of evaluations during training.
        ckpt_path: checkpoint from which a new run starts; a run with checkpoints continues from its newest.
    """

    train_dataloader: AnyData
    val_dataloader: Loaders = ()
    ckpt_path: FilePath | None = None


class ValidateConfig(Section):
    """Data and checkpoint of an evaluation.

    Attributes:
        val_dataloader: data of `headwater validate`.
        ckpt_path: checkpoint to evaluate; the newest undamaged one if absent.
    """

    val_dataloader: AnyData
    ckpt_path: FilePath | None = None


class ValidateAllConfig(Section):
    """Data and checkpoints of an evaluation of several checkpoints on several data sets.

    Attributes:
        val_dataloaders: data of `headwater validate --all`.
        ckpt_paths: checkpoints to evaluate; all in the `model_dir` if absent.
    """

    val_dataloaders: Loaders
    ckpt_paths: Annotated[tuple[FilePath, ...], OneOrMore] | None = None
