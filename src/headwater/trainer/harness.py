"""Evaluation with lm-evaluation-harness: of a checkpoint, and by a callback during training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

from headwater.config.harness import EleutherEvalHarnessConfig, HarnessArguments
from headwater.config.models.preference import DPOConfig
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.data.codec import Codec
from headwater.evaluation.scorer import Scorer, check_length
from headwater.trainer.callback import Callback, FitStart, StepEnd
from headwater.trainer.inference import Inference, make_scorer, model_codec, open_scorer
from headwater.trainer.run_dir import RunDir
from headwater.trainer.zoo_job import language_model

if TYPE_CHECKING:
    from headwater.evaluation.tasks import Results, Tasks

logger = logging.getLogger(__name__)


def load_tasks(arguments: HarnessArguments) -> Tasks:
    """Load the tasks of an evaluation with their data.

    Raises:
        ConfigError: if lm-eval is not installed, or a task does not exist.
        DataError: if the data of a task cannot be read.
    """
    try:
        from headwater.evaluation.tasks import Tasks
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise ConfigError(
            "evaluation on tasks needs the package lm-eval, which is not installed",
            remedy="pip install 'headwater[eval]'",
        ) from error
    return Tasks(arguments)


def evaluate_tasks(
    config: RunConfig, arguments: HarnessArguments, inference: Inference, codec: Codec, tasks: Tasks
) -> Results:
    """Evaluate a checkpoint on tasks, and return the results of the harness.

    Args:
        config: the run.
        arguments: what is evaluated.
        inference: how the model is evaluated.
        codec: the tokenizer.
        tasks: the tasks.
    """
    settings = {
        "headwater_model": config.init.model.name,
        "checkpoint": str(inference.checkpoint or "newest"),
    }
    with open_scorer(config, inference) as scorer:
        return _results(tasks, arguments, scorer, codec, settings)


def _results(
    tasks: Tasks, arguments: HarnessArguments, scorer: Scorer, codec: Codec, settings: dict[str, Any]
) -> Results:
    from headwater.evaluation.harness import HarnessModel

    return tasks.run(
        HarnessModel(
            scorer, codec, seed=arguments.seeds[2] or 0, truncate=arguments.truncate, settings=settings
        )
    )


def tell_scores(callbacks: Sequence[Callback], step: int, scores: Mapping[str, float]) -> None:
    """Call `on_scores` of every callback, even if one of them fails."""
    with ExitStack() as calls:
        # An exit stack calls the last one first.
        for callback in reversed(callbacks):
            calls.callback(callback.on_scores, step, scores)


def harness_callbacks(config: RunConfig) -> list[Callback]:
    """Return the evaluations on tasks that the callbacks of the params name.

    Raises:
        ConfigError: if the model does not continue texts, or several ranks train it.
    """
    cluster = config.init.backend.cluster_config
    if config.init.harnesses and (cluster.num_csx > 1 or cluster.num_memx):
        raise ConfigError(
            "EleutherEvalHarness needs num_csx 1 and num_memx 0, "
            f"got num_csx {cluster.num_csx} and num_memx {cluster.num_memx}",
            where="trainer.init.callbacks",
            remedy="remove the callback, and evaluate the checkpoints with headwater lm_eval",
        )
    return [EvalHarness(section, config) for section in config.init.harnesses]


@final
class EvalHarness(Callback):
    """Evaluates the model on tasks during training, and writes the results into the folder of the run.

    It computes with the engine of the training, at most as many tokens at once as a micro-batch has.

    Args:
        section: the section of the params.
        config: the run.
    """

    def __init__(self, section: EleutherEvalHarnessConfig, config: RunConfig) -> None:
        self._section = section
        self._config = config
        self._model = language_model(config)
        if isinstance(config.init.model, DPOConfig):
            raise ConfigError(
                "EleutherEvalHarness cannot evaluate a model during preference tuning",
                where="trainer.init.callbacks",
                remedy="remove the callback, and evaluate the checkpoints with headwater lm_eval",
            )
        self._length = check_length(self._model.max_position_embeddings, section.max_sequence_length)
        self._start: FitStart | None = None
        self._tasks: Tasks | None = None
        self._codec: Codec | None = None

    def on_fit_start(self, event: FitStart) -> None:
        # Now, and not at the first evaluation: a missing task must not end a run that has trained for days.
        self._start = event
        self._tasks = load_tasks(self._section.eeh_args)
        self._codec = model_codec(self._config, self._section.tokenizer, self._section.eos_id)

    def on_step_end(self, event: StepEnd) -> None:
        assert self._start is not None, "a run starts before its first step"
        interval = self._config.init.loop.eval_interval(self._start.end_step) * self._section.every_n_vals
        if event.step == self._start.end_step or (interval and event.step % interval == 0):
            self._evaluate(event.step, event.tokens // max(event.samples, 1))

    def _evaluate(self, step: int, trained_length: int) -> None:
        """Evaluate after a step of samples of `trained_length` tokens."""
        from headwater.evaluation.tasks import metrics, tables, write_results

        start, tasks, codec = self._start, self._tasks, self._codec
        assert start is not None and start.engine is not None and tasks is not None and codec is not None
        # The plan of the training has memory for a micro-batch of samples of this length.
        length = min(self._length, trained_length)
        size = min(self._section.batch_size or start.plan.micro_batch_size, start.plan.micro_batch_size)
        scorer = make_scorer(start.engine, self._model.vocab_size, length, size)
        arguments = self._section.eeh_args
        settings = {"headwater_model": self._model.name, "step": step}
        results = _results(tasks, arguments, scorer, codec, settings)
        folder = RunDir(self._config.init.model_dir).path / self._section.name_scope
        path = write_results(results, folder / (arguments.output_path or ""), step)
        logger.info("results of step %d, written to %s:\n%s", step, path, tables(results))
        tell_scores(start.callbacks, step, metrics(results))
