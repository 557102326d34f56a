"""The schema of the loggers of a run: TensorBoard, Weights & Biases, MLflow and Trackio."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headwater.config.base import Choice, FilePath, NoEffect, OneOrMore, Section
from headwater.config.sections import EmptySection

Resume = Literal["auto", "allow", "must", "never"]
"""The choice to log a run that continues into its earlier run; `must` requires an earlier run."""


class TensorBoardLoggerConfig(Section):
    """Output of scalars for TensorBoard.

    Attributes:
        summary_dir: folder of the files; the `model_dir` if absent.
    """

    summary_dir: FilePath | None = None


class WandbLoggerConfig(Section):
    """A run of Weights & Biases, with the arguments of the Model Zoo.

    Attributes:
        project: project of the run; the environment variable WANDB_PROJECT if absent.
        group: group of the run.
        run_id: identifier of the run; chosen by the package if absent.
        run_name: name of the run; the name of the model_dir if absent.
        job_type: type of the job.
        tags: tags of the run.
        resume: `auto` and `allow` log a run that continues into its earlier run; `must` requires an earlier
            run; `never` makes a new run.
        entity: user or team to which the run belongs.
        mode: `offline` writes files only; WANDB_MODE if absent.
    """

    project: str | None = None
    group: str | None = None
    run_id: str | None = None
    run_name: str | None = None
    job_type: str | None = None
    tags: Annotated[tuple[str, ...], OneOrMore] = ()
    resume: Resume = "auto"
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class MLflowLoggerConfig(Section):
    """A run of MLflow.

    Attributes:
        experiment_name: experiment of the run; it is created if it does not exist.
        tracking_uri: the server, database or folder. If absent, the environment variable
            MLFLOW_TRACKING_URI, or else the folder `mlruns` in `model_dir`.
        run_name: name of the run; the name of the model_dir if absent.
        run_id: an existing run in which to log.
        tags: tags of the run.
        resume: the same as `resume` of `WandbLogger`.
    """

    experiment_name: str = "headwater"
    tracking_uri: str | None = None
    run_name: str | None = None
    run_id: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    resume: Resume = "auto"


class TrackioLoggerConfig(Section):
    """A run of Trackio, in the folder of Trackio on this machine or in a Space of Hugging Face.

    Attributes:
        project: project of the run.
        run_name: name of the run; the name of the model_dir and a random number if absent.
        group: group of the run.
        space_id: the Space; TRACKIO_SPACE_ID if absent.
        resume: the same as `resume` of `WandbLogger`.
    """

    project: str = "headwater"
    run_name: str | None = None
    group: str | None = None
    space_id: str | None = None
    resume: Resume = "auto"


class LoggerConfig(Choice):
    """A logger: its name with its arguments; null disables it."""

    TensorBoardLogger: TensorBoardLoggerConfig | None = None
    WandbLogger: WandbLoggerConfig | None = None
    MLflowLogger: MLflowLoggerConfig | None = None
    TrackioLogger: TrackioLoggerConfig | None = None
    ProgressLogger: Annotated[EmptySection | None, NoEffect("progress is always shown")] = None


TrackerConfig = WandbLoggerConfig | MLflowLoggerConfig | TrackioLoggerConfig
"""The loggers that keep runs of several machines and projects."""
