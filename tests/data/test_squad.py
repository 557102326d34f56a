"""Questions about texts, compared with transformers' tokenizer and the definition of SQuAD's scores."""

import gzip
import json

import pytest
import torch

from headwater.config.data import QuestionDataConfig
from headwater.core.errors import DataError
from headwater.data.text.squad import read_questions, read_windows, score

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "##tte", "?", "."]
WORDS = [*SPECIAL, "who", "wrote", "it", "anne", "did", "paris", "in", "and", "then", "she", "sailed"]
CONTEXT = "Then Annette wrote it in Paris. And then she sailed away, and Anne did it."
QUESTION = "Who wrote it?"


def article(*answers, context=CONTEXT, identifier="1", question=QUESTION):
    found = [{"text": text, "answer_start": context.index(text)} for text in answers]
    return {
        "paragraphs": [
            {"context": context, "qas": [{"id": identifier, "question": question, "answers": found}]}
        ]
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path


def write(path, *articles):
    content = json.dumps({"version": "1.1", "data": articles}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def windows_of(folder, place, **changes):
    keys = {"max_sequence_length": 14, "max_query_length": 8, "doc_stride": 3, "batch_size": 1, **changes}
    config = QuestionDataConfig(
        data_processor="SquadDataProcessor",
        data_dir=str(place),
        vocab_file=str(folder / "vocab.txt"),
        **keys,
    )
    return read_windows(config, len(WORDS))


@pytest.mark.parametrize("length", [14, 32])
def test_windows_equal_transformers(folder, length):
    transformers = pytest.importorskip("transformers")
    windows = windows_of(folder, write(folder / "a.json", article("Annette")), max_sequence_length=length)
    batch = windows.__getitems__(range(len(windows)))
    theirs = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True)
    room = length - 4 - 3
    expected = theirs(
        QUESTION, CONTEXT, truncation="only_second", max_length=length, stride=max(room - 3, 0),
        return_overflowing_tokens=True, padding="max_length", return_tensors="pt",
    )  # fmt: skip
    assert len(windows) == (5 if length == 14 else 1)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name])


@pytest.mark.parametrize("answer", ["Annette", "Annette wrote it", "she sailed away", "Anne", "nette"])
def test_answers_are_restored_from_their_tokens(folder, answer):
    """Windows with the whole answer restore its text; all others have positions 0."""
    windows = windows_of(folder, write(folder / "a.json", article(answer)), max_sequence_length=16)
    batch = windows.__getitems__(range(len(windows)))
    spans = list(zip(batch["start_positions"].tolist(), batch["end_positions"].tolist(), strict=True))
    assert any(begin for begin, _ in spans)
    for number, span in enumerate(spans):
        scores = [float(number == other) for other in range(len(windows))]
        found = windows.answers(scores, *zip(*spans, strict=True))
        # Tokens, not characters: the token of "nette" is that of the whole name.
        right = "Annette" if answer == "nette" else answer
        assert found == {"1": right if span != (0, 0) else ""}


def test_cut_answers_have_positions_zero(folder):
    windows = windows_of(folder, write(folder / "a.json", article("it in Paris. And then she")), doc_stride=7)
    batch = windows.__getitems__(range(len(windows)))
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [0] * len(windows)


def test_held_out_contexts_are_left_out(folder):
    other = article("Paris", context="In Paris.", identifier="2")
    (folder / "train").mkdir()
    write(folder / "train/a.json", article("Annette", context=CONTEXT.lower().replace("then a", "then A")))
    write(folder / "train/b.json.gz", other)
    held_out = write(folder / "dev.json", article("Anne"))
    keys = {"held_out_dir": str(held_out)}
    assert [q.identifier for q in windows_of(folder, folder / "train", **keys).questions] == ["2"]
    assert len(windows_of(folder, folder / "train", is_training=False, **keys).questions) == 2
    with pytest.raises(DataError, match="held_out_dir"):
        windows_of(folder, held_out, **keys)


def test_scores_equal_values_computed_by_hand(folder):
    """The definition: words without case, punctuation and articles; the best of several right answers."""
    path = write(
        folder / "a.json",
        article("Paris", "in Paris.", identifier="same"),
        article("Then Annette", identifier="part"),
        article("Anne", identifier="missing"),
        article("she sailed away, and Anne", identifier="article"),
    )
    predictions = {"same": "IN, the Paris", "part": "Annette wrote it", "article": "a she she away"}
    found = score(predictions, read_questions(path))
    # 1; one common word of 3 and 2; nothing; two common words of 3 and 5.
    assert found.f1 == pytest.approx((1 + 2 * 1 / 5 + 0 + 2 * 2 / 8) / 4)
    assert found.exact_match == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "questions cannot be read"),
        (b'{"data": []}', "hold no questions"),
        (b'{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "questions cannot be read: KeyError"),
        (json.dumps({"data": [article()]}).encode(), "has no answer(.|\n)*v2.0"),
        (
            json.dumps({"data": [article("Anne")]}).replace("Then", "Thens").encode(),
            "'Anne' is not at character",
        ),
    ],
)
def test_error_names_damaged_files(folder, content, message):
    (folder / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_questions(folder / "bad.json")
    assert "bad.json" in str(caught.value)
