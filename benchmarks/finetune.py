"""A checkpoint of transformers larger than memory: `python -m benchmarks.finetune --folder /scratch`.

A randomly initialised Llama checkpoint of 1.3B parameters is written in sharded safetensors, then loaded
directly into the store, trained in a user's loop, and written back. The process measures its peak of resident
memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.resident import peak_rss_bytes
from benchmarks.runner import print_table, save

VOCABULARY = 32000


def make(args: argparse.Namespace) -> dict[str, object]:
    """Write the random checkpoint."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(args.folder / "checkpoint", max_shard_size="1GB")
    return {"parameters": sum(param.numel() for param in model.parameters())}


def train(args: argparse.Namespace) -> dict[str, object]:
    """Load the checkpoint, train some steps, and write it back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import headwater as hw

    backend = hw.backend(
        "CSX", tier="disk", disk=args.folder / "store", host_memory=args.memory, device_memory=args.memory
    )
    start = time.perf_counter()
    with hw.empty_parameters():
        config = AutoConfig.from_pretrained(args.folder / "checkpoint")
        model = AutoModelForCausalLM.from_config(config).train()
    hw.load_pretrained(model, args.folder / "checkpoint")
    hw.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    times, losses = [], []
    for _ in range(args.steps):
        began = time.perf_counter()
        tokens = torch.randint(0, VOCABULARY, (args.batch, args.sequence), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    trained_peak = peak_rss_bytes()
    began = time.perf_counter()
    hw.save_pretrained(model, args.folder / "trained", max_shard_size="1GB")
    return {
        "first_step_s": round(times[0], 1),
        "step_s": round(times[-1], 1),
        "losses": losses,
        "train_peak_gib": round(trained_peak / 2**30, 2),
        "save_s": round(time.perf_counter() - began, 1),
        "peak_gib": round(peak_rss_bytes() / 2**30, 2),
        "all_s": round(time.perf_counter() - start, 1),
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {"make": make, "train": train}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", default="3.5GiB")
    parser.add_argument("--part", choices=PARTS, help="run only this part, in this process")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.part:
        print("RESULT " + json.dumps(PARTS[args.part](args)))
        return
    row: dict[str, object] = {}
    for part in PARTS:
        command = [sys.executable, "-m", "benchmarks.finetune", *sys.argv[1:], "--part", part]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row |= json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    print_table([row])
    print(save("finetune", row))


if __name__ == "__main__":
    main()
