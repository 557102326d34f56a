"""The description of a complete run, and the reading of it from a params file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from headwater.config.base import FilePath, OneOrMore, Section, nearest
from headwater.config.bigcode import BigCodeEvalHarnessConfig
from headwater.config.document import Document, no_effect, put
from headwater.config.files import read_params
from headwater.config.harness import EleutherEvalHarnessConfig
from headwater.config.loggers import LoggerConfig, TrackerConfig
from headwater.config.models import MODELS, AnyModel, named
from headwater.config.optimizers import OptimizerConfig, ScheduleConfig
from headwater.config.origins import NOWHERE, KeyPath
from headwater.config.overrides import apply_overrides, parse_overrides
from headwater.config.problems import config_error
from headwater.config.sections import (
    BackendConfig,
    CallbackConfig,
    CheckpointConfig,
    FitConfig,
    LoggingConfig,
    LoopConfig,
    NotificationConfig,
    OpProfilerConfig,
    PrecisionConfig,
    ValidateAllConfig,
    ValidateConfig,
)
from headwater.config.sparsity import SparsityConfig
from headwater.core.errors import ConfigError, shorten
from headwater.optim.schedules import Constant, Schedule
from headwater.optim.spec import OptimizerSpec

AnySection = TypeVar("AnySection", bound=Section)


class CommonInitConfig(Section):
    """The section `trainer.init` without `model`: the settings that the runs of all models have.

    Attributes:
        model_dir: folder of the run: checkpoints, logs and the resolved params.
        seed: seed of initial weights, dropout and the order of samples.
        schedulers: schedules of the learning rate and the weight decay. There can be one for all parameters,
            and others for parameters with tags. If several apply to a parameter, the last one counts. Without
            schedules the optimizer's `learning_rate` is used.
        precision: numeric precision; fp32 if absent.
        sparsity: weights that are kept at zero; one section, or several for weights of different names.
    """

    backend: BackendConfig = BackendConfig()
    model_dir: FilePath = Path("model_dir")
    seed: int = Field(default=0, ge=0)
    optimizer: OptimizerConfig
    schedulers: Annotated[tuple[ScheduleConfig, ...], OneOrMore] = ()
    precision: PrecisionConfig = PrecisionConfig(enabled=False)
    sparsity: Annotated[tuple[SparsityConfig, ...], OneOrMore] = ()
    loop: LoopConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    callbacks: Annotated[tuple[CallbackConfig, ...], OneOrMore] = ()
    loggers: Annotated[tuple[LoggerConfig, ...], OneOrMore] = ()

    @model_validator(mode="after")
    def _one_learning_rate(self) -> Self:
        tags = {entry.tag for entry in self.optimizer.arguments.params}
        for entry in self.schedulers:
            unknown = [tag for tag in entry.tags if tag not in tags]
            if unknown:
                raise ValueError(
                    f"unknown tag {unknown[0]!r} in schedulers: the params of the optimizer do not define it"
                )
        general = [entry.option for entry in self.schedulers if not entry.tags]
        if len(general) != len(set(general)):
            raise ValueError(
                "two schedulers apply to the same parameters; put schedules that follow each other into a "
                "SequentialLR, and add param_group_tags to those for different parameters"
            )
        if not self._rates and self.optimizer.arguments.learning_rate is None:
            raise ValueError(
                "the learning rate is missing: add schedulers, or learning_rate to the optimizer"
            )
        return self

    def notices(self) -> Iterator[tuple[str, str]]:
        yield from super().notices()
        for_all = any(not entry.tags for entry in self._rates)
        if for_all and self.optimizer.arguments.learning_rate is not None:
            yield "optimizer", "its learning_rate is ignored, because schedulers set the rate"

    @model_validator(mode="after")
    def _scaled_schedule(self) -> Self:
        scaled = any(entry.ScalePerParamLR for entry in self.schedulers)
        if self.optimizer.arguments.adjust_learning_rate and not scaled:
            raise ValueError("adjust_learning_rate of the optimizer needs a ScalePerParamLR in schedulers")
        return self

    @model_validator(mode="after")
    def _updates_need_no_other_gradient(self) -> Self:
        if self.backend.updates == "on_fetch":
            return self
        needs = {
            "precision max_gradient_norm, which needs all gradients": self.precision.max_gradient_norm
            is not None,
            "precision fp16_type: float16, whose steps may be skipped": self.precision.precision.name
            == "fp16",
            "sparsity, which reads gradients before the update": bool(self.sparsity),
            "store ranks, which update a stage at the end of a step": self.backend.placement.num_memx > 0,
        }
        for setting, is_set in needs.items():
            if is_set:
                raise ValueError(
                    f"backend updates: in_backward cannot be used with {setting}; leave one of them out, or "
                    "write updates: on_fetch"
                )
        return self

    @model_validator(mode="after")
    def _one_number_of_checkpoints(self) -> Self:
        counts = {self.checkpoint.keep_n, *(entry.n for entry in self._callbacks("KeepNCheckpoints"))} - {
            None
        }
        if len(counts) > 1:
            raise ValueError(
                "checkpoint keep_n and the callbacks' KeepNCheckpoints set different numbers to keep"
            )
        return self

    @model_validator(mode="after")
    def _profiles_apart(self) -> Self:
        ranges = sorted((profile.start_step, profile.end_step) for profile in self.profiles)
        for (first, last), (start, end) in itertools.pairwise(ranges):
            if start <= last:
                raise ValueError(
                    f"expected OpProfiler callbacks with different steps, got {first} to {last} and "
                    f"{start} to {end}"
                )
        return self

    @property
    def _rates(self) -> list[ScheduleConfig]:
        return [entry for entry in self.schedulers if entry.option == "lr"]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the learning rate for all parameters; if every schedule has tags, the first one."""
        rates = sorted(self._rates, key=lambda entry: bool(entry.tags))
        if rates:
            return rates[0].build()
        rate = self.optimizer.arguments.learning_rate
        assert rate is not None, "the validator has checked that there is a rate"
        return Constant(rate)

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer, with the learning rate of step 0."""
        return self.optimizer.spec(self.schedule.value(0))

    @property
    def compute_norm(self) -> bool:
        """True if norms of weights and gradients are logged."""
        return self.has_callback("ComputeNorm")

    @property
    def keep_checkpoints(self) -> int | None:
        """Number of newest checkpoints to keep; `None` for all."""
        kept = (entry.n for entry in self._callbacks("KeepNCheckpoints") if entry.n is not None)
        return next(kept, self.checkpoint.keep_n)

    @property
    def checkpoint_states(self) -> tuple[str, ...]:
        """The states that the run loads from the checkpoint with which it starts, such as `("model",)`."""
        states = (entry.load_checkpoint_states for entry in self._callbacks("LoadCheckpointStates"))
        return next(states, ("all",))

    @property
    def profiles(self) -> list[OpProfilerConfig]:
        """The profiles to take."""
        return self._callbacks("OpProfiler")

    def has_callback(self, name: str) -> bool:
        """True if the params name this callback."""
        return bool(self._callbacks(name))

    @property
    def eleuther_harnesses(self) -> list[EleutherEvalHarnessConfig]:
        """The evaluations with lm-evaluation-harness during training."""
        return self._callbacks("EleutherEvalHarness")

    @property
    def bigcode_harnesses(self) -> list[BigCodeEvalHarnessConfig]:
        """The evaluations on tasks that ask for programs during training."""
        return self._callbacks("BigCodeEvalHarness")

    @property
    def evaluates_tasks(self) -> bool:
        """True if the model is evaluated on tasks during training."""
        return bool(self.eleuther_harnesses or self.bigcode_harnesses)

    @property
    def notifications(self) -> list[NotificationConfig]:
        """The notifications at the end of the training."""
        names = ("Notification", "EmailNotification", "SlackNotification")
        return [entry for name in names for entry in self._callbacks(name)]

    @property
    def trackers(self) -> list[TrackerConfig]:
        """The loggers that send the run to a service."""
        chosen = (entry.chosen for entry in self.loggers)
        return [entry for entry in chosen if isinstance(entry, TrackerConfig)]

    def _callbacks(self, name: str) -> list[Any]:
        given = (getattr(entry, name) for entry in self.callbacks)
        return [entry for entry in given if entry is not None]


class InitConfig(CommonInitConfig):
    """The section `trainer.init`: everything except the data.

    Attributes:
        model: the model; its `name` selects the keys of the section.
    """

    model: AnyModel


class TrainerConfig(Section):
    """The section `trainer`."""

    init: InitConfig
    fit: FitConfig | None = None
    validation: ValidateConfig | None = Field(default=None, alias="validate")
    validate_all: ValidateAllConfig | None = None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run. Two runs with the same settings are equal, also if they come from different files or forms.

    Attributes:
        init: model, optimizer, backend, loop and other settings.
        fit: training data; `None` in a file that only evaluates.
        validation: data for an evaluation.
        validate_all: data for the evaluation of several checkpoints.
        source: the params file.
        notices: a line for each key without effect.
    """

    init: InitConfig
    fit: FitConfig | None
    validation: ValidateConfig | None
    validate_all: ValidateAllConfig | None
    source: Path = dataclasses.field(compare=False)
    notices: tuple[str, ...] = dataclasses.field(compare=False)


def load_params(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a run from a params file.

    Args:
        path: a YAML file in either form; see `find_params` for the shipped ones.
        overrides: values that replace those of the file: `--trainer.init.loop.max_steps=10`,
            `--num_steps=10`, or the same as a mapping.

    Raises:
        ConfigError: if the file is not valid, with file, line, key and what to write instead.
    """
    return read_run(path, overrides)[0]


def read_run(
    path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[RunConfig, Document, TrainerConfig]:
    """Read a run from a params file, and return it together with its params.

    Args:
        path: the params file.
        overrides: values that replace those of the file; see `load_params`.

    Returns:
        The run; its params in the newer form, as plain data with the origin of each value; and the same
        params as a section of the schema.

    Raises:
        ConfigError: if the file is not valid, with file, line, key and what to write instead.
    """
    source = Path(path)
    return _run_of(read_params(source, parse_overrides(overrides)), source)


def library_run(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a run that uses a model in a folder of the transformers library, without training it.

    Args:
        folder: holds `config.json`.
        overrides: values of keys; see `load_params`.

    Raises:
        ConfigError: if the model is not valid.
    """
    tree = {"trainer": {"init": {"model": {"hf": str(folder)}, "model_dir": str(folder)}}}
    changed = apply_overrides(Document(tree), parse_overrides(overrides), ("trainer",))
    return _run_of(changed, folder)[0]


def _run_of(document: Document, source: Path) -> tuple[RunConfig, Document, TrainerConfig]:
    """Return the run of a document, the document, and its section `trainer`."""
    document = _without_training(document)
    _check_model_name(document)
    trainer, notices = read_section(TrainerConfig, document, ("trainer",))
    run = RunConfig(
        init=trainer.init,
        fit=trainer.fit,
        validation=trainer.validation,
        validate_all=trainer.validate_all,
        source=source,
        notices=notices,
    )
    return run, document, trainer


def _without_training(document: Document) -> Document:
    """Add the sections `optimizer` and `loop`, with unused values, if a document describes no training."""
    init: KeyPath = ("trainer", "init")
    trainer, section = document.get(init[:1]), document.get(init)
    if not isinstance(trainer, dict) or not isinstance(section, dict):
        return document
    if trainer.get("fit") is not None or {"optimizer", "loop", "schedulers"} & section.keys():
        return document
    document = put(document, (*init, "optimizer"), {"SGD": {"learning_rate": 0.0}}, NOWHERE)
    return put(document, (*init, "loop"), {"max_steps": 1}, NOWHERE)


def read_section(
    kind: type[AnySection], document: Document, root: KeyPath
) -> tuple[AnySection, tuple[str, ...]]:
    """Validate a section of a document.

    Args:
        kind: class of the section.
        document: the document.
        root: path of the section.

    Returns:
        The section, and a line for each key without effect.

    Raises:
        ConfigError: if the section does not follow the schema.
    """
    try:
        section = kind.model_validate(document.get(root))
    except ValidationError as error:
        raise config_error(error, document, root) from None
    notices = (
        no_effect(document.origin(document.locate(root, location)), why)
        for location, why in _notices(section)
    )
    # Once each: an eval_input of the older form becomes three sections with the same notices.
    return section, tuple(dict.fromkeys((*document.notices, *notices)))


def _check_model_name(document: Document) -> None:
    """Check the model's name first; otherwise every one of its keys is reported as unknown."""
    path: KeyPath = ("trainer", "init", "model")
    model = named(document.get(path))
    if not isinstance(model, dict) or str(model.get("name")) in MODELS:
        return
    listed = (
        f"available: {', '.join(sorted(MODELS))}; for any model of the transformers library write "
        "model: {hf: FOLDER} with a folder that contains its config.json"
    )
    if "name" not in model:
        raise ConfigError(
            "the key 'name' of the model is missing",
            where=str(document.origin((*path, "name"))),
            remedy=f"add name, or write --model NAME; {listed}",
        )
    close = nearest(str(model["name"]), MODELS)
    raise ConfigError(
        f"unknown model {shorten(str(model['name']), 80)!r}",
        where=str(document.origin((*path, "name"))),
        remedy=f"write {close!r}; {listed}" if close else listed,
    )


def _notices(section: Section) -> Iterator[tuple[KeyPath, str]]:
    for location, inside in section.sections():
        for key, why in inside.notices():
            yield (*location, key), why
