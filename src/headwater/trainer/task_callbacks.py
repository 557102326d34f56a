"""Callbacks that evaluate a model on tasks during training."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

from headwater.config.bigcode import BigCodeEvalHarnessConfig
from headwater.config.harness import EleutherEvalHarnessConfig, TaskCallback
from headwater.config.models.preference import DPOConfig
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.data.codec import Codec
from headwater.evaluation.programs import ProgramEvaluation, ProgramFiles, ProgramWriter, describe, metrics
from headwater.evaluation.scorer import Scorer, check_length
from headwater.trainer.callback import Callback, FitStart, StepEnd
from headwater.trainer.harness import load_tasks, run_tasks
from headwater.trainer.inference import make_scorer
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tokenizer import model_codec
from headwater.trainer.zoo_job import language_model

if TYPE_CHECKING:
    from headwater.evaluation.tasks import Tasks

logger = logging.getLogger(__name__)


def harness_callbacks(config: RunConfig) -> list[Callback]:
    """Return the evaluations on tasks that the callbacks of the params name.

    Raises:
        ConfigError: if the model does not continue texts, or several ranks train it.
    """
    return [
        *(EvalHarness(section, config) for section in config.init.eleuther_harnesses),
        *(CodeHarness(section, config) for section in config.init.bigcode_harnesses),
    ]


def report_scores(callbacks: Sequence[Callback], step: int, scores: Mapping[str, float]) -> None:
    """Call `on_scores` of every callback, even if one of them fails."""
    with ExitStack() as calls:
        # Reversed, because an exit stack calls the last one first.
        for callback in reversed(callbacks):
            calls.callback(callback.on_scores, step, scores)


class TrainingEvaluation(Callback, ABC):
    """Evaluates the model during training, and writes the results into the folder of the run.

    It uses the engine of the training, with at most as many tokens in a forward as a micro-batch has.

    Args:
        name: name of the callback in params files.
        command: the command that evaluates checkpoints in the same way.
        section: the section of the params.
        config: the run.

    Raises:
        ConfigError: if the model does not continue texts, or several ranks train it.
    """

    def __init__(self, name: str, command: str, section: TaskCallback, config: RunConfig) -> None:
        self._section = section
        self._config = config
        cluster = config.init.backend.cluster_config
        remedy = f"remove the callback, and evaluate the checkpoints with {command}"
        if cluster.num_csx > 1 or cluster.num_memx:
            raise ConfigError(
                f"{name} needs num_csx 1 and num_memx 0, "
                f"got num_csx {cluster.num_csx} and num_memx {cluster.num_memx}",
                where="trainer.init.callbacks",
                remedy=remedy,
            )
        self.model = language_model(config)
        if isinstance(config.init.model, DPOConfig):
            raise ConfigError(
                f"{name} cannot evaluate a model during preference tuning",
                where="trainer.init.callbacks",
                remedy=remedy,
            )
        self._length = check_length(self.model.max_position_embeddings, section.max_sequence_length)
        self._start: FitStart | None = None
        self._codec: Codec | None = None

    @abstractmethod
    def load(self) -> None:
        """Load the tasks.

        Raises:
            HeadwaterError: if they cannot be evaluated.
        """

    @abstractmethod
    def evaluate(self, step: int, scorer: Scorer, codec: Codec) -> Mapping[str, float]:
        """Evaluate after a step, write the results, and return each number by `task/metric`."""

    @property
    def folder(self) -> Path:
        """The folder for the results."""
        return RunDir(self._config.init.model_dir).path / self._section.name_scope

    def on_fit_start(self, event: FitStart) -> None:
        # The tasks are loaded now, because a missing task must not end a run that has trained for days.
        self._start = event
        self.load()
        self._codec = model_codec(self._config, self._section.tokenizer, self._section.eos_id)

    def on_step_end(self, event: StepEnd) -> None:
        assert self._start is not None, "a run starts before its first step"
        interval = self._config.init.loop.eval_interval(self._start.end_step) * self._section.every_n_vals
        if event.step == self._start.end_step or (interval and event.step % interval == 0):
            self._evaluate(event.step, event.tokens // max(event.samples, 1))

    def _evaluate(self, step: int, trained_length: int) -> None:
        """Evaluate after a step of samples of `trained_length` tokens."""
        start, codec = self._start, self._codec
        assert start is not None and start.engine is not None and codec is not None
        # The plan of the training has memory for a micro-batch of samples of this length.
        length = min(self._length, trained_length)
        size = min(self._section.batch_size or start.plan.micro_batch_size, start.plan.micro_batch_size)
        scorer = make_scorer(start.engine, self.model.vocab_size, length, size)
        report_scores(start.callbacks, step, self.evaluate(step, scorer, codec))


@final
class EvalHarness(TrainingEvaluation):
    """Evaluates the model on tasks of lm-evaluation-harness during training.

    Args:
        section: the section of the params.
        config: the run.
    """

    def __init__(self, section: EleutherEvalHarnessConfig, config: RunConfig) -> None:
        super().__init__("EleutherEvalHarness", "headwater lm_eval", section, config)
        self._arguments = section.eeh_args
        self._tasks: Tasks | None = None

    def load(self) -> None:
        self._tasks = load_tasks(self._arguments)

    def evaluate(self, step: int, scorer: Scorer, codec: Codec) -> Mapping[str, float]:
        from headwater.evaluation.tasks import metrics as harness_metrics
        from headwater.evaluation.tasks import tables, write_results

        assert self._tasks is not None, "the tasks are loaded when the run starts"
        settings = {"headwater_model": self.model.name, "step": step}
        results = run_tasks(self._tasks, self._arguments, scorer, codec, settings)
        assert results is not None, "the only rank of a run is the first of its host"
        path = write_results(results, self.folder / (self._arguments.output_path or ""), step)
        logger.info("results of step %d, written to %s:\n%s", step, path, tables(results))
        return harness_metrics(results)


@final
class CodeHarness(TrainingEvaluation):
    """Evaluates the model on tasks that ask for programs during training.

    Args:
        section: the section of the params.
        config: the run.
    """

    def __init__(self, section: BigCodeEvalHarnessConfig, config: RunConfig) -> None:
        super().__init__("BigCodeEvalHarness", "headwater bigcode_eval", section, config)
        self._arguments = section.bigcode_args
        self._evaluation: ProgramEvaluation | None = None

    def load(self) -> None:
        ProgramFiles(self.folder, self._arguments).check()
        self._evaluation = ProgramEvaluation(self._arguments)

    def evaluate(self, step: int, scorer: Scorer, codec: Codec) -> Mapping[str, float]:
        evaluation = self._evaluation
        assert evaluation is not None, "the tasks are loaded when the run starts"
        files = ProgramFiles(self.folder, self._arguments, step)
        results = evaluation.run(files, ProgramWriter(scorer, codec, self._arguments))
        if not results:
            logger.info("programs of step %d, written to %s", step, self.folder)
            return {}
        path, text = files.save_results(results), describe(results, evaluation.tasks)
        logger.info("results of step %d, written to %s:\n%s", step, path, text)
        return metrics(results, evaluation.tasks)
