"""Errors for wrong options of `headwater.backend`, and for a model without values."""

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.backend_options import config_of
from headwater.config.sections import BackendConfig
from headwater.core.errors import ConfigError, StreamError
from headwater.core.warn_once import warn_once
from headwater.utils import CSConfig


@pytest.mark.parametrize(
    ("options", "what", "where", "remedy"),
    [
        ({"host_memory": "8 gigs"}, "expected a size in bytes, got '8 gigs'", "option host_memory", "8GiB"),
        ({"tier": "disc"}, "'disc'", "option tier", "write 'disk'"),
        (
            {"tier": "disk"},
            "tier is disk, but no disk folder is given",
            "backend",
            "disk=FOLDER in headwater.backend",
        ),
        ({"num_slabs": -2}, "num_slabs", "option num_slabs", "1"),
        ({"hostmemory": "8GiB"}, "backend has no option 'hostmemory'", None, "did you mean host_memory?"),
        (
            {"num_csx": 2, "cluster_config": {"rank_timeout_s": 60}},
            "expected num_csx or cluster_config, got both",
            "option cluster_config",
            "{'num_csx': 2, ...}",
        ),
    ],
)
def test_the_error_for_a_wrong_option_has_place_and_remedy(options, what, where, remedy):
    with pytest.raises(ConfigError) as caught:
        hw.backend("CSX", **options)
    error = caught.value
    assert what in error.what and remedy in (error.remedy or "")
    assert where is None or where in (error.where or "")
    printed = "".join(traceback.format_exception(error))
    assert "pydantic" not in printed, "the reader sees one error"


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ({"num_csx": 3}, {"cluster_config": {"num_csx": 3}}),
        ({"cluster_config": CSConfig(num_csx=1)}, {"cluster_config": {"num_csx": 1}}),
        ({"disk": "/tmp/store"}, {"disk": {"path": "/tmp/store"}}),
        ({"disk": Path("/tmp/store"), "tier": "disk"}, {"disk": {"path": "/tmp/store"}, "tier": "disk"}),
    ],
)
def test_short_forms_of_options_mean_keys_of_a_params_file(short, full):
    before = dict(short)
    assert config_of("CSX", short) == BackendConfig.model_validate({"backend_type": "CSX", **full})
    assert short == before


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"cluster_config": {"num_csx": 2, "num_memx": 1}}, "backend, option cluster_config.num_memx"),
        ({"cluster_config": {"max_restarts": 2}}, "backend, option cluster_config.max_restarts"),
        ({"updates": "in_backward"}, "backend, option updates"),
        ({"skip_padding": True}, "backend, option skip_padding"),
        ({"micro_batch_size": 4}, "backend, option micro_batch_size"),
    ],
)
def test_keys_that_only_a_run_can_obey_are_refused(options, where):
    with pytest.raises(ConfigError) as caught:
        config_of("CSX", options)
    assert caught.value.where == where


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(StreamError, match="weights have no values") as caught:
        hw.compile(model, "CSX")(torch.randn(4, 8))
    assert "load_pretrained" in str(caught.value) and "torch.device('meta')" in str(caught.value)


def test_a_budget_that_limits_nothing_gives_one_note(caplog):
    warn_once.cache_clear()
    backend = hw.backend("CSX", device_memory="8TiB")
    for _ in range(2):
        hw.compile(nn.Linear(3, 2), backend)(torch.ones(4, 3)).sum().backward()
    assert [message.startswith("device_memory") for message in caplog.messages] == [True]
