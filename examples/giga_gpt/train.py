"""GPT-3 from a tiny one to 175B parameters, by params alone.

python examples/giga_gpt/train.py examples/giga_gpt/tiny.yaml     # train, or continue the run
python examples/giga_gpt/train.py examples/giga_gpt/175b.yaml --plan --host_memory 4TiB
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import yaml
from model import GPT, Shape
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import headwater as hw

Pair = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Params:
    """A params file: the shape of the model, the training, and limits of memory and disk.

    A batch is `accumulate` parts of `batch_size` samples, one after the other.
    """

    shape: dict[str, Any]
    data: Path
    out: Path
    batch_size: int
    steps: int
    warmup_steps: int
    learning_rate: float
    checkpoint_steps: int
    accumulate: int = 1
    weight_decay: float = 0.1
    epsilon: float = 1e-8
    seed: int = 1
    bf16: bool = False
    backend: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Params":
        values = yaml.safe_load(file.read_text())
        return cls(**{**values, "data": Path(values["data"]), "out": Path(values["out"])})


class Samples(Dataset[Pair]):
    """The samples that `headwater data` has written: token ids and next ids, each [positions]."""

    def __init__(self, folder: Path, at_least: int = 1) -> None:
        self.parts = [h5py.File(file)["data"] for file in sorted(folder.glob("*.h5"))]
        self.ends = np.cumsum([len(part) for part in self.parts])
        if (count := sum(map(len, self.parts))) < at_least:
            raise SystemExit(f"expected at least {at_least} samples in {folder}, got {count}")

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Pair:
        number = int(np.searchsorted(self.ends, index, side="right"))
        ids, _, labels = self.parts[number][index - self.ends[number]]
        return torch.from_numpy(ids).long(), torch.from_numpy(labels).long()


def batches(params: Params, first: int) -> DataLoader[Pair]:
    """Return the batches from step `first` on, in an order that depends on the seed alone."""
    size = params.batch_size * params.accumulate
    samples = Samples(params.data, size)

    def order() -> Iterator[list[int]]:
        per_epoch = len(samples) // size
        for step in range(first, params.steps):
            epoch, place = divmod(step, per_epoch)
            if step == first or place == 0:
                shuffled = np.random.default_rng((params.seed, epoch)).permutation(len(samples))
            yield shuffled[place * size :][:size].tolist()

    return DataLoader(samples, batch_sampler=order())


def make_optimizer(model: GPT, params: Params) -> torch.optim.AdamW:
    """Return AdamW, with weight decay for matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": params.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=params.learning_rate, betas=(0.9, 0.95), eps=params.epsilon)


def make_schedule(optimizer: torch.optim.Optimizer, params: Params) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule: a straight rise, then half a cosine to a tenth."""

    def factor(step: int) -> float:
        if step < params.warmup_steps:
            return (step + 1) / params.warmup_steps
        progress = (step - params.warmup_steps) / max(1, params.steps - params.warmup_steps)
        return 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def half(params: Params) -> AbstractContextManager[object]:
    """Return the context of a forward: bf16 if the params ask for it, else fp32."""
    return hw.amp.autocast() if params.bf16 else nullcontext()


def plan(params: Params) -> None:
    """Print the plan of a step, with memory and tiers, and exit. Needs neither weights nor data."""
    shape = Shape(**params.shape)
    backend = hw.backend("CSX", compile_only=True, compile_dir=params.out / "plan", **params.backend)
    with torch.device("meta"):
        model = hw.compile(GPT(shape), backend)
        ids = torch.zeros(params.batch_size, shape.positions, dtype=torch.long)
    with half(params):
        model(ids, ids)


def train(params: Params, backend: str = "CSX") -> list[float]:
    """Train, or continue the run in `params.out`; return the losses. `CPU` and `GPU` are plain PyTorch."""
    params.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(params.seed)
    device = hw.backend(backend, **(params.backend if backend == "CSX" else {}))
    with device.device:
        model = GPT(Shape(**params.shape))
    hw.compile(model, device)
    optimizer = make_optimizer(model, params)
    schedule = make_schedule(optimizer, params)
    saved = sorted(params.out.glob("checkpoint_*.mdl"))
    first = 0
    if saved:
        state = hw.load(saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = int(state["step"])
    losses: list[float] = []
    if first >= params.steps:
        return losses

    @hw.trace
    def training_step(ids: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(())
        for part in zip(ids.chunk(params.accumulate), labels.chunk(params.accumulate), strict=True):
            with half(params):
                loss = model(*part) / params.accumulate
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    @hw.step_closure
    def log(step: int, loss: Tensor) -> None:
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.4f}", flush=True)

    @hw.checkpoint_closure
    def save(step: int) -> None:
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        state = {name: part.state_dict() for name, part in parts.items()}
        hw.save({**state, "step": step}, params.out / f"checkpoint_{step:08d}.mdl")

    executor = hw.utils.data.DataExecutor(
        hw.utils.data.DataLoader(batches, params, first),
        num_steps=params.steps - first,
        checkpoint_steps=params.checkpoint_steps,
    )
    for step, (ids, labels) in enumerate(executor, first + 1):
        log(step, training_step(ids, labels))
        save(step)
    return losses


def evaluate(params: Params) -> float:
    """Return the mean loss of the newest checkpoint on the samples in `val` beside the training data."""
    if not (saved := sorted(params.out.glob("checkpoint_*.mdl"))):
        raise SystemExit(f"expected a checkpoint in {params.out}, found none: train first, without --eval")
    samples = Samples(params.data.parent / "val", params.batch_size)
    device = hw.backend("CSX", **params.backend)
    with device.device:
        model = hw.compile(GPT(Shape(**params.shape)), device)
    model.load_state_dict(hw.load(saved[-1])["model"])
    with torch.no_grad():
        losses = [model(*batch).item() for batch in DataLoader(samples, params.batch_size, drop_last=True)]
    return sum(losses) / len(losses)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("params", type=Path)
    parser.add_argument("--plan", action="store_true", help="plan a step instead of training")
    parser.add_argument("--eval", action="store_true", help="print the loss on the validation data")
    parser.add_argument("--host_memory", help="memory of the machine to plan or train for, such as 4TiB")
    parser.add_argument("--backend", default="CSX", help="CSX streams; CPU and GPU are plain PyTorch")
    args = parser.parse_args(words)
    params = Params.read(args.params)
    if args.host_memory:
        params = dataclasses.replace(params, backend={**params.backend, "host_memory": args.host_memory})
    if args.plan:
        plan(params)
    elif args.eval:
        print(f"validation loss {evaluate(params):.4f}")
    else:
        train(params, args.backend)


if __name__ == "__main__":
    main()
