"""Optimizers, parameter groups and schedulers from settings, including those of public params files."""

import pytest
import torch
import yaml

import headwater.optim
from headwater.core.errors import ConfigError
from headwater.optim import (
    configure_lr_scheduler,
    configure_optimizer,
    configure_param_groups,
    configure_scheduler,
)
from headwater.optim.lr_scheduler import ChainedLR, ConstantLR, LRScheduler, ScalePerParamLR, SequentialLR
from headwater.optim.weight_decay_scheduler import CosineDecayWD
from shared_data import SHARED

PUBLIC = SHARED / "public_params"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.decoder = torch.nn.ModuleDict({"linear": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4)})
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)


def sgd(*groups):
    groups = groups or ({},)
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **g} for g in groups], lr=5.0)


def rates(scheduler, steps):
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("written", "kind"),
    [("AdamW", "AdamW"), ("adamw", "AdamW"), ("AdaFactor", "Adafactor"), ("sgd", "SGD"), ("lamb", "Lamb")],
)
def test_optimizers_by_name(written, kind):
    optimizer = configure_optimizer(written, Model().parameters(), learning_rate=0.5)
    assert type(optimizer) is getattr(headwater.optim, kind)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_arguments_as_yaml_reads_them():
    optimizer = configure_optimizer(
        "AdamW", Model().named_parameters(), lr="1e-3", betas=[0.9, "0.95"], eps="1e-6", correct_bias=True,
        weight_decay=0.1, adjust_learning_rate={"embedding": 0.5},
    )  # fmt: skip
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.95), 1e-6)
    assert group["param_names"][0] == "embedding.weight"


def test_a_schedule_sets_the_initial_rate():
    warm_up = {"scheduler": "Linear", "initial_learning_rate": 0.25, "end_learning_rate": 1.0, "steps": 4}
    optimizer = configure_optimizer("SGD", Model().parameters(), learning_rate=[warm_up], momentum=0.9)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("AdmaW", {}, "unknown optimizer 'AdmaW'(.|\n)*did you mean AdamW"),
        ("lbfgs", {}, "LBFGS cannot be used here"),
        ("AdamW", {"momentum": 0.9}, "AdamW takes no argument 'momentum'"),
        ("AdamW", {"weight_decay_rate": 0.9}, "write weight_decay;"),
        ("AdamW", {"correct_bias": False}, "does not support correct_bias: false"),
        ("AdamW", {"lr": 0.1, "learning_rate": 0.1}, "lr and learning_rate"),
        ("AdamW", {"lr": -0.1}, "AdamW cannot be built: Invalid learning rate"),
        ("Lion", {"betas": [0.9, 1.5]}, "expected betas >= 0 and < 1"),
    ],
)
def test_wrong_optimizers_are_refused(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        configure_optimizer(name, Model().parameters(), **kwargs)


def test_biases_norms_and_frozen_parameters_are_told_apart():
    model = Model()
    groups = configure_param_groups(model, {"weight_decay": 0.1, "betas": [0.9, 0.95]})
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["params"] == [model.embedding.weight, model.decoder["linear"].weight]
    assert len(groups[1]["params"]) == 3
    optimizer = configure_optimizer("AdamW", groups, lr=0.1, weight_decay=0.1)
    CosineDecayWD(optimizer, 0.5, 0.1, 10)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_rates_are_adjusted_by_kind_of_layer_or_pattern():
    model = Model()
    adjust = {"decoder_kernel": 0.5, "emb*": 2.0}
    groups = configure_param_groups(model, {"adjust_learning_rate": adjust})
    factors = {id(p): g["adjust_learning_rate"] for g in groups for p in g["params"]}
    assert factors[id(model.embedding.weight)] == 2.0
    assert factors[id(model.decoder["linear"].weight)] == 0.5
    assert factors[id(model.decoder["linear"].bias)] == 1.0
    optimizer = configure_optimizer("SGD", groups, lr=1.0)
    scheduler = configure_lr_scheduler(optimizer, 0.1, adjust)
    assert isinstance(scheduler, ScalePerParamLR)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([0.05, 0.1, 0.2])


def test_tags_by_pattern():
    filters = [{"params": "*.linear.*", "tag": "a"}, {"params": ["*norm*", "*linear.bias"], "tag": "b"}]
    model = Model()
    groups = configure_param_groups(model, {"params": filters})
    tags = {id(p): g.get("tags") for g in groups for p in g["params"]}
    assert tags[id(model.embedding.weight)] is None
    assert tags[id(model.decoder["linear"].bias)] == ("a", "b")
    optimizer = configure_optimizer("SGD", groups, lr=1.0)
    configure_scheduler(optimizer, {"ConstantLR": {"learning_rate": 0.5, "param_group_tags": "b"}})
    assert {g.get("tags"): g["lr"] for g in optimizer.param_groups} == {
        None: 1.0, ("a",): 1.0, ("a", "b"): 0.5, ("b",): 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"adjust_learning_rate": {"*head*": 0.5}}, "no trainable parameter matches"),
        ({"params": [{"params": "*frozen*", "tag": "a"}]}, "params of tag a"),
        ({"params": [{"pattern": "*", "tag": "a"}]}, "the keys params and tag"),
    ],
)
def test_patterns_that_match_nothing_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        configure_param_groups(Model(), params)


LINEAR = {"initial_learning_rate": 1, "end_learning_rate": 0}


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        ("1e-1", [0.1, 0.1, 0.1]),
        (0, [0.0, 0.0, 0.0]),
        ({"scheduler": "Constant", "learning_rate": 0.25}, [0.25, 0.25, 0.25]),
        ({"scheduler": "linear", **LINEAR, "decay_steps": 2}, [1.0, 0.5, 0.0]),
        ({"scheduler": "LinearLR", **LINEAR, "steps": 2}, [1.0, 0.5, 0.0]),
        ({"LinearLR": {**LINEAR, "total_iters": 2}}, [1.0, 0.5, 0.0]),
        ([{"scheduler": "CosineDecay", **LINEAR, "total_iters": 2}], [1.0, 0.5, 0.0]),
        (
            {"scheduler": "PiecewiseConstant", "values": [1.0, 0.5], "boundaries": [2]},
            [1.0, 1.0, 0.5],
        ),
        ({"scheduler": "Exponential", "learning_rate": 1.0, "decay_rate": 0.5, "steps": 1}, [1, 0.5, 0.25]),
        (
            [{"scheduler": "Linear", **LINEAR, "steps": 2}, {"scheduler": "Constant", "learning_rate": 0.25}],
            [1.0, 0.5, 0.25],
        ),
        (
            {"SequentialLR": {"schedulers": [
                {"LinearLR": {**LINEAR, "total_iters": 5}}, {"ConstantLR": {"learning_rate": 0.25}},
            ], "milestones": [2]}},
            [1.0, 0.8, 0.25],
        ),
        (
            [
                {"scheduler": "Exponential", "main_scheduler": "chained", "initial_learning_rate": 1.0,
                 "decay_rate": 0.5, "decay_steps": 1},
                {"scheduler": "MultiStep", "initial_learning_rate": 1.0, "gamma": 0.1, "milestones": [1]},
            ],
            [1.0, 0.05, 0.025],
        ),
    ],
)  # fmt: skip
def test_learning_rates_in_every_spelling(rate, expected):
    scheduler = configure_lr_scheduler(sgd(), rate)
    assert isinstance(scheduler, LRScheduler)
    assert rates(scheduler, 3) == pytest.approx(expected)


def test_schedulers_made_from_learning_rates():
    assert configure_lr_scheduler(sgd(), None) is None
    assert type(configure_lr_scheduler(sgd(), 0.1)) is ConstantLR
    constant = {"scheduler": "Constant", "learning_rate": 0.25, "total_iters": 2}
    assert type(configure_lr_scheduler(sgd(), [constant, constant])) is SequentialLR
    chained = [{**constant, "main_scheduler": "Chained"}, constant]
    assert type(configure_lr_scheduler(sgd(), chained)) is ChainedLR


def test_tags_apply_to_parts_of_a_scheduler():
    optimizer = sgd({"tags": ("a",)}, {})
    parts = [{"LinearLR": {**LINEAR, "total_iters": 2}}, {"ConstantLR": {"learning_rate": 0.25}}]
    scheduler = configure_scheduler(
        optimizer, {"SequentialLR": {"schedulers": parts, "param_group_tags": "a"}}
    )
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 5.0]
    scheduler.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 5.0]


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ({"scheduler": "Linaer", **LINEAR}, "unknown scheduler 'Linaer'(.|\n)*did you mean Linear"),
        ({"scheduler": "Linear", **LINEAR, "total_steps": 3}, "write total_iters"),
        ({"scheduler": "Linear", **LINEAR}, "LinearLR needs total_iters"),
        (
            {"LinearWD": {"initial_val": 1.0, "end_val": 0.0, "total_iters": 2}},
            "unknown scheduler 'LinearWD'",
        ),
        ({"LinearLR": {}, "ConstantLR": {}}, "one name of a scheduler, got LinearLR, ConstantLR"),
        ([], "empty list"),
        ([0.1], "expected a scheduler to be a mapping, got 0.1"),
        ({"SequentialLR": {"schedulers": []}}, "SequentialLR needs the argument schedulers"),
        ({"SequentialLR": {"scheduler": []}}, "write schedulers"),
        ({"ChainedLR": {"schedulers": [], "milestones": [3]}}, "ChainedLR takes no argument 'milestones'"),
        ({"ScalePerParamLR": {}}, "ScalePerParamLR needs the argument scheduler"),
        ("fast", "learning_rate of ConstantLR is 'fast'"),
        (
            [{"main_scheduler": "both", "scheduler": "Constant", "learning_rate": 1.0}],
            "expected main_scheduler to be sequential or chained, got both",
        ),
    ],
)
def test_wrong_schedules_are_refused(rate, message):
    with pytest.raises(ConfigError, match=message):
        configure_lr_scheduler(sgd(), rate)


def entries(node):
    """Every optimizer and scheduler section in a params file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "optimizer" and isinstance(value, dict):
                yield "optimizer", value
            elif key == "schedulers" and isinstance(value, list):
                yield from (("scheduler", entry) for entry in value)
            yield from entries(value)
    elif isinstance(node, list):
        for value in node:
            yield from entries(value)


def tags_of(entry):
    (arguments,) = entry.values()
    return {"tags": (arguments["param_group_tags"],)} if "param_group_tags" in arguments else {}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public params files are not here")
def test_every_public_params_file_is_understood():
    seen = {"optimizer": 0, "scheduler": 0}
    for file in sorted(PUBLIC.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            for what, entry in entries(document):
                seen[what] += 1
                if what == "scheduler":
                    configure_scheduler(sgd(tags_of(entry)), entry)
                    continue
                older = "optimizer_type" in entry
                name = entry["optimizer_type"] if older else next(iter(entry))
                arguments = dict(entry if older else entry[name] or {})
                for key in ("optimizer_type", "loss_scaling_factor", "params"):
                    arguments.pop(key, None)
                configure_optimizer(name, Model().parameters(), **arguments)
    assert seen["optimizer"] > 100
    assert seen["scheduler"] > 200
