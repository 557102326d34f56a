"""Which optimizer updates each parameter, and with which options it keeps a parameter's state."""

import gc

import pytest
import torch
from torch import nn

from headwater.api.updaters import Updaters, live_optimizers
from headwater.core.errors import ConfigError
from headwater.core.stage import ParamSpec


@pytest.fixture
def params():
    return {name: nn.Parameter(torch.zeros(2, 2)) for name in ("first", "second")}


def names_of(params):
    return {id(param): name for name, param in params.items()}


def specs(params):
    return [
        ParamSpec(name, tuple(param.shape), param.dtype, param.dtype, requires_grad=param.requires_grad)
        for name, param in params.items()
    ]


def noted(params, optimizer):
    updaters = Updaters(lambda: "cpu")
    updaters.note(optimizer, names_of(params))
    return updaters


def test_an_optimizer_is_new_to_its_parameters_once(params):
    optimizer = torch.optim.SGD([params["first"]], lr=0.1)
    updaters = Updaters(lambda: "cpu")
    assert updaters.note(optimizer, names_of(params)) == {"first"}
    assert updaters.note(optimizer, names_of(params)) == set()
    assert updaters.updater_of("first") is optimizer
    assert updaters.updater_of("second") is None


def test_the_last_optimizer_that_stepped_has_a_parameter(params):
    updaters = noted(params, torch.optim.SGD(params.values(), lr=0.1))
    second = torch.optim.Adam([params["second"]])
    assert updaters.note(second, names_of(params)) == {"second"}
    assert {name: spec.name for name, spec in updaters.specs.items()} == {"first": "SGD", "second": "Adam"}


def test_a_deleted_optimizer_updates_nothing(params):
    updaters = noted(params, torch.optim.SGD(params.values(), lr=0.1))
    gc.collect()
    assert updaters.updater_of("first") is None


def test_entries_follow_renamed_parameters(params):
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    renamed = noted(params, optimizer).renamed({"new": "second", "other": "unknown"})
    assert renamed.updater_of("new") is optimizer
    assert list(renamed.specs) == ["new"]


def test_changing_a_copy_leaves_the_original_unchanged(params):
    updaters = noted(params, torch.optim.SGD([params["first"]], lr=0.1))
    copied = updaters.copy()
    copied.note(torch.optim.Adam([params["second"]]), names_of(params))
    assert list(updaters.specs) == ["first"]
    assert list(copied.specs) == ["first", "second"]


def test_only_options_that_need_another_state_count_as_a_change(params):
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    updaters = noted(params, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert updaters.changed(optimizer, names_of(params)) == {}
    optimizer.param_groups[0]["momentum"] = 0.9
    changed = updaters.changed(optimizer, names_of(params))
    assert {name: options["momentum"] for name, options in changed.items()} == {"first": 0.9, "second": 0.9}
    for name, options in changed.items():
        updaters.begin_state(name, options)
    assert updaters.changed(optimizer, names_of(params)) == {}


def test_a_state_cannot_get_a_tensor_that_it_began_without(params):
    optimizer = torch.optim.Adam(params.values())
    updaters = noted(params, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    changed = updaters.changed(optimizer, names_of(params))
    spec = ParamSpec("first", (2, 2), torch.float32, torch.float32)
    with pytest.raises(ConfigError, match=r"needs the state .*max_exp_avg_sq"):
        updaters.keep_state(spec, changed["first"])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), 0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 4),
        (torch.optim.Adam, 8),
    ],
    ids=["SGD", "momentum", "Adam"],
)
def test_bytes_of_state_are_those_of_each_element(params, make, expected):
    assert noted(params, make(list(params.values()))).state_bytes("exact", specs(params)) == expected


def test_the_bytes_are_those_of_the_optimizer_that_keeps_most(params):
    updaters = noted(params, torch.optim.SGD([params["first"]], lr=0.1))
    adam = torch.optim.Adam([params["second"]])
    updaters.note(adam, names_of(params))
    assert updaters.state_bytes("exact", specs(params)) == 8


def test_parameters_in_bf16_have_half_the_state(params):
    updaters = noted(params, torch.optim.Adam(params.values()))
    params["second"].data = torch.zeros(2, 6, dtype=torch.bfloat16)
    assert updaters.state_bytes("exact", specs(params)) == (4 * 8 + 12 * 4) / 16
    params["first"].requires_grad_(False)
    assert updaters.state_bytes("exact", specs(params)) == 4


def test_parameters_of_integers_have_no_state(params):
    updaters = noted(params, torch.optim.Adam(params.values()))
    params["second"].requires_grad_(False).data = torch.zeros(4, dtype=torch.int64)
    assert updaters.state_bytes("exact", specs(params)) == 8


def test_optimizers_are_found_by_their_parameters(params):
    optimizer = torch.optim.SGD([params["first"]], lr=0.1)
    assert optimizer in live_optimizers([params["first"]])
    assert live_optimizers([params["second"]]) == []
