"""Own texts with classes: from a table to a trained classifier."""

import random

import pytest
from run_samples import losses

from headwater.config import load_params

WORDS = {"sad": "rain", "glad": "sun", "angry": "storm"}
STEPS = ["--steps", "30", "--batch_size", "12", "--host_memory", "auto", "--disk", "none"]


@pytest.fixture
def table(headwater, tmp_path, monkeypatch):
    """The working folder, with prepared data in data/classes."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = ["text,label"]
    for _ in range(240):
        label = draw.choice(list(WORDS))
        fill = [
            draw.choice(["the", "a", "one", "day", "night", "sea", "hill"])
            for _ in range(draw.randrange(1, 8))
        ]
        fill.insert(draw.randrange(len(fill) + 1), WORDS[label])
        rows.append(f"{' '.join(fill)},{label}")
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    code, _, err = headwater(
        *("data", "texts.csv", "--mode", "classification", "--labels", *WORDS, "--out", "data/classes"),
        *("--vocab_size", 300, "--sequence_length", 32, "--processes", 1),
    )
    assert code == 0, err
    return tmp_path


def test_a_small_encoder_learns_the_classes(headwater, table):
    code, _, err = headwater("config", "init", "run.yaml", "--yes", "--precision", "fp32", *STEPS)
    assert code == 0, err
    config = load_params("run.yaml")
    assert (config.init.model.name, config.init.model.num_labels) == ("bert/classifier", 3)
    assert config.init.backend.skip_padding
    code, _, err = headwater("fit", "run.yaml", "--learning_rate", 0.01)
    assert code == 0, err
    found = losses(table / "runs/run")
    assert len(found) == 30 and sum(found[-5:]) / 5 < 0.75 * found[0]


def test_a_class_that_the_model_lacks(headwater, table):
    headwater("config", "init", "run.yaml", "--yes", "--precision", "fp32", *STEPS)
    code, _, err = headwater("fit", "run.yaml", "--trainer.init.model.num_labels=2")
    assert code == 2 and "set num_labels of the model to the number of classes in the data" in err


def test_a_model_of_the_transformers_library_learns_the_classes(headwater, table):
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=300, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=32, num_labels=3
    )
    transformers.DistilBertForSequenceClassification(config).save_pretrained("encoder")
    words = ("config", "init", "run.yaml", "--model", "hf:encoder", "--data", "data/classes", "--yes", *STEPS)
    assert headwater(*words)[0] == 0
    run = ("fit", "run.yaml", "--learning_rate", 0.005, "--trainer.init.precision.enabled=false")
    code, _, err = headwater(*run, "--trainer.init.backend.skip_padding=true")
    assert code == 0, err
    found = losses(table / "runs/run")
    assert len(found) == 30 and sum(found[-5:]) / 5 < 0.75 * found[0]
