"""Pairs of texts need a model with two segments; other models are refused before training."""

import h5py
import numpy as np
import pytest

from headwater.config.data import DynamicMaskDataConfig, MaskedTextDataConfig, QuestionDataConfig
from headwater.config.models.encoder import BertConfig, QuestionAnsweringConfig
from headwater.core.errors import ConfigError, DataError
from headwater.trainer.datasets import open_data

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b")
LENGTH = 8


def one_batch(config, segments):
    model = BertConfig(name="bert", vocab_size=16, num_segments=segments, max_position_embeddings=LENGTH)
    return next(iter(open_data(config, model, seed=0, repeat=False).create_dataloader()))


def masked(folder):
    """Return a sample of two texts, as `headwater data --mode masked` writes it."""
    with h5py.File(folder / "data-0.h5", "w") as file:
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            file[name] = np.ones((2, LENGTH), dtype=np.int32)
        for name in ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights"):
            file[name] = np.ones((2, 2), dtype=np.int32)
        file["next_sentence_label"] = np.zeros(2, dtype=np.int32)
    return MaskedTextDataConfig(data_processor="BertHDF5DataProcessor", data_dir=folder, batch_size=2)


def masked_later(folder):
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    text = "\"['[CLS]', 'a', '[SEP]', 'b', '[SEP]']\",\"[0, 0, 0, 1, 1]\",0"
    (folder / "data-0.csv").write_text(f"tokens,segment_ids,is_random_next\n{text}\n{text}\n")
    return DynamicMaskDataConfig(
        data_processor="BertCSVDynamicMaskDataProcessor",
        data_dir=folder,
        vocab_file=folder / "vocab.txt",
        batch_size=2,
    )


@pytest.mark.parametrize("make", [masked, masked_later])
def test_pairs_for_a_model_of_single_texts_are_refused(make, tmp_path):
    config = make(tmp_path)
    assert one_batch(config, segments=2)["token_type_ids"].max() == 1
    with pytest.raises(
        DataError, match=r"(?s)expected values below 1, got 1.*num_segments: 2.*--no-sentence_pairs"
    ):
        one_batch(config, segments=1)
    one_batch(config, segments=0)


def test_questions_about_texts_need_two_segments(tmp_path):
    config = QuestionDataConfig(
        data_processor="SquadDataProcessor", data_dir=tmp_path, vocab_file=tmp_path, batch_size=2
    )
    with pytest.raises(ConfigError, match=r"(?s)pairs of texts.*num_segments: 2"):
        open_data(config, QuestionAnsweringConfig(name="bert/qa", num_segments=1), seed=0, repeat=False)
