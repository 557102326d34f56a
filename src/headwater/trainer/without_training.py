"""Checks and reports of a training run before it has weights or data."""

from __future__ import annotations

from headwater.api.compile_reports import CompileReport, ValidateReport
from headwater.api.without_training import compile_only, validate_only
from headwater.config.run import CommonInitConfig
from headwater.core.errors import DoesNotFitError
from headwater.plan.options import device_of
from headwater.plan.types import Plan
from headwater.trainer.job import Trainable
from headwater.trainer.planning import plan_run, training_workload

_FEW_SAMPLES = 2
"""The batch size for checking shapes. With a single sample, a wrong broadcast would not raise an error."""


def validate_run(init: CommonInitConfig, trainable: Trainable, batch_size: int) -> ValidateReport:
    """Check that model, loss, optimizer and the shapes of a batch fit together.

    Args:
        init: the params.
        trainable: the model; its parameters may be on the meta device.
        batch_size: samples of one step.

    Returns:
        A report of the check.

    Raises:
        ModelError: if model, loss, optimizer and batch do not fit together.
    """
    work = training_workload(init, trainable, batch_size)
    return validate_only(
        trainable.model,
        trainable.example(work.micro_batch_size or min(batch_size, _FEW_SAMPLES)),
        loss_function=trainable.loss,
        optimizer=work.optimizer,
        precision=init.precision.precision,
        optimizer_state=init.backend.optimizer_state,
        own_loop=False,
    )


def compile_run(init: CommonInitConfig, trainable: Trainable, batch_size: int) -> CompileReport:
    """Write plan, graphs and a report into the `compile_dir` of the params.

    Args:
        init: the params.
        trainable: the model; its parameters may be on the meta device.
        batch_size: samples of one step.

    Returns:
        The report.

    Raises:
        ModelError: if model, loss, optimizer and batch do not fit together.
    """
    work = training_workload(init, trainable, batch_size)
    plan: Plan | DoesNotFitError
    try:
        plan = plan_run(init, trainable, work)
        size = plan.micro_batch_size
    except DoesNotFitError as error:
        # The report says why no plan fits. The graphs need a batch size; one sample shows all operators.
        plan, size = error, work.micro_batch_size or 1
    return compile_only(
        trainable.model,
        trainable.example(size),
        loss_function=trainable.loss,
        optimizer=work.optimizer,
        precision=init.precision.precision,
        compile_dir=init.backend.compile_dir or init.model_dir / "compile",
        device=device_of(init.backend),
        plan=plan,
        own_loop=False,
    )
