"""Errors for wrong options of `headwater.backend`, and for a model without values."""

import traceback

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.errors import ConfigError, StreamError


@pytest.mark.parametrize(
    ("options", "what", "where", "remedy"),
    [
        ({"host_memory": "8 gigs"}, "'8 gigs' is not a size in bytes", "option host_memory", "8GiB"),
        ({"tier": "disc"}, "'disc'", "option tier", "write 'disk'"),
        ({"tier": "disk"}, "tier is disk, but no disk folder is given", "backend", "change tier"),
        ({"num_slabs": -2}, "num_slabs", "option num_slabs", "1"),
        ({"hostmemory": "8GiB"}, "backend has no option 'hostmemory'", None, "did you mean host_memory?"),
    ],
)
def test_a_wrong_option(options, what, where, remedy):
    with pytest.raises(ConfigError) as caught:
        hw.backend("CSX", **options)
    error = caught.value
    assert what in error.what and remedy in (error.remedy or "")
    assert where is None or where in (error.where or "")
    printed = "".join(traceback.format_exception(error))
    assert "pydantic" not in printed, "the reader sees one error"


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(StreamError, match="weights have no values") as caught:
        hw.compile(model, "CSX")(torch.randn(4, 8))
    assert "load_pretrained" in str(caught.value) and "torch.device('meta')" in str(caught.value)
