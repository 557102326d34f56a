"""Samples of the book that ships with the package."""

import gzip

from headwater.data.assets import sample_text
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE


def book_samples(folder, *, val_fraction):
    """Return a folder with samples of 16 tokens from a vocabulary of 300, in `train` and `val`."""
    text = folder / "text.txt"
    text.write_text(gzip.decompress(sample_text().read_bytes()).decode()[:20_000])
    prepare([text], folder / "samples", PrepareSettings(TrainBPE(300), 16, val_fraction=val_fraction))
    return folder / "samples"
