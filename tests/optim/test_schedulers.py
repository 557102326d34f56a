"""Schedulers: what they write to parameter groups, how they resume, and what they refuse."""

import dataclasses
import inspect
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import CheckpointError, ConfigError
from headwater.optim import lr_scheduler, schedules, weight_decay_scheduler
from headwater.optim.lr_scheduler import (
    ChainedLR,
    ConstantLR,
    CosineDecayLR,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ScalePerParamLR,
    SequentialLR,
)
from headwater.optim.weight_decay_scheduler import ConstantWD, CosineDecayWD, LinearWD, SequentialWD

LR_ARGUMENTS = {
    "Constant": {"learning_rate": 0.3},
    "Linear": {"initial_learning_rate": 0.1, "end_learning_rate": 0.9, "total_iters": 7},
    "Polynomial": {"initial_learning_rate": 0.9, "end_learning_rate": 0.1, "total_iters": 7, "power": 2.0},
    "CosineDecay": {"initial_learning_rate": 0.9, "end_learning_rate": 0.1, "total_iters": 7},
    "CosineAnnealing": {"initial_learning_rate": 0.9, "T_max": 5, "eta_min": 0.1},
    "CosineAnnealingWarmRestarts": {"initial_learning_rate": 0.9, "T_0": 3, "T_mult": 2},
    "Exponential": {"initial_learning_rate": 0.9, "total_iters": 2, "decay_rate": 0.5, "staircase": True},
    "InverseExponentialTimeDecay": {
        "initial_learning_rate": 0.9,
        "step_exponent": 1,
        "total_iters": 2,
        "decay_rate": 0.5,
    },
    "InverseSquareRootDecay": {"initial_learning_rate": 0.9, "scale": 0.5, "warmup_steps": 3},
    "Step": {"initial_learning_rate": 0.9, "step_size": 2, "gamma": 0.5},
    "MultiStep": {"initial_learning_rate": 0.9, "gamma": 0.5, "milestones": [2, 4]},
    "PiecewiseConstant": {"learning_rates": [0.9, 0.5, 0.1], "milestones": [2, 4]},
    "Lambda": {"initial_learning_rate": 0.9, "lr_lambda": lambda step: 1 / (1 + step)},
    "Multiplicative": {"initial_learning_rate": 0.9, "coefficient": 0.5},
    "Cyclic": {"base_lr": 0.1, "max_lr": 0.9, "step_size_up": 2, "mode": "triangular2"},
    "OneCycle": {"initial_learning_rate": 0.1, "max_lr": 0.9, "total_steps": 8},
}
WD_NAMES = {
    "learning_rate": "val",
    "learning_rates": "vals",
    "initial_learning_rate": "initial_val",
    "end_learning_rate": "end_val",
    "base_lr": "base_val",
    "max_lr": "max_val",
    "lr_lambda": "wd_lambda",
}
COMBINED = ("Sequential", "Chained", "ScalePerParam")


def make_optimizer(*groups):
    groups = groups or ({},)
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups]
    return torch.optim.AdamW(params, lr=5.0, weight_decay=5.0)


def values(scheduler, option, steps=10):
    """Return the option of the first group at the steps 0, 1, …"""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0][option])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", LR_ARGUMENTS)
def test_both_families_write_the_values_of_the_schedule(name):
    rates = getattr(lr_scheduler, f"{name}LR")(make_optimizer(), **LR_ARGUMENTS[name])
    decays = getattr(weight_decay_scheduler, f"{name}WD")(
        make_optimizer(), **{WD_NAMES.get(key, key): value for key, value in LR_ARGUMENTS[name].items()}
    )
    assert isinstance(rates.schedule, getattr(schedules, name))
    expected = [rates.schedule.value(step) for step in range(10)]
    assert values(rates, "lr") == expected
    assert values(decays, "weight_decay") == expected
    assert rates.optimizer.param_groups[0]["weight_decay"] == 5.0
    assert decays.optimizer.param_groups[0]["lr"] == 5.0
    assert len(set(expected)) > 1 or name == "Constant"


@pytest.mark.parametrize("name", LR_ARGUMENTS)
def test_arguments_may_be_positional(name):
    kind, arguments = getattr(lr_scheduler, f"{name}LR"), LR_ARGUMENTS[name]
    order = [key for key in kind.argument_names() if key in arguments]
    if order == kind.argument_names()[: len(order)]:
        named = kind(make_optimizer(), **arguments)
        assert kind(make_optimizer(), *(arguments[key] for key in order)).schedule == named.schedule


def test_both_families_have_all_schedules():
    for module, suffix in ((lr_scheduler, "LR"), (weight_decay_scheduler, "WD")):
        for name in (*LR_ARGUMENTS, *COMBINED):
            assert inspect.isclass(getattr(module, name + suffix))
    assert lr_scheduler.CosineAnnealingWarmRestarts is lr_scheduler.CosineAnnealingWarmRestartsLR
    assert lr_scheduler.ChainedScheduler is ChainedLR
    assert issubclass(LinearLR, torch.optim.lr_scheduler.LRScheduler)


def test_signatures_are_those_of_the_schedules():
    assert list(inspect.signature(LinearLR).parameters) == [
        "optimizer", "initial_learning_rate", "end_learning_rate", "total_iters", "cycle", "param_group_tags",
    ]  # fmt: skip
    assert CosineDecayWD.argument_names()[:3] == ["initial_val", "end_val", "total_iters"]


def sequence(optimizer):
    parts = [
        LinearLR(optimizer, 0.0, 1.0, 3),
        CosineDecayLR(optimizer, 1.0, 0.1, 5),
        ConstantLR(optimizer, 0.1),
    ]
    return SequentialLR(optimizer, parts)


@settings(deadline=None, max_examples=30)
@given(before=st.integers(0, 20), after=st.integers(1, 20))
def test_a_scheduler_resumes_exactly(before, after):
    whole, first, second = sequence(make_optimizer()), sequence(make_optimizer()), sequence(make_optimizer())
    expected = values(whole, "lr", before + after)
    values(first, "lr", before)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert values(second, "lr", after) == expected[before:]
    assert second.last_epoch == before + after


def test_loading_sets_the_rate_at_once():
    first, second = sequence(make_optimizer()), sequence(make_optimizer())
    values(first, "lr", 4)
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [second.optimizer.param_groups[0]["lr"]]


def test_a_state_of_something_else_is_refused():
    with pytest.raises(CheckpointError, match="the key last_epoch"):
        sequence(make_optimizer()).load_state_dict({"state": {}, "param_groups": []})


def test_a_step_may_be_given():
    scheduler = LinearLR(make_optimizer(), 0.0, 1.0, 10)
    scheduler.step(7)
    assert scheduler.get_last_lr() == pytest.approx([0.7])
    scheduler.step()
    assert scheduler.last_epoch == 8


def test_a_learning_rate_tensor_stays_a_tensor():
    rate = torch.tensor(5.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    LinearLR(optimizer, 0.25, 1.0, 10)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_tags_choose_the_groups():
    optimizer = make_optimizer({"tags": ("a",)}, {"tags": ("a", "b")}, {})
    LinearLR(optimizer, 0.1, 1.0, 10, param_group_tags="b")
    assert [group["lr"] for group in optimizer.param_groups] == [5.0, 0.1, 5.0]
    scheduler = ConstantLR(optimizer, 0.2, param_group_tags=["a"])
    assert scheduler.get_last_lr() == [0.2, 0.2, 5.0]
    ConstantLR(optimizer, 0.3, param_group_tags=[None])
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2, 0.3]
    with pytest.raises(ConfigError, match=r"no parameter group with one of the tags c(.|\n)*a, b"):
        ConstantLR(optimizer, 0.2, param_group_tags="c")


def test_a_tag_may_be_a_plain_name():
    optimizer = make_optimizer({"tags": "first"}, {"tags": {"second"}})
    ConstantLR(optimizer, 0.1, param_group_tags="first")
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 5.0]


def test_an_optimizer_without_the_option_is_refused():
    optimizer = torch.optim.Rprop([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="ConstantWD sets weight_decay, which Rprop does not have"):
        ConstantWD(optimizer, 0.1)


def test_no_decay_groups_change_only_if_tagged():
    optimizer = make_optimizer({}, {"weight_decay": 0.0, "no_weight_decay": True, "tags": ("a",)})
    LinearWD(optimizer, 0.1, 1.0, 10)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    ConstantLR(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    ConstantWD(optimizer, 0.3, param_group_tags="a")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.3]


def test_the_rate_of_each_group_is_scaled():
    optimizer = make_optimizer({"adjust_learning_rate": 0.5}, {"adjust_val": 2.0}, {})
    scheduler = ScalePerParamLR(optimizer, LinearLR(optimizer, 0.0, 1.0, 4))
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.125, 0.5, 0.25])


def test_a_sequence_and_its_milestones():
    optimizer = make_optimizer()
    parts = [ExponentialLR(optimizer, 1.0, 1, 0.5), ConstantLR(optimizer, 0.125)]
    assert values(SequentialLR(optimizer, parts, [3]), "lr", 5) == [1.0, 0.5, 0.25, 0.125, 0.125]
    parts = [LinearWD(optimizer, 0.0, 1.0, 2), ConstantWD(optimizer, 0.5)]
    assert values(SequentialWD(optimizer, parts), "weight_decay", 4) == [0.0, 0.5, 0.5, 0.5]


def test_a_chain_multiplies():
    optimizer = make_optimizer()
    chain = ChainedLR([ExponentialLR(optimizer, 1.0, 1, 0.5), MultiStepLR(optimizer, 8.0, 0.1, [2])])
    assert values(chain, "lr", 4) == pytest.approx([1.0, 0.5, 0.025, 0.0125])


def test_parts_of_other_optimizers_are_refused():
    optimizer, other = make_optimizer({"tags": ("a",)}), make_optimizer()
    rate = ConstantLR(optimizer, 0.1, 3)
    for part in (ConstantWD(optimizer, 0.1), ConstantLR(other, 0.1)):
        with pytest.raises(ConfigError, match="SequentialLR cannot contain this Constant"):
            SequentialLR(optimizer, [rate, part])
    tagged = ConstantLR(optimizer, 0.1, 3, param_group_tags="a")
    with pytest.raises(ConfigError, match="other param_group_tags"):
        SequentialLR(optimizer, [rate, tagged])
    assert SequentialLR(optimizer, [tagged, tagged]).param_group_tags == {"a"}
    with pytest.raises(ConfigError, match="its factors would be lost"):
        SequentialLR(optimizer, [ScalePerParamLR(optimizer, rate), rate], [3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda o: LinearLR(o, 0.1, end_lr=1.0, total_iters=3),
            "no argument 'end_lr'(.|\n)*end_learning_rate",
        ),
        (lambda o: LinearLR(o, 0.1, 1.0), "LinearLR needs total_iters"),
        (lambda o: LinearLR(o, 0.1, 1.0, 3, total_iters=3), "got total_iters twice"),
        (lambda o: ConstantLR(o, 0.1, 2, 3, 4), "expected at most 2 arguments of ConstantLR, got 4"),
        (lambda o: LinearLR(o, -0.1, 1.0, 3), "initial_learning_rate of LinearLR is -0.1"),
        (lambda o: LinearLR(o, 0.1, float("nan"), 3), "end_learning_rate of LinearLR is nan"),
        (lambda o: LinearWD(o, 0.1, "high", 3), "end_val of LinearWD is 'high'"),
        (lambda o: LinearLR(o, 0.1, 1.0, 2.5), "total_iters of LinearLR is 2.5"),
        (lambda o: ExponentialLR(o, 0.1, 0, 0.5), "total_iters of ExponentialLR is 0"),
        (lambda o: CyclicLR(o, 0.1, 1.0, mode="square"), "mode of CyclicLR is 'square'(.|\n)*'triangular2'"),
        (lambda o: OneCycleLR(o, 0.1, 1.0, pct_start=1.5), "pct_start of OneCycleLR is 1.5"),
        (lambda o: MultiStepLR(o, 0.1, 0.5, [3, 2]), "milestones >= 0 in ascending order, got .3, 2."),
        (lambda o: MultiStepLR(o, 0.1, 0.5, 3), "milestones of MultiStepLR is 3"),
        (lambda o: LRScheduler(o, 0.1), "got LRScheduler, which has no schedule_class"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    optimizer = make_optimizer()
    with pytest.raises(ConfigError, match=message):
        make(optimizer)
    assert optimizer.param_groups[0]["lr"] == 5.0


def test_a_user_defined_scheduler():
    @dataclasses.dataclass(frozen=True)
    class Halving(schedules.Schedule):
        initial: float

        def value(self, step):
            return self.initial / 2**step

    class HalvingLR(LRScheduler):
        schedule_class = Halving

    assert values(HalvingLR(make_optimizer(), initial_learning_rate=1.0), "lr", 3) == [1.0, 0.5, 0.25]
