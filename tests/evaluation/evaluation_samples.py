"""Texts, tokenizer and settings of the small models that these tests evaluate."""

import json
from pathlib import Path

from shared_data import SHARED

BENCHMARKS = SHARED / "data" / "benchmarks"
TASK_FILES = Path(__file__).parent / "tasks"
MODEL = {
    "name": "gpt2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "max_position_embeddings": 96,
    "dropout_rate": 0.0,
    "initializer": {"name": "normal", "std": 0.3},
}
TEXT = "The river runs past the mill, and the mill grinds the corn of the village. " * 20

PARAMS = """\
trainer:
  init:
    backend: {backend_type: CPU}
    seed: 1
    model:
      name: gpt2
      vocab_size: 300
      hidden_size: 32
      num_hidden_layers: 2
      num_heads: 2
      max_position_embeddings: 64
      dropout_rate: 0.1
    optimizer: {AdamW: {learning_rate: 0.01}}
    loop: {max_steps: 4, eval_frequency: 1}
  fit:
    train_dataloader:
      data_processor: GptHDF5DataProcessor
      batch_size: 4
      shuffle: true
"""
"""Params of a run of four steps, without callbacks and data."""


def save_tokenizer(folder, texts=(TEXT,), size=400):
    """Train a small tokenizer and save it as the transformers library does."""
    from headwater.data.tokenizer import TrainBPE

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = TrainBPE(size).train(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def losses(folder):
    records = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]
