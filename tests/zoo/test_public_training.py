"""The params files of the public Model Zoo train two steps with smaller sizes and no other change."""

import json

import pytest
import torch
from public_files import BATCH, FILES, LENGTH, different_files, small_params

from headwater.trainer.job import Job
from headwater.trainer.session import fit_job
from headwater.trainer.zoo_job import zoo_trainable


class Synthetic:
    """A data set of random batches with the shapes that a model reads."""

    def __init__(self, example):
        self.example = example

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {name: self._values(name, like, generator) for name, like in self.example.items()}

    @staticmethod
    def _values(name, like, generator):
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator)
        if "mask" in name or "weights" in name:
            return torch.ones(like.shape, dtype=like.dtype)
        limit = 2 if "label" in name or "type" in name else LENGTH
        return torch.randint(0, limit, like.shape, generator=generator)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.skipif(not FILES, reason="the public params files are not here")
@pytest.mark.parametrize("file", different_files())
def test_a_file_trains(file, tmp_path):
    config = small_params(file, tmp_path)
    trainable = zoo_trainable(config.init, LENGTH if "nlp" in file else None)
    data = Synthetic(trainable.example(BATCH))
    result = fit_job(Job(config.init, trainable, data, BATCH))
    assert result.step == 2
    records = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == 2
    assert losses[0] != losses[1], "an update changed nothing"
