"""Models of the transformers library: each trains with two slabs to the bits of plain PyTorch."""

import functools

import pytest
from harness import Setting, assert_equal, train_plain, train_streamed
from zoo_jobs import NAMES, zoo_job


@functools.cache
def plain(name):
    return train_plain(zoo_job(name), steps=3)


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_model_equals_plain_pytorch(name, setting, tmp_path):
    assert all(loss > 0 for loss in plain(name).losses)
    assert_equal(train_streamed(zoo_job(name), setting, tmp_path, steps=3), plain(name))
