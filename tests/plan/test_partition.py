"""The division of a model's parameters into stages."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.core.errors import PlanError
from headwater.core.precision import Precision
from headwater.plan.partition import find_stages

FP32 = Precision()


def gpt2(layers=3):
    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def names(model):
    return [stage.name for stage in find_stages(model, FP32).stages]


def test_blocks_and_modules_beside_them_are_stages():
    assert names(gpt2()) == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
        "transformer.ln_f",
    ]


def test_every_parameter_is_in_exactly_one_stage():
    model = gpt2()
    found = [param for stage in find_stages(model, FP32).stages for param in stage.params]
    assert sorted(param.name for param in found) == sorted(name for name, _ in model.named_parameters())
    assert {param.name: param.shape for param in found} == {
        name: tuple(value.shape) for name, value in model.named_parameters()
    }


def test_stages_are_numbered_in_order():
    partition = find_stages(gpt2(), FP32)
    assert [stage.index for stage in partition.stages] == list(range(6))
    assert [unit.path for unit in partition.units] == [stage.name for stage in partition.stages]


def test_a_tied_weight_is_one_parameter_with_two_names():
    wte = find_stages(gpt2(), FP32).stages[0]
    assert [(param.name, param.aliases) for param in wte.params] == [
        ("transformer.wte.weight", ("lm_head.weight",))
    ]


def test_a_model_without_parameters():
    with pytest.raises(PlanError, match="ReLU has no parameters"):
        find_stages(nn.ReLU(), FP32)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(3, 4), [""]),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), ["0", "2"]),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))), ["0.0", "0.1"]),
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), ["a", "b"]),
    ],
    ids=["one layer", "sequence", "sequence of one", "dictionary"],
)
def test_small_models_have_the_expected_stages(model, expected):
    assert names(model) == expected


def test_a_tower_inside_a_container_is_divided_if_it_is_large():
    def tower(width):
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        return module

    model = nn.ModuleList([tower(32), tower(2)])
    assert names(model) == ["0.layers.0", "0.layers.1", "0.layers.2", "1"]


def test_parameters_of_a_container_are_a_separate_stage():
    model = nn.Module()
    model.token = nn.Parameter(torch.zeros(3))
    model.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    partition = find_stages(model, FP32)
    assert [(unit.path, unit.direct_only) for unit in partition.units] == [
        ("", True),
        ("blocks.0", False),
        ("blocks.1", False),
    ]
    assert [param.name for param in partition.stages[0].params] == ["token"]


@pytest.mark.parametrize("path", ["", "blocks"])
def test_a_container_with_parameters_beside_its_layers(path):
    class Blocks(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
            self.scale = nn.Parameter(torch.ones(2))

    model = Blocks() if not path else nn.ModuleDict({path: Blocks()})
    prefix = f"{path}." if path else ""
    assert names(model) == [path, f"{prefix}0", f"{prefix}1"]


def test_norms_and_fp64_keep_their_dtype_on_the_wire():
    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), RMSNorm(), nn.BatchNorm1d(4), nn.Linear(4, 4).double()
    )
    model[0].bias.requires_grad_(False)
    params = {p.name: p for stage in find_stages(model, Precision("bf16")).stages for p in stage.params}
    assert {name for name, p in params.items() if p.wire_dtype == torch.bfloat16} == {"0.weight", "0.bias"}
    assert params["4.weight"].wire_dtype == torch.float64
    assert params["1.weight"].wire_dtype == torch.float32
    assert params["0.weight"].dtype == torch.float32
    assert [name for name, p in params.items() if not p.requires_grad] == ["0.bias"]
