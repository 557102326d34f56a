"""Dynamic masking: different masked tokens in every epoch."""

import csv

import pytest
import torch

from headwater.core.errors import DataError
from headwater.data.records import CSVRecords
from headwater.data.text.masking import NEEDED_TOKENS, MaskedTexts, Masking
from headwater.data.text.wordpiece import read_vocabulary

WORDS = [f"w{number}" for number in range(200)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
VOCAB_SIZE = len(VOCABULARY)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")

    def write(texts, *, vocab_size=VOCAB_SIZE, **changes):
        path = tmp_path / "texts.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["tokens", "segment_ids", "is_random_next"])
            for text in texts:
                writer.writerow([text, [0] * len(text), 1])
        keys = {"length": 64, "predictions": 12, "fraction": 0.15, "next_sentence": True, "segments": 2}
        ids = read_vocabulary(tmp_path / "vocab.txt", vocab_size, needed=NEEDED_TOKENS)
        return MaskedTexts([CSVRecords(path)], ids, Masking(**{**keys, "seed": 0, **changes}))

    return write


def text(count, start=0):
    return ["[CLS]", *WORDS[start : start + count], "[SEP]"]


def test_masked_ids_are_the_original_tokens(make):
    texts = make([text(50), text(30, 100)])
    batch = texts.__getitems__([0, 1])
    original = torch.zeros(2, 64, dtype=torch.int64)
    for row, (count, start) in enumerate([(50, 0), (30, 100)]):
        original[row, : count + 2] = torch.tensor([2, *range(5 + start, 5 + start + count), 3])
    restored = batch["input_ids"].clone()
    for row in range(2):
        counted = batch["masked_lm_weights"][row].bool()
        places = batch["masked_lm_positions"][row][counted]
        assert len(places) == round(0.15 * (50, 30)[row])
        assert torch.equal(original[row][places], batch["masked_lm_ids"][row][counted])
        restored[row][places] = batch["masked_lm_ids"][row][counted]
    assert torch.equal(restored, original)
    assert batch["attention_mask"].sum(1).tolist() == [52, 32]
    assert batch["next_sentence_label"].tolist() == [1, 1]


def test_masks_differ_between_epochs_and_are_fixed_per_draw(make):
    texts = make([text(50), text(30, 100)])
    first, again, later = (texts.__getitems__([draw])["masked_lm_positions"] for draw in (0, 0, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_mask_fractions_equal_the_paper(make):
    texts = make([text(60)], predictions=60, fraction=0.5)
    kinds = {"masked": 0, "same": 0, "other": 0}
    for draw in range(100):
        batch = texts.__getitems__([draw])
        places, answers = batch["masked_lm_positions"][0, :30], batch["masked_lm_ids"][0, :30]
        shown = batch["input_ids"][0][places]
        kinds["masked"] += int((shown == 4).sum())
        kinds["same"] += int((shown == answers).sum())
        kinds["other"] += int(((shown != answers) & (shown != 4)).sum())
    assert kinds["masked"] / 3000 == pytest.approx(0.8, abs=0.03)
    assert kinds["same"] / 3000 == pytest.approx(0.1, abs=0.03)
    assert kinds["other"] / 3000 == pytest.approx(0.1, abs=0.03)


def test_number_of_masks_is_limited_and_at_least_one(make):
    assert make([text(60)], predictions=4).__getitems__([0])["masked_lm_weights"].sum() == 4
    assert make([text(2)]).__getitems__([0])["masked_lm_weights"].sum() == 1
    assert make([text(0)]).__getitems__([0])["masked_lm_weights"].sum() == 0


def test_label_of_the_next_sentence_is_optional(make):
    assert "next_sentence_label" not in make([text(5)], next_sentence=False).__getitems__([0])


def test_errors_name_the_place(make, tmp_path):
    error = make([[1, 2]]).__getitems__([0])
    assert (
        isinstance(error, DataError) and "expected a list of tokens" in str(error) and "line 2" in str(error)
    )
    with pytest.raises(DataError, match="expected at most 100 tokens, the model's vocab_size; got 205"):
        make([text(5)], vocab_size=100)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY[:4]))
    with pytest.raises(DataError, match=r"lacks the tokens \[MASK\]"):
        make([text(5)])
