"""The example of GPT-3: its length, its plans at 1B to 175B, and its training, bit-equal to plain PyTorch."""

import ast
import dataclasses
import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import headwater as hw

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "giga_gpt"
FILES = sorted(FOLDER.glob("*.py"))
SIZES = {"1b": 1.32e9, "20b": 20.2e9, "70b": 64.9e9, "175b": 174.6e9}
"""Parameters, by the name of a params file."""

TINY = {"depth": 2, "width": 16, "heads": 2, "vocab_size": 40, "positions": 8}


@pytest.fixture
def example(monkeypatch):
    """The module `train` of the example."""
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module("train")
    for name in {"train", "model"} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def params(tmp_path, example):
    """The params of a run of six steps on random tokens in two files."""
    folder = tmp_path / "data"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(2):
        tokens = random.integers(0, 40, (9, 9), dtype=np.int32)
        rows = np.stack([tokens[:, :-1], np.ones((9, 8), np.int32), tokens[:, 1:]], axis=1)
        with h5py.File(folder / f"data-{number}.h5", "w") as file:
            file["data"] = rows
    return example.Params(
        shape=TINY,
        data=folder,
        out=tmp_path / "out",
        batch_size=2,
        accumulate=2,
        steps=6,
        warmup_steps=2,
        learning_rate=1e-2,
        checkpoint_steps=3,
        backend={"num_slabs": 2},
    )


def test_at_most_300_lines():
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 300


def test_only_the_public_api_and_no_parallel_code():
    for file in FILES:
        tree = ast.parse(file.read_text())
        imported = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name for name in imported if name.startswith("headwater")} <= {"headwater"}
        assert not any("distributed" in name or "multiprocessing" in name for name in imported)
        assert "rank" not in file.read_text()


@pytest.mark.parametrize("name", SIZES)
def test_large_sizes_are_planned_by_params_alone(example, tmp_path, name, capsys):
    params = example.Params.read(FOLDER / f"{name}.yaml")
    disk = {"path": str(tmp_path / "scratch"), "size": "8TiB"}
    backend = {"host_memory": "512GiB", "disk": disk}
    with pytest.raises(SystemExit) as ended:
        example.plan(dataclasses.replace(params, out=tmp_path, backend=backend))
    assert not ended.value.code
    assert "no plan" not in capsys.readouterr().out
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    with torch.device("meta"):
        model = example.GPT(example.Shape(**params.shape))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[name], rel=0.01)
    blocks = [stage for stage in plan["trace"]["stages"] if stage["name"].startswith("blocks.")]
    assert len(blocks) == params.shape["depth"]
    assert plan["prediction"]["host_bytes"] < 512 * 2**30
    assert plan["tier"] == ("memory" if name in ("1b", "20b") else "disk")


def test_streamed_losses_are_those_of_plain_pytorch(example, params):
    """The loop is written again here, without the example's loop and without Headwater."""
    torch.manual_seed(params.seed)
    model = example.GPT(example.Shape(**params.shape))
    optimizer = example.make_optimizer(model, params)
    schedule = example.make_schedule(optimizer, params)
    expected = []
    for ids, labels in example.batches(params, 0):
        total = torch.zeros(())
        for start in (0, 2):
            loss = model(ids[start : start + 2], labels[start : start + 2]) / 2
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(total.item())
    assert example.train(params) == expected
    assert len(set(expected)) == params.steps == 6


def test_a_run_continues_from_its_checkpoint(example, params, tmp_path):
    whole = example.train(dataclasses.replace(params, out=tmp_path / "whole"))
    (last,) = (tmp_path / "whole").glob("checkpoint_00000006.mdl")
    last.unlink()
    rest = example.train(dataclasses.replace(params, out=tmp_path / "whole"))
    assert rest == whole[3:]
    assert example.train(dataclasses.replace(params, out=tmp_path / "whole")) == []


def test_evaluation_is_that_of_plain_pytorch(example, params, tmp_path):
    example.train(params)
    params.data.rename(tmp_path / "val")
    state = hw.load(params.out / "checkpoint_00000006.mdl")["model"]
    model = example.GPT(example.Shape(**params.shape))
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    loader = torch.utils.data.DataLoader(example.Samples(tmp_path / "val"), params.batch_size)
    with torch.no_grad():
        losses = [model(*batch).item() for batch in loader]
    assert example.evaluate(params) == sum(losses) / len(losses)


def test_the_order_is_computed_as_it_is_needed(example, params):
    endless = dataclasses.replace(params, steps=10**9)
    for first in (0, 3, 5):  # an epoch has 18 // 4 steps
        found = list(itertools.islice(example.batches(endless, first).batch_sampler, 9))
        expected = []
        for step in range(first, first + 9):
            random = np.random.default_rng((params.seed, step // 4))
            expected.append(random.permutation(18)[step % 4 * 4 :][:4].tolist())
        assert found == expected


def test_missing_samples_and_checkpoints_are_named(example, params):
    with pytest.raises(SystemExit, match=r"expected at least 20 samples in .* got 18"):
        example.batches(dataclasses.replace(params, batch_size=10), 0)
    with pytest.raises(SystemExit, match="train first"):
        example.evaluate(params)
    params.out.mkdir()
    (params.out / "checkpoint_00000006.mdl").touch()
    with pytest.raises(SystemExit, match=r"expected at least 2 samples in .*val, got 0"):
        example.evaluate(params)


def test_the_command_trains_the_tiny_size(params, tmp_path):
    text = (FOLDER / "tiny.yaml").read_text()
    shape = "shape: {depth: 2, width: 16, heads: 2, vocab_size: 40, positions: 8}\n"
    lines = [line for line in text.splitlines() if not line.startswith(("shape:", "data:", "out:", "steps:"))]
    file = tmp_path / "tiny.yaml"
    file.write_text("\n".join(lines) + f"\n{shape}data: {params.data}\nout: {tmp_path / 'run'}\nsteps: 2\n")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["step", "1"], ["step", "2"]]
