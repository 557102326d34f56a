"""A checkpoint of transformers larger than memory: `python -m benchmarks.finetune --folder /scratch`.

A randomly initialised Llama checkpoint of 1.3B parameters is written in sharded safetensors, then loaded
directly into the store, trained in a user's loop, written back, and loaded again. The process measures its
peak of resident memory. Saving and loading are compared with copying a plain file of as many bytes: the
weights are on disk before and after. All of it takes about 24 bytes of disk for each parameter. The files are
removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch

from benchmarks.checkpoints import Disk, bytes_in, leave_cache
from benchmarks.resident import peak_rss_bytes
from benchmarks.runner import is_part, print_table, save

VOCABULARY = 32000


def _folder(args: argparse.Namespace) -> Path:
    """Return the folder of all files, which is removed at the end."""
    folder: Path = args.folder / "headwater-finetune"
    return folder


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
    model.save_pretrained(_folder(args) / "checkpoint", max_shard_size="1GB")
    return {"parameters": sum(param.numel() for param in model.parameters())}


def train(args: argparse.Namespace) -> dict[str, object]:
    """Load the checkpoint, train some steps, and write it back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import headwater as hw

    backend = hw.backend(
        "CSX", tier="disk", disk=_folder(args) / "store", host_memory=args.memory, device_memory=args.memory
    )
    start = time.perf_counter()
    with hw.empty_parameters():
        config = AutoConfig.from_pretrained(_folder(args) / "checkpoint")
        model = AutoModelForCausalLM.from_config(config).train()
    hw.load_pretrained(model, _folder(args) / "checkpoint")
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
    report = {
        "first_step_s": round(times[0], 1),
        "step_s": round(times[-1], 1),
        "losses": losses,
        "train_peak_gib": round(peak_rss_bytes() / 2**30, 2),
    }
    report |= save_and_load(model, _folder(args))
    return report | {
        "peak_gib": round(peak_rss_bytes() / 2**30, 2),
        "all_s": round(time.perf_counter() - start, 1),
    }


def save_and_load(model: torch.nn.Module, folder: Path) -> dict[str, object]:
    """Save the model twice and load it again. Return the rates beside those of plain files, in MB/s.

    The first save also applies the update of the last step, which reads and writes the whole store.
    """
    import headwater as hw

    trained = folder / "trained"
    began = time.perf_counter()
    hw.save_pretrained(model, trained, max_shard_size="1GB")
    updated = time.perf_counter() - began
    shutil.rmtree(trained)
    began = time.perf_counter()
    hw.save_pretrained(model, trained, max_shard_size="1GB")
    saved = time.perf_counter() - began
    num_bytes = sum(bytes_in(path) for path in trained.glob("*.safetensors"))
    leave_cache(trained)
    began = time.perf_counter()
    hw.load_pretrained(model, trained)
    loaded = time.perf_counter() - began
    peak = peak_rss_bytes()
    _check_equal(model, trained)
    disk = Disk(folder)
    plain = {"plain_write_mb_s": disk.write(num_bytes), "plain_copy_mb_s": disk.copy(num_bytes)}
    seconds = {"save_mb_s": saved, "load_mb_s": loaded, **plain}
    return {
        "file_gb": round(num_bytes / 1e9, 2),
        "update_and_save_s": round(updated, 1),
        **{name: round(num_bytes / taken / 1e6) for name, taken in seconds.items()},
        "save_of_copy": round(plain["plain_copy_mb_s"] / saved, 2),
        "load_of_copy": round(plain["plain_copy_mb_s"] / loaded, 2),
        "files_peak_gib": round(peak / 2**30, 2),
    }


def _check_equal(model: torch.nn.Module, folder: Path) -> None:
    """Raise if the files differ from the weights of the model."""
    params = dict(model.named_parameters())
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            for name in [*file.keys()]:
                if not torch.equal(file.get_tensor(name), params[name].detach().clone()):
                    raise AssertionError(f"{name} in {path} differs from the weights of the model")


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
    parser = make_parser()
    args = parser.parse_args()
    if args.part:
        print("RESULT " + json.dumps(PARTS[args.part](args)))
        return
    row: dict[str, object] = {}
    shutil.rmtree(_folder(args), ignore_errors=True)
    _folder(args).mkdir(parents=True)
    try:
        for part in PARTS:
            command = [sys.executable, "-m", "benchmarks.finetune", *sys.argv[1:], "--part", part]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row |= json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    finally:
        shutil.rmtree(_folder(args))
    print_table([row])
    smaller = is_part(parser, args, "layers", "width", "sequence", "batch", "steps", "memory")
    print(save("finetune", row, part=smaller))


if __name__ == "__main__":
    main()
