"""Mixtures have the configured fractions, for any number of workers and ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.data import GptDataConfig
from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import DataError
from headwater.data.mixture import Mixture
from headwater.data.sample_file import write_sample_file
from headwater.trainer.datasets import open_data


class Numbers:
    """A data set whose sample is its draw."""

    def __init__(self, size, length=4):
        self.size, self.sequence_length = size, length

    def __len__(self):
        return self.size


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
)
def test_sources_have_their_fractions_and_read_samples_in_order(sizes, weights):
    weights = weights[: len(sizes)]
    mixture = Mixture([Numbers(size) for size in sizes], weights)
    total = sum(sizes)
    assert len(mixture) == total
    numbers, inside = mixture.find(np.arange(3 * total))
    for number, weight in enumerate(weights):
        draws = inside[numbers == number]
        assert abs(len(draws) - 3 * total * weight / sum(weights)) <= 3
        assert sorted(draws) == list(range(len(draws)))
        # Evenly spread: in every window the fraction is the same, up to one sample at each end.
        share = np.cumsum(numbers[:total] == number) - np.arange(1, total + 1) * (len(draws) / 3 / total)
        assert np.abs(share).max() <= len(sizes)


@pytest.fixture
def folders(tmp_path):
    for name, first, count in (("a", 0, 6), ("b", 50, 18)):
        (tmp_path / name).mkdir()
        samples = np.full((count, 3, 8), 1, dtype=np.int32)
        samples[:, 0] = np.arange(first, first + count)[:, None]
        write_sample_file(tmp_path / name / "x.h5", [samples], count)
    return tmp_path


def config(folders, **changes):
    section = {
        "data_processor": "GptHDF5MapDataProcessor",
        "batch_size": 4,
        "shuffle": True,
        "mixture": [
            {"data_dir": str(folders / "a"), "weight": 3},
            {"data_dir": str(folders / "b"), "weight": 1},
        ],
    }
    return GptDataConfig.model_validate({**section, **changes})


MODEL = DecoderConfig.model_validate(
    {
        "vocab_size": 100,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_heads": 1,
        "max_position_embeddings": 8,
    }
)


def first_tokens(data, batches):
    loader = iter(data.create_dataloader())
    return [next(loader)["input_ids"][:, 0].tolist() for _ in range(batches)]


def test_a_section_of_a_params_file_mixes_sources(folders):
    section = config(folders)
    assert GptDataConfig.model_validate(section.model_dump(mode="json", by_alias=True)) == section
    data = open_data(section, MODEL, seed=1, repeat=True)
    assert (data.num_samples, data.sequence_length) == (24, 8)
    plain = first_tokens(data, 12)
    drawn = np.array(plain).ravel()
    assert (drawn < 50).sum() == 36
    # The small source was read six times, two thirds of the large one were read.
    assert np.bincount(drawn[drawn < 50]).tolist() == [6] * 6
    assert sorted(drawn[drawn >= 50]) == list(range(50, 62))
    with_workers = open_data(config(folders, num_workers=2), MODEL, seed=1, repeat=True)
    assert first_tokens(with_workers, 12) == plain


def test_sections_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="expected data_dir or mixture"):
        config(folders, data_dir=str(folders / "a"))
    with pytest.raises(ValueError, match="data_dir"):
        config(folders, mixture=[])
    with pytest.raises(DataError, match="same length, got 4, 5 tokens"):
        Mixture([Numbers(3), Numbers(3, 5)], [1, 1])
