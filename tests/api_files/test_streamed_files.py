"""Checkpoints of a streamed model, in both formats, against transformers and plain PyTorch."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from headwater.api.backend import backend  # noqa: E402
from headwater.api.compile import compile  # noqa: E402
from headwater.api.files import load, save  # noqa: E402
from headwater.api.pretrained import load_pretrained, save_pretrained  # noqa: E402
from headwater.core.empty import empty_parameters  # noqa: E402
from headwater.core.lazy import StoredTensor  # noqa: E402
from headwater.store.parameters import Parameters  # noqa: E402

AUTO = transformers.AutoModelForCausalLM
TOKENS = torch.arange(24).view(2, 12) * 7 % 90 + 3


def make_config():
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=96, **special, **dropout
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    AUTO.from_config(make_config()).save_pretrained(folder, max_shard_size="20KB")
    return folder


def make_plain(folder):
    model = AUTO.from_pretrained(folder)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def make_streamed(folder):
    with empty_parameters():
        model = AUTO.from_config(make_config())
    load_pretrained(model, folder)
    compile(model, backend("CSX", num_slabs=2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(model, expected):
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_fine_tuned_model_is_saved_for_transformers(pretrained, tmp_path):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    assert train(*streamed, 3) == train(*plain, 3)
    save_pretrained(streamed[0], tmp_path, max_shard_size="20KB")
    assert_same_weights(AUTO.from_pretrained(tmp_path), plain[0])


def test_state_files(pretrained, tmp_path):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    for who in (plain, streamed):
        train(*who, 2)
    state = {"model": streamed[0].state_dict(), "optimizer": streamed[1].state_dict()}
    assert all(isinstance(value, StoredTensor) for value in state["model"].values())
    save(state, tmp_path / "x.mdl")
    expected = train(*plain, 2)
    for resumed in (make_streamed(pretrained), make_plain(pretrained)):
        train(*resumed, 1)
        found = load(tmp_path / "x.mdl")
        resumed[0].load_state_dict(found["model"])
        resumed[1].load_state_dict(found["optimizer"])
        assert train(*resumed, 2) == expected


def test_a_checkpoint_is_loaded_into_a_streamed_model(pretrained):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    train(*streamed, 1)
    load_pretrained(streamed[0], pretrained)
    assert_same_weights(streamed[0], plain[0])


def test_masters_keep_the_precision_of_the_checkpoint(pretrained, tmp_path):
    model, optimizer = make_streamed(pretrained)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, 1)
    load_pretrained(model, pretrained)
    save_pretrained(model, tmp_path)
    assert_same_weights(AUTO.from_pretrained(tmp_path), AUTO.from_pretrained(pretrained))


def test_a_save_reads_each_stage_once(pretrained, tmp_path, monkeypatch):
    model, optimizer = make_streamed(pretrained)
    train(model, optimizer, 1)
    stages, read = [], Parameters.read

    def note(self, stage, **options):
        stages.append(stage)
        return read(self, stage, **options)

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    monkeypatch.setattr(Parameters, "read", note)
    save(state, tmp_path / "x.mdl")
    assert len(stages) == len(set(stages)) > 3
    stages.clear()
    save_pretrained(model, tmp_path / "folder", max_shard_size="20KB")
    assert len(stages) == len(set(stages)) > 3
    monkeypatch.undo()
    found = load(tmp_path / "x.mdl")
    for name, value in state["model"].items():
        assert torch.equal(found["model"][name], value), name
    for number, moments in state["optimizer"]["state"].items():
        assert torch.equal(found["optimizer"]["state"][number]["exp_avg"], moments["exp_avg"]), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_the_store_divides_in_another_way_than_the_file(dtype, tmp_path):
    """The checksums of a file are of 4 MiB each, which is neither a piece of bf16 nor one of whole rows."""
    torch.manual_seed(0)
    layers = [nn.Embedding(1100, 1003, sparse=True, dtype=dtype), nn.Linear(1003, 1100, dtype=dtype)]
    model = compile(nn.Sequential(*layers), backend("CSX"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6)).float().square().sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    save(model.state_dict(), tmp_path / "x")
    found = load(tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(found)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


_MEMORY = """
import sys, torch
from pathlib import Path
from torch import nn
import headwater as hw

def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10

def run(width, depth, folder):
    folder.mkdir()
    with hw.empty_parameters():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    state = {name: torch.zeros(()).expand(param.shape) for name, param in model.named_parameters()}
    hw.save(state, folder / "first")
    model.load_state_dict(hw.load(folder / "first"), assign=True)
    hw.compile(model, hw.backend("CSX", tier="disk", disk=folder / "store", num_slabs=2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, width))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak_mib()
    hw.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x")
    hw.save_pretrained(model, folder / "pretrained")
    saved = peak_mib() - before
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_mib()
    found = hw.load(folder / "x")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    hw.load_pretrained(model, folder / "pretrained")
    return saved, peak_mib() - before

run(64, 2, Path(sys.argv[1]) / "warm")
print(*run(1024, 8, Path(sys.argv[1]) / "large"))
"""


@pytest.mark.real_start
def test_files_of_a_model_on_disk_take_little_memory(tmp_path):
    """The state has 96 MiB, 4 MiB in each tensor. Reads and writes have 32 MiB of buffers."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # what is freed goes back to the system
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saved, loaded = map(int, done.stdout.split())
    assert saved < 48
    assert loaded < 48
