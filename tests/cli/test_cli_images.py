"""Image models on the command line: they learn from folders of images, and runs resume."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from headwater.config import load_params
from headwater.models.registry import build_model
from headwater.trainer.pretrained import checkpoint_weights

Image = pytest.importorskip("PIL.Image")

PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU, num_slabs: 2}}
    model_dir: {model_dir}
    seed: 3
    model: {model}
    optimizer:
      AdamW: {{weight_decay: 0.01}}
    schedulers:
    - ConstantLR: {{learning_rate: 2.0e-03}}
    precision: {{enabled: {bf16}}}
    loop: {{max_steps: {steps}, eval_frequency: {steps}}}
    checkpoint: {{steps: 20}}
  fit:
    train_dataloader: {train}
    val_dataloader: {val}
  validate:
    val_dataloader: {val}
"""
VIT = (
    "{name: vision_transformer, num_classes: 2, image_size: [8, 8], patch_size: [4, 4], hidden_size: 32, "
    "num_hidden_layers: 2, num_heads: 2, filter_size: 64}"
)
UNET = "{name: unet, encoder_filters: [8, 16], image_size: [16, 16], loss: cross_entropy_dice}"
CROPS = "[{name: random_vertical_flip}, {name: resize, size: 8}, {name: to_tensor}]"


def squares(folder):
    """Gray pictures with a bright square each, and which pixels are of it."""
    generator = np.random.default_rng(0)
    for part in ("image", "label"):
        (folder / part).mkdir(parents=True)
    for number in range(12):
        label = np.zeros((24, 24), np.uint8)
        top, left = generator.integers(12, size=2)
        label[top : top + 12, left : left + 12] = 255
        image = label // 3 + generator.integers(120, size=label.shape).astype(np.uint8)
        Image.fromarray(image).save(folder / "image" / f"{number}.png")
        Image.fromarray(label).save(folder / "label" / f"{number}.png")
    section = f"data_processor: UNetDataProcessor, data_dir: {folder}, train_test_split: 0.67"
    train = f"{{{section}, image_size: [16, 16], batch_size: 4, shuffle: true}}"
    return train, f"{{{section}, is_training: false, batch_size: 2}}"


def halves(folder):
    """Write images whose left or right half is bright."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 8)):
        for number, name in enumerate(("left", "right")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                image = generator.integers(120, size=(8, 8), dtype=np.uint8)
                image[:, 4 * number : 4 * number + 4] += 130
                Image.fromarray(image).save(folder / split / name / f"{index}.png")
    section = f"data_processor: ImageNet1KProcessor, data_dir: {folder}, transforms: {CROPS}"
    return (
        f"{{{section}, split: train, batch_size: 8, shuffle: true}}",
        f"{{{section}, split: val, batch_size: 4}}",
    )


@pytest.mark.parametrize(
    ("model", "make", "metric", "least"),
    [(VIT, halves, "accuracy", 0.9), (UNET, squares, "mean_iou", 0.7)],
    ids=["vit", "unet"],
)
@pytest.mark.parametrize("bf16", ["false", "true"], ids=["fp32", "bf16"])
def test_training_reduces_the_loss(headwater, tmp_path, model, make, metric, least, bf16):
    train, val = make(tmp_path / "data")
    path = tmp_path / "params.yaml"

    def fit(folder, steps):
        places = {"model_dir": tmp_path / folder, "model": model, "train": train, "val": val}
        path.write_text(PARAMS.format(**places, steps=steps, bf16=bf16))
        code, _, err = headwater("fit", path)
        assert (code, err) == (0, "")

    fit("whole", 80)
    records = [json.loads(line) for line in (tmp_path / "whole" / "history.jsonl").read_text().splitlines()]
    found = records[-1]["metrics"][metric]
    assert found > least
    code, out, _ = headwater("validate", tmp_path / "whole")
    assert code == 0 and float(re.search(rf"{metric} ([\d.]+)", out)[1]) == pytest.approx(found, abs=1e-5)
    # A run that was killed after its last but one checkpoint resumes with the statistics of batch norm and
    # the random state of that checkpoint.
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoint_80")
    fit("parts", 80)
    whole, parts = (
        dict(checkpoint_weights(tmp_path / folder / "checkpoint_80")) for folder in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_frozen_parameters_keep_their_initial_values_in_the_checkpoint(headwater, tmp_path):
    train, val = halves(tmp_path / "data")
    model = VIT.replace("num_classes: 2", "num_classes: 2, freeze: ['^vit_model']")
    places = {"model_dir": tmp_path / "run", "model": model, "train": train, "val": val}
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS.format(**places, steps=3, bf16="false"))
    code, _, err = headwater("fit", path)
    assert (code, err) == (0, "")
    config = load_params(path).init.model
    drawn = build_model(config, seed=3).state_dict()
    trained = dict(checkpoint_weights(tmp_path / "run" / "checkpoint_3"))
    assert trained.keys() == drawn.keys()
    assert {name for name in drawn if not torch.equal(drawn[name], trained[name])} == {
        "classifier.weight",
        "classifier.bias",
    }
