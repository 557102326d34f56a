"""LLaVA on the command line: it learns captions, resumes, and is exported."""

import json
import re

import numpy as np
import pytest
import torch

from headwater.data.tokenizer import TrainBPE
from headwater.trainer.pretrained import checkpoint_weights

Image = pytest.importorskip("PIL.Image")

PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU, num_slabs: 2}}
    model_dir: {model_dir}
    seed: 3
    model:
      name: llava
      image_model:
        {{image_size: [8, 8], patch_size: [4, 4], hidden_size: 32, num_hidden_layers: 2, num_heads: 2,
          filter_size: 64, nonlinearity: quick_gelu, use_post_embed_layer_norm: true,
          use_embed_proj_bias: false}}
      projector:
        image_model: {{input_unit: 32, layers_units: [32, 32], layers_activation: [gelu, null]}}
      text_model:
        {{name: LlamaModel, vocab_size: 300, hidden_size: 32, num_hidden_layers: 2, num_heads: 2,
          filter_size: 64, max_position_embeddings: 16}}
      image_feature_select_layer_idx: -2
    optimizer:
      AdamW: {{weight_decay: 0.01}}
    schedulers:
    - ConstantLR: {{learning_rate: 5.0e-03}}
    precision: {{fp16_type: bfloat16}}
    loop: {{max_steps: {steps}, eval_frequency: {steps}}}
    checkpoint: {{steps: 20}}
  fit:
    train_dataloader: &train
      data_processor: LlavaHDF5MapDataProcessor
      data_dir: {data}/train/train
      img_data_dir: {data}/images
      transforms: [{{name: resize, size: 8}}, {{name: to_tensor}}]
      batch_size: 8
      shuffle: true
    val_dataloader: &val
      <<: *train
      data_dir: {data}/val/train
      batch_size: 5
      shuffle: false
      drop_last: false
  validate:
    val_dataloader: *val
"""


def halves(headwater, folder):
    """Write images with one bright half, and captions that name it."""
    generator = np.random.default_rng(0)
    tokenizer = folder / "tokenizer.json"
    folder.mkdir()
    TrainBPE(300).train(["left", "right"] * 3).save(str(tokenizer))
    for split, count in (("train", 32), ("val", 12)):
        (folder / "images" / split).mkdir(parents=True)
        records = []
        for number in range(count):
            image = generator.integers(50, size=(8, 8, 3), dtype=np.uint8)
            side = number % 2
            image[:, 4 * side : 4 * side + 4] += 200
            name = f"{split}/{number}.png"
            Image.fromarray(image).save(folder / "images" / name)
            records.append(json.dumps({"image": name, "captions": [("left", "right")[side]]}))
        (folder / f"{split}.jsonl").write_text("\n".join(records))
        code, out, err = headwater(
            "data", folder / f"{split}.jsonl", "--mode", "image_text", "--out", folder / split,
            "--image_dir", folder / "images", "--num_features", 4, "--sequence_length", 12,
            "--tokenizer", tokenizer, "--val_fraction", 0,
        )  # fmt: skip
        assert (code, err) == (0, "") and re.search(rf"images +│ {count}", out), out


def test_llava_learns_captions(headwater, tmp_path):
    halves(headwater, tmp_path / "data")
    path = tmp_path / "params.yaml"

    def fit(folder, steps):
        places = {"model_dir": tmp_path / folder, "data": tmp_path / "data"}
        path.write_text(PARAMS.format(**places, steps=steps))
        code, _, err = headwater("fit", path)
        assert (code, err) == (0, "")

    fit("whole", 40)
    records = [json.loads(line) for line in (tmp_path / "whole" / "history.jsonl").read_text().splitlines()]
    loss = records[-1]["loss"]
    # Without the image one token of two is a guess between two: ln 2 / 2.
    assert loss < 0.2
    code, out, _ = headwater("validate", tmp_path / "whole")
    assert code == 0 and float(re.search(r"loss ([\d.]+)", out)[1]) == pytest.approx(loss, abs=1e-4)
    fit("parts", 20)
    fit("parts", 40)
    whole, parts = (
        dict(checkpoint_weights(tmp_path / folder / "checkpoint_40")) for folder in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    exported = tmp_path / "exported"
    code, _, err = headwater(
        "checkpoint", "convert", "--model", "llava", "--src-fmt", "headwater", "--tgt-fmt", "hf",
        tmp_path / "whole" / "checkpoint_40", exported,
    )  # fmt: skip
    assert (code, err) == (0, "")
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        exported, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(theirs.lm_head.weight, whole["text_model.head.weight"])
