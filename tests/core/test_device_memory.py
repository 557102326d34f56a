"""torch's allocator on a GPU uses segments that grow, unless the user has configured it."""

import os

import pytest
import torch

from headwater.core.device_memory import let_segments_grow
from headwater.plan.footprint import Peak

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture
def changed(monkeypatch):
    """The settings that were changed in the running allocator."""
    settings = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


def test_a_process_and_its_children_get_segments_that_grow(changed):
    assert let_segments_grow() and let_segments_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert changed == [], "torch reads the variable when it initialises CUDA"


def test_after_cuda_is_initialised_the_running_allocator_is_changed(changed, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert let_segments_grow()
    assert changed == ["expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("setting", "grows"),
    [("max_split_size_mb:128", False), ("garbage_collection_threshold:0.8, expandable_segments: true", True)],
)
def test_settings_of_the_user_are_kept(name, setting, grows, changed, monkeypatch):
    monkeypatch.setenv(name, setting)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert let_segments_grow() is grows
    assert [os.environ.get(each) for each in NAMES if each != name] == [None, None]
    assert os.environ[name] == setting and changed == []


def test_a_plan_counts_more_bytes_for_segments_of_fixed_sizes():
    growing, fixed = (Peak(900, 100, ranges=ranges, on_gpu=True).allocator for ranges in (True, False))
    assert (growing, fixed) == (60, 200)
