"""A small data set, the base of a family, and the command line in this process."""

import pytest

from book_samples import book_samples
from headwater.cli.main import main

BASE = """\
extends: gpt/tiny
trainer:
  init:
    backend: {{backend_type: CPU}}
    model: {{vocab_size: 300, hidden_size: 16, num_hidden_layers: 1, num_heads: 2,
             max_position_embeddings: 16}}
    schedulers:
    - LinearLR: {{initial_learning_rate: 1.0e-2, end_learning_rate: 1.0e-3, total_iters: 20}}
    loop: {{max_steps: 20, eval_steps: 2}}
  fit:
    train_dataloader: &train
      data_dir: {data}/train
      batch_size: 32
    val_dataloader: &val
      <<: *train
      data_dir: {data}/val
  validate:
    val_dataloader: *val
"""


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Samples of 16 tokens from a vocabulary of 300."""
    return book_samples(tmp_path_factory.mktemp("data"), val_fraction=0.2)


@pytest.fixture
def base(tmp_path, data):
    """The params file of a small model."""
    path = tmp_path / "base.yaml"
    path.write_text(BASE.format(data=data))
    return path


@pytest.fixture
def headwater(capsys):
    """Runs a command line in this process: exit code, stdout and stderr."""

    def run(*words):
        code = main([str(word) for word in words])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
