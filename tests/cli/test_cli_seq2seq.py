"""Encoder-decoders by command line: each learns from its own kind of data, with the weights streaming."""

import json
import random

import pytest

PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU, num_slabs: 2}}
    model_dir: {folder}/run
    seed: 3
    model:
      name: {name}
      src_vocab_size: 14
      extra_ids: {extra_ids}
      d_model: 32
      d_kv: 16
      num_heads: 2
      d_ff: 64
      encoder_num_hidden_layers: 1
      src_max_position_embeddings: 16
      tgt_max_position_embeddings: 8
      use_transformer_initialization: false
      mup_base_d_model: 32
      mup_base_d_ff: 64
      dropout_rate: 0.0
      mlm_loss_scaling: num_masked
    optimizer:
      {optimizer}
    precision: {{enabled: false, max_gradient_norm: 1.0}}
    loop: {{max_steps: 80, eval_frequency: 80}}
    checkpoint: {{steps: 80}}
    logging: {{log_steps: 80}}
  fit:
    train_dataloader: &train
      data_processor: {processor}
      src_data_dir: {folder}/train
      src_vocab_file: {folder}/vocab.txt
      extra_ids: {extra_ids}
      src_max_sequence_length: 16
      tgt_max_sequence_length: 8
      batch_size: 32
      shuffle: true
    val_dataloader:
      <<: *train
      src_data_dir: {folder}/val
"""


def write_texts(folder):
    """Texts that count up from a random digit, and their translations: they count down to it."""
    digits = "0123456789"
    (folder / "vocab.txt").write_text("\n".join(["<pad>", "</s>", "<unk>", "<s>", *digits]) + "\n")
    generator = random.Random(0)
    for part, count in (("train", 512), ("val", 64)):
        starts = [generator.randrange(10) for _ in range(count)]
        (folder / part).mkdir()
        lines = [" ".join(digits[(start + place) % 10] for place in range(6)) for start in starts]
        (folder / part / "read").write_text("\n".join(lines) + "\n")
        (folder / part / "written").write_text("\n".join(line[::-1] for line in lines) + "\n")
        (folder / part / "meta.dat").write_text(f"read written {count}\n")


@pytest.mark.parametrize(
    ("name", "processor", "extra_ids", "optimizer"),
    [
        ("transformer", "TransformerDynamicDataProcessor", 0, "AdamW: {learning_rate: 1e-2}"),
        ("t5", "T5DynamicDataProcessor", 4, "AdaFactor: {learning_rate: 0.1}"),
    ],
)
def test_training_reduces_the_loss(headwater, tmp_path, name, processor, extra_ids, optimizer):
    write_texts(tmp_path)
    if name == "t5":
        for part in ("train", "val"):
            (tmp_path / part / "meta.dat").write_text("read 64\n")
    path = tmp_path / "params.yaml"
    path.write_text(
        PARAMS.format(
            folder=tmp_path, name=name, processor=processor, extra_ids=extra_ids, optimizer=optimizer
        )
    )
    code, _, err = headwater("fit", path)
    assert (code, err) == (0, "")
    records = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    # Everything follows from what is read: nothing is left to guess.
    assert records[0]["loss"] > 2 and records[-1]["loss"] < 0.1
    assert records[-1]["metrics"]["accuracy"] > 0.97
