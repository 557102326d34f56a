"""Small stores that train on made-up gradients, and functions that read their contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.seeding import derive_seed
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import build_store
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.ownership import Ownership
from headwater.store.pieces import PieceState
from headwater.store.rule import UpdateRule
from headwater.store.snapshot_load import SavedCheckpoint, load_weights
from headwater.store.store import WeightStore
from headwater.store.tier import Tier
from headwater.store.update import Update
from headwater.trainer.checkpoint_inspection import saved_state

ADAMW = OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.1})
MOMENTUM = OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9})
ADAFACTOR = OptimizerSpec("Adafactor", {"lr": 0.1})

SHAPES = {
    "embed.weight": (50, 30),
    "embed.scale": (),
    "block.0.weight": (30, 40),
    "block.0.bias": (40,),
    "block.1.weight": (30, 40),
    "block.1.bias": (40,),
    "head.weight": (7, 3),
}
LARGE = {**SHAPES, "embed.weight": (1100, 1003)}
"""With a parameter of more than one piece."""

FROZEN = "block.0.bias"
UNUSED = "block.1.bias"
STAGES = (("embed.weight", "embed.scale"), ("block.0.weight", "block.0.bias"),
          ("block.1.weight", "block.1.bias"), ("head.weight",))  # fmt: skip


def load_checkpoint(store: WeightStore, path: Path, *, weights_only: bool = False, **options: Any) -> Any:
    """Load a checkpoint into a store; return its step and the state of its run."""
    saved = SavedCheckpoint(path)
    if weights_only:
        load_weights(store, path, **options)
    else:
        saved.restore(store, **options)
    return saved.manifest.step, saved_state(saved)


def make_store(
    folder: Path | None = None,
    *,
    wire: torch.dtype = torch.float32,
    optimizer: OptimizerSpec = ADAMW,
    stages: Sequence[Sequence[str]] = STAGES,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    on_device: bool = False,
) -> WeightStore:
    """Return a store in memory, on a device, or on disk in `folder`; values depend only on the names."""
    specs = [
        StageSpec(index, f"stage{index}", tuple(_spec(name, shapes[name], wire) for name in names))
        for index, names in enumerate(stages)
    ]

    def make_tier(own: Ownership) -> Tier:
        if on_device:
            from tests.on_device import device_tier  # not in scripts that import this module

            return device_tier(own.layouts)
        return MemoryTier(own.layouts) if folder is None else DiskTier(own.layouts, folder)

    every = range(len(specs))
    store = build_store(
        specs,
        UpdateRule(optimizer),
        make_tier,
        on_disk=every if folder else (),
        on_device=every if on_device else (),
    )
    for stage in specs:
        _initialize(store, stage)
    return store


def _spec(name: str, shape: tuple[int, ...], wire: torch.dtype) -> ParamSpec:
    return ParamSpec(name, shape, torch.float32, wire, requires_grad=name != FROZEN)


def _initialize(store: WeightStore, stage: StageSpec) -> None:
    values = [_random(f"initial {p.name}", p.shape).view(-1) for p in stage.params]

    def fill(piece: PieceState) -> None:
        piece.master.copy_(values[piece.param][piece.start : piece.start + piece.master.numel()])
        for state in piece.states.values():
            state.fill_(float("nan"))  # state that the optimizer has never written must not be used

    store.parameters.write(stage.index, fill)


def _random(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(derive_seed(0, key))
    return torch.randn(shape, generator=generator)


def train(store: WeightStore, step: int, *, used: Iterable[int] | None = None) -> None:
    """Fetch the stages `used` (default: all), add gradients that depend on step and name, and commit."""
    stages = [store.stages[index] for index in used] if used is not None else store.stages
    add_gradients(store, step, stages)
    store.commit(Update(step, {"lr": 0.01 / (step + 1)}))


def add_gradients(store: WeightStore, step: int, stages: Sequence[StageSpec]) -> None:
    """Fetch the stages, and add gradients that depend on step and name."""
    store.begin_step()
    for stage in stages:
        fetch_stage(store, stage.index)
    for stage in stages:
        for index, spec in enumerate(stage.params):
            if spec.requires_grad and spec.name != UNUSED:
                gradient = _random(f"{step} {spec.name}", spec.shape).to(spec.wire_dtype)
                store.add_gradient((stage.index, index), gradient, last=True)
    store.end_micro_batch()


def fetch_stage(store: WeightStore, stage: int) -> None:
    """Fetch a stage, as the executor does before it uses the stage."""
    store.fetch(stage, aligned_empty(store.tier.layouts[stage].wire_bytes))


def contents(store: WeightStore) -> dict[str, torch.Tensor | dict[str, object] | None]:
    """Return masters, optimizer state tensors and scalars by name, without state that was never written."""
    found: dict[str, torch.Tensor | dict[str, object] | None] = {}
    for stage in store.stages:
        runs: dict[str, list[torch.Tensor]] = {}
        for piece in store.parameters.read(stage.index):
            name = stage.params[piece.param].name
            runs.setdefault(name, []).append(piece.master.clone())
            if store.scalars.by_stage[stage.index][piece.param] is not None:
                for state, values in piece.states.items():
                    runs.setdefault(f"{name}/{state}", []).append(values.clone().view(-1))
        found |= {name: torch.cat(parts) for name, parts in runs.items()}
        found |= {
            f"{spec.name}/scalars": scalars
            for spec, scalars in zip(stage.params, store.scalars.by_stage[stage.index], strict=True)
        }
    return found


def assert_same(left: WeightStore, right: WeightStore) -> None:
    """Assert that both stores hold the same bits."""
    ours, theirs = contents(left), contents(right)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name  # type: ignore[arg-type]
        else:
            assert _typed(value) == _typed(other), name


def _typed(scalars: object) -> object:
    if not isinstance(scalars, dict):
        return scalars
    return {
        name: (value.dtype, value.item()) if isinstance(value, torch.Tensor) else (type(value), value)
        for name, value in scalars.items()
    }
