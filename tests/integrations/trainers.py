"""Trainers of transformers for tests: a small GPT-2, text, and a Trainer that streams or is plain."""

import torch
from places import text_rows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from headwater.integrations.transformers import StreamedTrainer

ROWS = text_rows(110, 24)
TRAIN, VALIDATION = ([{"input_ids": row, "labels": row} for row in part] for part in ROWS.split([90, 20]))


def gpt2():
    return gpt2_with()


def gpt2_with(**options):
    """Return a small GPT-2 with these options of its config."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 2}
    config = GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **options)
    return GPT2LMHeadModel(config)


def trainer_of(place, folder, model=None, **options):
    """Return a Trainer that streams if `place` is a backend, or a plain one if it is `None`."""
    defaults = {"max_steps": 8, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
    defaults |= {"warmup_steps": 3, "weight_decay": 0.1, "save_strategy": "no"}
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **(defaults | options)
    )
    kwargs = {"args": args, "train_dataset": TRAIN, "eval_dataset": VALIDATION}
    kwargs |= model if isinstance(model, dict) else {"model": model or gpt2()}
    return Trainer(**kwargs) if place is None else StreamedTrainer(backend=place, **kwargs)


def history(trainer):
    """Return the logs, without values that depend on the machine."""
    numbers = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{key: entry[key] for key in numbers if key in entry} for entry in trainer.state.log_history]
