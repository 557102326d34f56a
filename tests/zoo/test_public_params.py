"""The public Model Zoo's params files are understood, and their models traced at full size."""

import pytest

from headwater.config import load_params
from headwater.plan.trace import trace_step
from headwater.trainer.zoo_job import zoo_trainable
from shared_data import SHARED

ROOT = SHARED / "public_params"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.yaml"))

pytestmark = pytest.mark.skipif(not FILES, reason="the public params files are not here")


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_understood_and_its_model_traced_at_full_size(file):
    config = load_params(ROOT / file)
    trainable = zoo_trainable(config.init, 64 if "nlp" in file else None)
    trace = trace_step(
        trainable.model, trainable.example(1), config.init.precision.precision, loss_function=trainable.loss
    )
    assert len(trace.costs) > 1


def test_all_are_here():
    assert len(FILES) == 113
