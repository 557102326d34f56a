"""Schedules for parameters of different tags equal groups of plain PyTorch; wrong options are refused."""

import pytest
import torch
import yaml
from torch import nn

from headwater.config import load_params
from headwater.core.errors import ConfigError
from headwater.optim.spec import OptimizerSpec
from headwater.store.rule import UpdateRule
from headwater.store.update import Update
from headwater.trainer.job import Job
from headwater.trainer.options import options_by_name
from headwater.trainer.zoo_job import zoo_trainable

RATE = {"initial_learning_rate": 0.0, "end_learning_rate": 1.0, "total_iters": 10}
INIT = {
    "backend": {"backend_type": "CPU"},
    "model": {
        "name": "gpt2", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "max_position_embeddings": 16,
    },
    "optimizer": {
        "AdamW": {
            "weight_decay": 0.0,
            "params": [
                {"params": ["*.ffn.*weight"], "tag": "wide"},
                {"params": "*self_attn.proj_q*", "tag": "queries"},
            ],
        }
    },
    "schedulers": [
        {"LinearLR": RATE},
        {"ConstantLR": {"learning_rate": 0.5, "param_group_tags": "wide"}},
        {"SequentialLR": {"schedulers": [{"LinearLR": RATE}], "param_group_tags": ["queries"]}},
        {"LinearWD": {"initial_val": 0.1, "end_val": 0.2, "total_iters": 10}},
        {"ConstantWD": {"val": 0.4, "param_group_tags": ["wide"]}},
    ],
    "loop": {"max_steps": 2},
}  # fmt: skip


def job(tmp_path, **changes):
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"init": INIT | changes}}))
    init = load_params(path).init
    return Job(init, zoo_trainable(init), train=None, batch_size=2)


def test_each_parameter_has_the_schedules_of_its_tags(tmp_path):
    options = options_by_name(job(tmp_path))(5)
    assert options("blocks.0.ffn.input.weight") == {"lr": 0.5, "weight_decay": 0.4}
    assert options("blocks.1.attention.qkv.weight") == pytest.approx({"lr": 0.5, "weight_decay": 0.15})
    assert options("embedding.weight") == pytest.approx({"lr": 0.5, "weight_decay": 0.15})
    assert options("blocks.0.ffn.input.bias") == {"lr": 0.5}  # biases do not decay unasked
    assert options_by_name(job(tmp_path))(0)("embedding.weight")["lr"] == 0.0


def test_one_learning_rate_for_all_parameters_needs_no_names(tmp_path):
    assert options_by_name(job(tmp_path, schedulers=[{"LinearLR": RATE}])) is None


@pytest.mark.parametrize(
    ("schedulers", "message"),
    [
        ([{"ConstantLR": {"learning_rate": 0.5, "param_group_tags": "wide"}}], "no schedule sets"),
        ([{"ConstantLR": {"learning_rate": 0.5, "param_group_tags": "wild"}}], "unknown tag"),
        ([{"LinearLR": RATE}, {"ConstantLR": {"learning_rate": 0.5}}], "SequentialLR"),
    ],
)
def test_invalid_schedules_are_refused(schedulers, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        options_by_name(job(tmp_path, schedulers=schedulers))


def test_updates_are_those_of_parameter_groups():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options = {"0.weight": {"lr": 0.1, "weight_decay": 0.3}, "1.weight": {"lr": 0.01}}
    update = Update(1, {"lr": 0.5, "weight_decay": 0.0}, by_name=lambda name: options.get(name, {}))
    spec = OptimizerSpec("AdamW", {"lr": 1.0})
    rule = UpdateRule(spec)
    expected = {name: value.detach().clone() for name, value in layers.named_parameters()}
    groups = [
        {"params": [p], "lr": 0.5, "weight_decay": 0.0, **options.get(name, {})}
        for name, p in layers.named_parameters()
    ]
    layers(torch.randn(4, 8)).square().sum().backward()
    for name, parameter in layers.named_parameters():
        states = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        found = spec.options(name, tuple(parameter.shape), update.options_of(name))
        rule.apply([expected[name]], [parameter.grad.clone()], [states], [None], found)
    spec.build(groups).step()
    for name, parameter in layers.named_parameters():
        assert torch.equal(expected[name], parameter.detach())
