"""Packed texts (use_vsl) have the same losses as separate texts."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import DataError
from headwater.data.modes import ModeOptions
from headwater.data.packing import pack
from headwater.data.prepare import prepare
from headwater.data.reader import (
    GptHDF5DataProcessor,
    GptHDF5DataProcessorConfig,
    GptHDF5MapDataProcessor,
    open_samples,
)
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE
from headwater.models.decoder import Decoder

LENGTH = 48


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepare the same records packed and not packed."""
    folder = tmp_path_factory.mktemp("vsl")
    words = np.random.default_rng(0).integers(0, 100, (60, 12)).astype(str)
    records = [
        {"prompt": " ".join(line[: 2 + n % 5]), "completion": " ".join(line[6 : 7 + n % 6])}
        for n, line in enumerate(words)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, use_vsl in (("packed", True), ("single", False)):
        settings = PrepareSettings(
            TrainBPE(300),
            LENGTH,
            val_fraction=0,
            mode="prompt_completion",
            options=ModeOptions(use_vsl=use_vsl),
        )
        prepare([folder / "a.jsonl"], folder / name, settings)
    return folder


def model(kind):
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    config = {**sizes, "max_position_embeddings": LENGTH, "position_embedding_type": kind}
    return Decoder(
        DecoderConfig.model_validate({**config, "initializer": {"name": "normal", "std": 0.3}})
    ).eval()


def losses(decoder, samples):
    """Return the loss of each sample, summed over its labels, and its labels."""
    found = []
    for number in range(len(samples)):
        batch = samples.__getitems__([number])
        with torch.no_grad():
            found.append((decoder(batch) * batch["attention_mask"].sum(), batch))
    return found


@pytest.mark.parametrize("kind", ["learned", "rotary", "alibi"])
def test_packed_losses_equal_those_of_separate_texts(prepared, kind):
    decoder = model(kind)
    packed, single = (open_samples([prepared / name / "train"]) for name in ("packed", "single"))
    assert len(packed) < len(single) / 2
    alone = {}
    for loss, batch in losses(decoder, single):
        count = int(batch["attention_mask"].nonzero()[-1, 1]) + 1
        alone[tuple(batch["input_ids"][0, :count].tolist())] = loss
    for loss, batch in losses(decoder, packed):
        ids, spans = batch["input_ids"][0].tolist(), batch["attention_span"][0].tolist()
        expected, place = 0.0, 0
        while place < LENGTH and (spans[place] or batch["attention_mask"][0, place:].any()):
            stop = place + spans[place] + 1
            expected += alone.pop(tuple(ids[place:stop]))
            place = stop
        torch.testing.assert_close(loss, expected)
    assert not alone


def test_both_processors_read_packed_data(prepared):
    for name, keys in (("packed", 5), ("single", 3)):
        section = {"data_dir": prepared / name / "train", "batch_size": 2, "use_vsl": name == "packed"}
        for processor in (GptHDF5DataProcessor, GptHDF5MapDataProcessor):
            source = processor(GptHDF5DataProcessorConfig(**section))
            batch = next(iter(source.create_dataloader()))
            assert len(batch) == keys
            assert {tuple(each.shape) for each in batch.values()} == {(2, LENGTH)}


def test_errors_name_unsuitable_data(prepared):
    with pytest.raises(DataError, match="prepare the data with --use_vsl"):
        open_samples([prepared / "single/train"], spans=True)
    with pytest.raises(DataError, match="5 channels, but 3"):
        open_samples([prepared / "single/train", prepared / "packed/train"])
    with pytest.raises(DataError, match="sink tokens"):
        open_samples([prepared / "packed/train"], sinks=[1])


@given(sizes=st.lists(st.integers(1, 20), max_size=60))
def test_packing_keeps_all_examples_and_is_dense(sizes):
    numbers, ends = pack(np.array(sizes, dtype=np.int64), 20)
    assert sorted(numbers) == list(range(len(sizes)))
    rooms = [sum(sizes[n] for n in part) for part in np.split(numbers, ends)[:-1]]
    assert all(0 < room <= 20 for room in rooms)
    assert not rooms or ends[-1] == len(sizes)
    # With best fit, at most one sample is half empty or more.
    assert sum(room <= 10 for room in rooms) <= 1
