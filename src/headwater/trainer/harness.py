"""Evaluation of a checkpoint with lm-evaluation-harness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.config.harness import HarnessArguments
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.data.codec import Codec
from headwater.evaluation.scorer import Scorer
from headwater.fabric.consistency import check_consistency
from headwater.fabric.fabric import ALONE, Fabric
from headwater.trainer.inference import Inference, open_scorer
from headwater.trainer.ranks import keys_of

if TYPE_CHECKING:
    from headwater.evaluation.tasks import Results, Tasks


def load_tasks(arguments: HarnessArguments) -> Tasks:
    """Load the tasks of an evaluation with their data.

    Raises:
        ConfigError: if lm-eval is not installed, or a task does not exist.
        DataError: if the data of a task cannot be read.
    """
    try:
        from headwater.evaluation.tasks import Tasks
    except ModuleNotFoundError as error:
        # If another module is missing, the advice below would not help.
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise ConfigError(
            "evaluation on tasks needs the package lm-eval, which is not installed",
            remedy="pip install 'headwater[eval]'",
        ) from error
    return Tasks(arguments)


def evaluate_tasks(
    config: RunConfig,
    arguments: HarnessArguments,
    inference: Inference,
    codec: Codec,
    tasks: Tasks,
    fabric: Fabric = ALONE,
) -> Results | None:
    """Evaluate a checkpoint on tasks, and return the results of the harness.

    Args:
        config: the run.
        arguments: what is evaluated.
        inference: how the model is evaluated.
        codec: the tokenizer.
        tasks: the tasks.
        fabric: the ranks that evaluate together. All of them call this.

    Returns:
        The results; `None` on a rank that is not the first of its host.

    Raises:
        ConfigError: if the ranks have different arguments.
    """
    if fabric.size > 1:
        check_consistency(fabric, dict(keys_of(arguments.model_dump(exclude={"output_path"}), "lm_eval")))
    settings = {
        "headwater_model": config.init.model.name,
        "checkpoint": str(inference.checkpoint or "newest"),
    }
    with open_scorer(config, inference, fabric) as scorer:
        return run_tasks(tasks, arguments, scorer, codec, settings)


def run_tasks(
    tasks: Tasks, arguments: HarnessArguments, scorer: Scorer, codec: Codec, settings: dict[str, Any]
) -> Results | None:
    """Evaluate an open model on tasks, and return the results of the harness; see `evaluate_tasks`.

    Args:
        tasks: the tasks.
        arguments: what is evaluated.
        scorer: computes.
        codec: the tokenizer.
        settings: what is written into the results as the settings of the model.
    """
    from headwater.evaluation.harness import HarnessModel

    return tasks.run(
        HarnessModel(
            scorer, codec, seed=arguments.seeds[2] or 0, truncate=arguments.truncate, settings=settings
        )
    )
