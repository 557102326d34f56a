"""T5's span corruption: restorable, dependent only on the draw, with the public params files."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.data import SpanCorruptionDataConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.core.errors import DataError
from headwater.data.text.span_corruption import (
    corrupt,
    longest_text,
    read_corrupted_texts,
    span_counts,
)

WORDS = [f"w{number}" for number in range(50)]


def restored(read, write, first_sentinel):
    """Return the original text: each sentinel replaced by its span."""
    spans = {}
    for token in write:
        if token > 1000:
            spans[int(token)] = span = []
        else:
            span.append(int(token))
    assert list(spans) == list(range(first_sentinel, first_sentinel - len(spans), -1))
    return list(itertools.chain(*(spans[int(token)] if token > 1000 else [int(token)] for token in read)))


@given(length=st.integers(2, 600), seed=st.integers(0, 10**6))
def test_spans_restore_the_text(length, seed):
    tokens = np.arange(length, dtype=np.int32)
    read, write = corrupt(tokens, 2000, np.random.default_rng(seed))
    left_out, spans = span_counts(length)
    assert restored(read, write, 2000) == list(range(length))
    assert len(read) == length - left_out + spans and len(write) == left_out + spans
    assert write[0] == 2000 and read[0] == 0


def test_fifteen_percent_of_the_tokens_in_spans_of_three():
    left_out, spans = span_counts(512)
    assert (left_out, spans) == (77, 26)
    sizes, places = [], np.zeros(100)
    for seed in range(400):
        read, _ = corrupt(np.arange(100, dtype=np.int32), 2000, np.random.default_rng(seed))
        places[read[read < 1000]] += 1
        sizes += [int(step) - 1 for step in np.diff(read[read < 1000]) if step > 1]
    assert np.mean(sizes) == pytest.approx(3, abs=0.1) and max(sizes) > 5
    # Except at the ends, every token is removed with the same probability.
    assert np.allclose(1 - places[10:80] / 400, 0.15, atol=0.08)


def test_longest_text_has_the_length_of_t5():
    assert longest_text(512, 114) == 568
    assert longest_text(512, 60) < 568


@pytest.fixture
def data(tmp_path):
    """Return a folder with a vocabulary of 54 tokens and two files of texts; one of them is empty."""
    (tmp_path / "vocab.txt").write_text("\n".join(["<pad>", "</s>", "<unk>", "<s>", *WORDS]) + "\n")
    texts = tmp_path / "texts"
    texts.mkdir()
    generator = np.random.default_rng(0)
    for name, lengths in (("a.txt", [40, 7, 90]), ("b.txt", [1, 0, 25])):
        lines = (" ".join(generator.choice(WORDS, length)) for length in lengths)
        (texts / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def section(folder, **changes):
    values = {
        "data_processor": "T5DynamicDataProcessor",
        "src_data_dir": str(folder / "texts"),
        "src_vocab_file": str(folder / "vocab.txt"),
        "src_max_sequence_length": 32,
        "tgt_max_sequence_length": 12,
        "extra_ids": 10,
        "batch_size": 2,
    }
    return SpanCorruptionDataConfig.model_validate({**values, **changes})


def t5(size=54, extra_ids=10):
    return Seq2SeqConfig.model_validate({"name": "t5", "src_vocab_size": size, "extra_ids": extra_ids})


def test_samples_are_pieces_of_the_texts(data):
    samples = read_corrupted_texts(section(data), t5())
    longest = longest_text(32, 12)
    expected = sum(len(range(0, length, longest)) - (length % longest == 1) for length in (40, 7, 90, 25))
    assert len(samples) == expected and samples.sequence_length == 32
    batch = samples.__getitems__(range(len(samples)))
    assert batch["input_ids"].shape == (expected, 32) and batch["labels"].shape == (expected, 12)
    for row, draw in enumerate(range(len(samples))):
        read = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        counted = batch["decoder_attention_mask"][row].bool()
        labels, begun = batch["labels"][row][counted], batch["decoder_input_ids"][row][counted]
        assert read[-1] == 1 and labels[-1] == 1 and begun[0] == 3
        assert begun[1:].tolist() == labels[:-1].tolist()
        assert labels[0] == 63, "the first sentinel is the last of the vocabulary"
        lifted = [
            np.where(part >= 54, part + 1000, part) for part in (read[:-1].numpy(), labels[:-1].numpy())
        ]
        assert restored(*lifted, 1063) == samples.texts[draw].tolist()
        assert (batch["input_ids"][row][batch["attention_mask"][row] == 0] == 0).all()


def test_removed_spans_depend_only_on_the_draw(data):
    samples = read_corrupted_texts(section(data), t5())
    size = len(samples)
    first, again = samples.__getitems__([2, 1, 0]), samples.__getitems__([0])
    assert first["input_ids"][2].tolist() == again["input_ids"][0].tolist()
    later = samples.__getitems__([size])
    assert later["input_ids"].tolist() != again["input_ids"].tolist()
    other = read_corrupted_texts(section(data, shuffle_seed=5), t5()).__getitems__([0])
    assert other["input_ids"].tolist() != again["input_ids"].tolist()


def test_packing_joins_texts(data):
    packed = read_corrupted_texts(section(data, pack_sequences=True), t5())
    total = 40 + 7 + 90 + 1 + 25
    assert sum(len(packed.texts[index]) for index in range(len(packed))) == total
    assert len(packed) == -(-total // longest_text(32, 12))


def test_meta_dat_lists_the_files_that_are_read(data):
    (data / "texts" / "meta.dat").write_text("b.txt 3\n")
    assert len(read_corrupted_texts(section(data), t5())) == 1


def test_loss_weight_is_the_inverse_number_of_labels(data):
    batch = read_corrupted_texts(section(data, dynamic_loss_weight=True), t5()).__getitems__([0, 2])
    counted = batch["decoder_attention_mask"].sum(1)
    assert (batch["loss_weight"][:, 0] * counted).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_ids": 1}, "extra_ids"),
        ({"extra_ids": 11}, "11 extra_ids do not fit into the model's 64"),
        ({"sos_token": "<go>"}, "sos_token is '<go>'"),
        ({"oov_token": "<what>"}, "oov_token"),
        ({"src_data_dir": "/nowhere"}, "does not exist"),
        ({"src_vocab_file": "/nowhere/vocab.txt"}, "cannot read"),
    ],
)
def test_unsuitable_data_are_refused(data, changes, message):
    with pytest.raises(DataError, match=message):
        read_corrupted_texts(section(data, **changes), t5())


def test_invalid_lists_of_files_are_errors(data):
    for line in ("c.txt 3", "a.txt many"):
        (data / "texts" / "meta.dat").write_text(line)
        with pytest.raises(DataError, match=r"meta\.dat, line 1"):
            read_corrupted_texts(section(data), t5())
