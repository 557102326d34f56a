"""Texts and tokens with classes, compared with BERT's tokenizer in the transformers library."""

import json

import pytest
import torch

from headwater.config.data import TextClassificationDataConfig, TokenClassificationDataConfig
from headwater.core.batches import IGNORED
from headwater.core.errors import DataError
from headwater.data.text.classification import read_labelled_texts, read_labelled_tokens

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "good",
    "bad",
    "film",
    "##s",
    "not",
    ".",
    "paris",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return tmp_path


def texts_of(folder, num_labels=2, **changes):
    keys = {"data_processor": "SST2DataProcessor", "batch_size": 1, "max_sequence_length": 8, **changes}
    config = TextClassificationDataConfig(data_dir=str(folder), vocab_file=str(folder / "vocab.txt"), **keys)
    return read_labelled_texts(config, len(VOCABULARY), num_labels)


def tokens_of(folder, num_classes=3, **changes):
    keys = {"data_processor": "BertTokenClassifierDataProcessor", "batch_size": 1, "max_sequence_length": 8}
    config = TokenClassificationDataConfig(
        data_dir=str(folder / "ner"), vocab_file=str(folder / "vocab.txt"), **{**keys, **changes}
    )
    return read_labelled_tokens(config, len(VOCABULARY), num_classes)


@pytest.mark.parametrize("header", ["", "sentence\tlabel\n"])
def test_sst2_tokens_equal_transformers(folder, header):
    transformers = pytest.importorskip("transformers")
    (folder / "train.tsv").write_text(header + "A good film .\t1\nbad films, not Paris or a good film\t0\n")
    batch = texts_of(folder).__getitems__([0, 1, 2 + 1])
    theirs = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True)
    expected = theirs(
        ["A good film .", *["bad films, not Paris or a good film"] * 2],
        truncation=True, max_length=8, padding="max_length", return_tensors="pt",
    )  # fmt: skip
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name])
    assert batch["labels"].tolist() == [1, 0, 0]


def test_mnli_pairs_have_two_segments(folder):
    lines = [
        "index\tsentence1\tsentence2\tgold_label",
        "0\ta film\tgood\tneutral",
        "1\ta\tbad film\tentailment",
    ]
    (folder / "train.tsv").write_text("\n".join(lines))
    batch = texts_of(folder, num_labels=3, data_processor="MNLIDataProcessor").__getitems__([0, 1])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [2, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a film", r"a sentence, a tab and the number of its class(.|\n)*train\.tsv, line 2"),
        ("\t1", r"line 2"),
        ("a film\tgood", r"line 2"),
        (
            "a film\t2",
            r"expected a class below the model's num_labels=2, got 2(.|\n)*line 2(.|\n)*to 3 or more",
        ),
    ],
)
def test_error_names_the_damaged_line(folder, line, message):
    (folder / "train.tsv").write_text(f"good\t1\n{line}\n")
    with pytest.raises(DataError, match=message):
        texts_of(folder)


def test_missing_files_and_tokens_are_errors(folder):
    with pytest.raises(DataError, match=r"no train\.tsv"):
        texts_of(folder)
    (folder / "train.tsv").write_text("")
    with pytest.raises(DataError, match="no samples"):
        texts_of(folder)
    (folder / "train.tsv").write_text("good\t1\n")
    with pytest.raises(DataError, match=r"no dev\.tsv"):
        texts_of(folder, is_training=False)
    (folder / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"lacks the tokens \[PAD\], \[UNK\], \[CLS\], \[SEP\]"):
        texts_of(folder)


TAGGED = "Paris\tB-Place\nfilms\tO\n.\tO\n\n\nnot\tO\nParis\tB-Place\nbad\tI-Place\n"


def test_first_token_of_a_word_has_its_label(folder):
    (folder / "ner").mkdir()
    (folder / "ner" / "train.conll").write_text(TAGGED)
    batch = tokens_of(folder).__getitems__([0, 1])
    off = IGNORED
    assert batch["input_ids"][0].tolist() == [2, 12, 8, 9, 11, 3, 0, 0]
    assert batch["labels"].tolist() == [
        [off, 1, 0, off, 0, off, off, off],
        [off, 0, 1, 2, off, off, off, off],
    ]


def test_classes_of_tags_come_from_label_vocab_file(folder):
    (folder / "ner").mkdir()
    (folder / "ner" / "train.tsv").write_text(TAGGED)
    numbers = folder / "labels.json"
    numbers.write_text(json.dumps({"O": 2, "B-Place": 0, "I-Place": 1}))
    batch = tokens_of(folder, label_vocab_file=str(numbers)).__getitems__([1])
    assert batch["labels"][0, 1:4].tolist() == [2, 0, 1]
    numbers.write_text(json.dumps({"O": 0, "B-Place": 1}))
    with pytest.raises(DataError, match=r"'I-Place' is not in label_vocab_file(.|\n)*line 8"):
        tokens_of(folder, label_vocab_file=str(numbers))
    numbers.write_text("[1]")
    with pytest.raises(DataError, match="classes of the tags"):
        tokens_of(folder, label_vocab_file=str(numbers))


def test_damaged_tag_files_are_errors(folder):
    with pytest.raises(DataError, match="does not exist"):
        tokens_of(folder)
    (folder / "ner").mkdir()
    (folder / "ner" / "train.tsv").write_text("Paris B-Place\n")
    with pytest.raises(DataError, match=r"a token, a tab and its tag(.|\n)*line 1"):
        tokens_of(folder)
    (folder / "ner" / "train.tsv").write_text(TAGGED)
    with pytest.raises(DataError, match="3 tags, but the model's num_classes is 2"):
        tokens_of(folder, num_classes=2)
