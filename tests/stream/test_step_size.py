"""Size of a training step: how many functions and files of the package it runs through."""

import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from gpt_job import gpt_job
from harness import Setting, make_engine

import headwater

MOST_FUNCTIONS, MOST_FILES = 195, 45
"""Lower them when the step gets shorter. A reader of the step has to know each of these functions."""

_SOURCES = f"{Path(headwater.__file__).parent}/"


class Recorder:
    """Records the functions of the package that all threads call while `is_on`."""

    def __init__(self):
        self.is_on = False
        self.found = defaultdict(set)

    def __call__(self, frame, event, argument):
        code = frame.f_code
        # Hooks of `headwater.api`, and kernels for half precision, stay once a test has used them.
        others = f"{_SOURCES}api/", f"{_SOURCES}core/half_products.py"
        is_ours = code.co_filename.startswith(_SOURCES) and not code.co_filename.startswith(others)
        if self.is_on and event == "call" and is_ours:
            self.found[code.co_filename.removeprefix(_SOURCES)].add(code.co_qualname)

    def __str__(self):
        return "\n".join(f"{file}: {', '.join(sorted(names))}" for file, names in sorted(self.found.items()))


@pytest.fixture
def recorder():
    recorder, before = Recorder(), (sys.getprofile(), threading.getprofile())
    threading.setprofile(recorder)  # for threads that the engine starts
    sys.setprofile(recorder)
    yield recorder
    sys.setprofile(before[0])
    threading.setprofile(before[1])


def test_a_step_in_memory_runs_through_few_functions(recorder, tmp_path):
    job = gpt_job()
    with make_engine(job, Setting(in_place=True), tmp_path) as engine:
        for step in range(2):  # the first steps fill caches
            engine.train_step(job.batches(step), job.update(step))
        recorder.is_on = True
        engine.train_step(job.batches(2), job.update(2))
        recorder.is_on = False
    assert sum(map(len, recorder.found.values())) <= MOST_FUNCTIONS, str(recorder)
    assert len(recorder.found) <= MOST_FILES, str(recorder)
