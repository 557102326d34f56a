"""Runs of the same program share the traces of its dry runs."""

import torch
from torch import nn

from headwater.plan.known_traces import KnownTraces
from headwater.plan.trace import trace_step


def run_program(model, sizes):
    def loss(model, batch):
        return model(batch).square().mean()

    return [trace_step(model, torch.randn(size, 4), loss_function=loss) for size in sizes]


def stack():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_a_second_run_of_a_program_makes_no_dry_runs():
    model, traces = stack(), KnownTraces()
    with traces.in_use():
        first = run_program(model, (2, 3))
    with traces.in_use():
        second = run_program(model, (2, 3))
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert first[0].micro_batch_size == 2 and first[1].micro_batch_size == 3


def test_other_conditions_need_a_new_dry_run():
    model, traces = stack(), KnownTraces()
    with traces.in_use():
        (first,) = run_program(model, (2,))
    with traces.in_use():
        (larger,) = run_program(model, (5,))
    with traces.in_use():
        (evaluated,) = run_program(model.eval(), (2,))
    model[0].requires_grad_(False)
    with traces.in_use():
        (frozen,) = run_program(model, (2,))
    assert larger.micro_batch_size == 5
    assert evaluated is not first and frozen is not evaluated and frozen != first


def test_without_known_traces_every_dry_run_is_repeated():
    first, second = run_program(stack(), (2, 2))
    assert first is not second and first == second
