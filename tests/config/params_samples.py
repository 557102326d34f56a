"""A small params file in each form, and where the public ones are."""

import pytest

from shared_data import SHARED

NEWER = """\
trainer:
  init:
    backend:
      backend_type: CPU
      cluster_config: {num_csx: 2}
      micro_batch_size: 2
    model_dir: runs/a
    seed: 7
    model:
      name: gpt2
      vocab_size: 64
      hidden_size: 32
      num_hidden_layers: 2
      num_heads: 4
      max_position_embeddings: 16
    optimizer:
      AdamW:
        betas: [0.9, 0.95]
        weight_decay: 0.1
    schedulers:
    - SequentialLR:
        schedulers:
        - LinearLR:
            initial_learning_rate: 0.0
            end_learning_rate: 1e-3
            total_iters: 10
        - CosineDecayLR:
            initial_learning_rate: 1e-3
            end_learning_rate: 0.0001
            total_iters: 90
    precision:
      enabled: true
      fp16_type: bfloat16
      max_gradient_norm: 1.0
      log_loss_scale: true
    loop:
      max_steps: 100
      eval_frequency: 50
      grad_accum_steps: 2
    checkpoint:
      steps: 50
      keep_n: 3
    logging:
      log_steps: 5
    callbacks:
    - ComputeNorm: {}
  fit:
    train_dataloader:
      data_processor: GptHDF5DataProcessor
      data_dir: data/train
      batch_size: 8
      shuffle: true
    val_dataloader:
      data_processor: GptHDF5DataProcessor
      data_dir: data/val
      batch_size: 4
    ckpt_path: old.mdl
  validate:
    val_dataloader:
      data_processor: GptHDF5DataProcessor
      data_dir: data/val
      batch_size: 4
    ckpt_path: old.mdl
  validate_all:
    val_dataloaders:
      data_processor: GptHDF5DataProcessor
      data_dir: data/val
      batch_size: 4
"""

OLDER = """\
train_input:
  data_processor: GptHDF5DataProcessor
  data_dir: data/train
  batch_size: 8
  shuffle: true
  micro_batch_size: 2
eval_input:
  data_processor: GptHDF5DataProcessor
  data_dir: data/val
  batch_size: 4
model:
  name: gpt2
  mixed_precision: true
  fp16_type: bfloat16
  vocab_size: 64
  hidden_size: 32
  num_hidden_layers: 2
  num_heads: 4
  max_position_embeddings: 16
optimizer:
  optimizer_type: adamw
  beta1: 0.9
  beta2: 0.95
  weight_decay_rate: 0.1
  max_gradient_norm: 1.0
  log_summaries: true
  grad_accum_steps: 2
  learning_rate:
  - scheduler: Linear
    initial_learning_rate: 0.0
    end_learning_rate: 1e-3
    steps: 10
  - scheduler: CosineDecay
    initial_learning_rate: 1e-3
    end_learning_rate: 0.0001
    total_iters: 90
runconfig:
  target_device: CPU
  num_csx: 2
  model_dir: runs/a
  seed: 7
  max_steps: 100
  eval_frequency: 50
  checkpoint_steps: 50
  max_checkpoints: 3
  log_steps: 5
  checkpoint_path: old.mdl
"""


def write(folder, text, name="params.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def public_params(*parts):
    """The folder of the public params files; where it is missing, the test is skipped."""
    folder = SHARED.joinpath("public_params", *parts)
    if not folder.exists():
        pytest.skip("the public params files are not here")
    return folder
