"""Small random models of the transformers library, and a process that is killed while it writes one.

As a script it takes `import` or `save`, a folder, `write` or `rename`, and a number. It imports the folder
`library` there to `run`, or saves a model of other values over the folder `saved`. It is killed before the
write, or the rename, of that number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwater as hw
from headwater.cli.main import main

SHARD_BYTES = 5_000_000


def make_model(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    """Return a Llama of 5M parameters with several tensors that threads write."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def save_streamed(seed: int, folder: Path) -> None:
    """Write a model whose weights are on disk to the folder `saved`."""
    model = make_model(seed)
    hw.compile(model, hw.backend("CSX", tier="disk", disk=folder / f"store_{os.getpid()}"))
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    hw.save_pretrained(model, folder / "saved", max_shard_size=SHARD_BYTES)


def import_library(folder: Path) -> int:
    """Import `library` to `run`; return the exit code."""
    return main(["checkpoint", "import", str(folder / "library"), "--model_dir", str(folder / "run")])


def _kill_at(kind: str, number: int) -> None:
    """Kill this process before a write by the threads of files, or before a rename to the folder `saved`."""
    write, rename, lock, counted = os.pwrite, Path.replace, threading.Lock(), 0

    def step() -> None:
        nonlocal counted
        with lock:
            counted += 1
            if counted == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def pwrite(*args: object) -> int:
        if kind == "write" and threading.current_thread().name.startswith("headwater-file"):
            step()
        return write(*args)  # type: ignore[arg-type]

    def replace(self: Path, target: Path) -> Path:
        if kind == "rename" and target.parent.name == "saved":
            step()
        return rename(self, target)

    os.pwrite = pwrite
    Path.replace = replace  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    work, place = sys.argv[1], Path(sys.argv[2])
    _kill_at(sys.argv[3], int(sys.argv[4]))
    if work == "import":
        import_library(place)
    else:
        save_streamed(1, place)
