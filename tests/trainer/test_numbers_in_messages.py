"""Numbers in messages agree with their nouns."""

import io

import pytest
from rich.console import Console

from headwater.core.errors import DataError
from headwater.data.packing import split_samples
from headwater.trainer.callback import ValidateEnd
from headwater.trainer.progress import ProgressBar


@pytest.mark.parametrize(("batches", "words"), [(1, "(1 batch)"), (2, "(2 batches)")])
def test_an_evaluation(batches, words):
    file = io.StringIO()
    ProgressBar(Console(file=file, width=200)).on_validate_end(ValidateEnd(4, 0, 0.5, batches))
    assert words in file.getvalue()


def test_too_little_text():
    with pytest.raises(DataError, match="it makes 1 sample, too few"):
        split_samples(1, 0.1, seed=0)
