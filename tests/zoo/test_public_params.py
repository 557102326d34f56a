"""The public Model Zoo's params files are understood, and their models traced at full size."""

import collections
import os
from pathlib import Path

import pytest

from headwater.config import load_params
from headwater.core.errors import ConfigError
from headwater.plan.trace import trace_step
from headwater.trainer.zoo_job import zoo_trainable

SHARED = Path(os.environ.get("HEADWATER_SHARED") or Path(__file__).resolve().parents[2].parent / "shared")
ROOT = SHARED / "public_params"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.yaml"))

NOT_YET = {
    "unknown key 'params'": 1,
}
"""What does not exist here, and in how many files."""

pytestmark = pytest.mark.skipif(not FILES, reason="the public params files are not here")


def understood(file):
    """The run that a file describes; what is missing here where it cannot be understood."""
    try:
        return load_params(ROOT / file)
    except ConfigError as error:
        return error.what.partition(" (and ")[0]


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_understood_and_its_model_traced_at_full_size(file):
    config = understood(file)
    if isinstance(config, str):
        assert config in NOT_YET
        return
    trainable = zoo_trainable(config.init, 64 if "nlp" in file else None)
    trace = trace_step(
        trainable.model, trainable.example(1), config.init.precision.precision, loss_function=trainable.loss
    )
    assert len(trace.costs) > 1


def test_what_is_missing_is_known():
    assert len(FILES) == 113
    missing = collections.Counter(config for config in map(understood, FILES) if isinstance(config, str))
    assert missing == NOT_YET
