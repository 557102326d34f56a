"""Texts and their translations: batches, tokenizers of raw text, and errors."""

import gzip

import pytest
import torch

from headwater.config.data import TranslationDataConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.config.models.vision import FCMnistConfig
from headwater.core.errors import ConfigError, DataError
from headwater.data.text.translation import read_translations
from headwater.data.tokenizer import TrainBPE
from headwater.models.registry import build_model
from headwater.trainer.datasets import open_data

SOURCE = ["a b c", "b", "", "c c c c c c c c c", "d a"]
TARGET = ["x y", "z", "x", "y", "x x x x x x x x"]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "vocab.txt").write_text("<pad>\n</s>\n<unk>\n<s>\na\nb\nc\nx\ny\nz\n")
    for name, lines in (("train.en", SOURCE), ("train.de", TARGET)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def section(folder, **changes):
    values = {
        "data_processor": "TransformerDynamicDataProcessor",
        "src_data_dir": str(folder / "train.en"),
        "tgt_data_dir": str(folder / "train.de"),
        "src_vocab_file": str(folder / "vocab.txt"),
        "src_max_sequence_length": 8,
        "tgt_max_sequence_length": 5,
        "batch_size": 2,
    }
    given = {key: value for key, value in {**values, **changes}.items() if value is not None}
    return TranslationDataConfig.model_validate(given)


def transformer(**changes):
    sizes = {
        "src_vocab_size": 10, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2,
        "encoder_num_hidden_layers": 1, "src_max_position_embeddings": 8, "tgt_max_position_embeddings": 5,
    }  # fmt: skip
    return Seq2SeqConfig.model_validate({"name": "transformer", **sizes, **changes})


def test_a_batch_of_pairs(data):
    samples = read_translations(section(data), transformer())
    # The empty text, and those that are too long, are left out.
    assert len(samples) == 2 and samples.sequence_length == 8
    batch = samples.__getitems__([0, 3])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 1]
    assert batch["decoder_input_ids"].tolist() == [[3, 7, 8, 0, 0], [3, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[7, 8, 1, 0, 0], [9, 1, 0, 0, 0]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert build_model(transformer())(batch).isfinite()


def test_inputs_and_labels_have_configured_padding(data):
    batch = read_translations(section(data, input_pad_id=2, labels_pad_id=6), transformer()).__getitems__([1])
    assert batch["input_ids"][0, 1:].unique().tolist() == [2]
    assert batch["decoder_input_ids"][0].tolist() == [3, 9, 2, 2, 2]
    assert batch["labels"][0].tolist() == [9, 1, 6, 6, 6]


def test_unknown_words_become_oov_token(data):
    batch = read_translations(section(data, tgt_max_sequence_length=9), transformer()).__getitems__([2])
    assert batch["input_ids"][0, :3].tolist() == [2, 4, 0]


def test_a_vocabulary_for_each_language(data):
    (data / "german.txt").write_text("<pad>\n</s>\n<s>\n<unk>\nx\ny\nz\n")
    config = section(data, tgt_vocab_file=str(data / "german.txt"))
    model = transformer(tgt_vocab_size=7, share_encoder_decoder_embedding=False)
    batch = read_translations(config, model).__getitems__([0])
    assert batch["input_ids"][0, :3].tolist() == [4, 5, 6]
    assert batch["decoder_input_ids"][0].tolist() == [2, 4, 5, 0, 0]


def test_meta_dat_names_the_pairs_of_files(data):
    (data / "meta.dat").write_text(f"train.en {data / 'train.de'} 5\n")
    config = section(data, src_data_dir=str(data), tgt_data_dir=None)
    assert len(read_translations(config, transformer())) == 2


def test_raw_text_and_a_tokenizer(data):
    """Compressed raw lines, encoded by a byte-level BPE, are decoded to the same text."""
    lines = ["Ein Mann mit Hut.", "Zwei Hunde spielen im Schnee.", "Ein Hund."]
    tokenizer = TrainBPE(300).train(lines * 3)
    tokenizer.save(str(data / "tokenizer.json"))
    for name in ("raw.en.gz", "raw.de.gz"):
        with gzip.open(data / name, "wt", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    end = "<|endoftext|>"
    config = section(
        data, src_data_dir=str(data / "raw.en.gz"), tgt_data_dir=str(data / "raw.de.gz"), sos_token=end,
        src_vocab_file=str(data / "tokenizer.json"), eos_token=end, pad_token=end,
        src_max_sequence_length=40, tgt_max_sequence_length=40,
    )  # fmt: skip
    batch = read_translations(config, transformer(src_vocab_size=300)).__getitems__([0, 1, 2])
    texts = [
        tokenizer.decode(row[mask.bool()].tolist())
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts == lines
    assert torch.equal(batch["labels"][:, :-1], batch["decoder_input_ids"][:, 1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tgt_data_dir": None}, "files of the translations are not set"),
        (
            {"tgt_max_sequence_length": 4, "src_max_sequence_length": 4, "src_data_dir": "long"},
            "empty or too long",
        ),
        ({"src_data_dir": "short"}, "1 line, but .* has 5"),
        ({"src_data_dir": "missing"}, "no text files"),
        ({"src_data_dir": ["train.en", "train.en"]}, "src_data_dir has 2 files, but tgt_data_dir has 1"),
        ({"pad_token": "[PAD]"}, "pad_token"),
    ],
)
def test_unsuitable_data_are_refused(data, changes, message):
    (data / "long").write_text("a a a a a\n" * 5)
    (data / "short").write_text("a\n")
    given = changes.get("src_data_dir")
    if given is not None:
        places = [str(data / name) for name in ([given] if isinstance(given, str) else given)]
        changes = {**changes, "src_data_dir": places}
    with pytest.raises(DataError, match=message):
        read_translations(section(data, **changes), transformer())


def test_a_vocabulary_larger_than_the_model(data):
    with pytest.raises(DataError, match="10 tokens and 0 extra_ids do not fit into the model's 9"):
        read_translations(section(data), transformer(src_vocab_size=9))


def test_translation_data_need_an_encoder_decoder(data):
    with pytest.raises(ConfigError, match="write MNISTDataProcessor"):
        open_data(section(data), FCMnistConfig(name="fc_mnist"), seed=0, repeat=True)
    source = open_data(section(data), transformer(), seed=0, repeat=False)
    assert [batch["input_ids"].shape for batch in source.create_dataloader()] == [(2, 8)]
