"""Micro-batches with unequal numbers of labels compute the same step as the whole batch."""

import json

import pytest
import torch
import yaml

from headwater.config import load_params
from headwater.trainer.job import Job
from headwater.trainer.session import fit_job
from headwater.trainer.zoo_job import zoo_trainable

SIZES = {"hidden_size": 32, "num_heads": 4, "filter_size": 48, "dropout_rate": 0.0}
MODELS = {
    "decoder": {"name": "gpt2", "vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 16},
    "per_sample": {
        "name": "gpt2", "vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 16,
        "loss_scaling": "batch_size", "loss_weight": 0.1,
    },
    "tokens": {
        "name": "bert/token_classifier", "vocab_size": 61, "num_hidden_layers": 2, "num_classes": 5,
        "max_position_embeddings": 16,
    },
}  # fmt: skip


class Batches:
    """Four texts; the first two have few labels."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(5, 61, (4, 17), generator=generator)
            mask = torch.ones(4, 16, dtype=torch.int64)
            mask[0, 2:], mask[1, 1:] = 0, 0
            yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:] % 5, "attention_mask": mask}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def history(model, size, folder):
    init = {
        "backend": {"backend_type": "CPU", "micro_batch_size": size},
        "model_dir": str(folder),
        "model": SIZES | MODELS[model],
        "optimizer": {"SGD": {"learning_rate": 0.5}},
        "precision": {"enabled": False, "max_gradient_norm": 100.0},
        "loop": {"max_steps": 3},
    }
    folder.mkdir()
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"init": init}}))
    config = load_params(path)
    fit_job(Job(config.init, zoo_trainable(config.init, 16), Batches(), 4))
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [(record["loss"], record["gradient_norm"]) for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("model", MODELS)
def test_any_micro_batch_size_computes_the_same_step(model, tmp_path):
    whole = history(model, 4, tmp_path / "whole")
    for size in (1, 2):
        parts = history(model, size, tmp_path / str(size))
        assert [n for pair in parts for n in pair] == pytest.approx([n for p in whole for n in p], rel=1e-4)
