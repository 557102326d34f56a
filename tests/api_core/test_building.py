"""A model that is built in files has the values of torch's initialisation and needs little memory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.api.building import BuildInFiles
from headwater.core.errors import DiskFullError
from headwater.core.file_memory import LARGE_BYTES


class Odd(nn.Module):
    """A model whose parameters are made in different ways, most of them large enough for a file."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 1024)
        self.embedding = nn.Embedding(4096, 256, padding_idx=3)
        self.lstm = nn.LSTM(256, 512)
        self.drawn = nn.Parameter(torch.randn(1024, 512))
        self.uniform = nn.Parameter(torch.rand(size=(1024, 512)))
        self.ones = nn.Parameter(torch.ones((1024, 512), dtype=torch.float64))
        self.full = nn.Parameter(torch.full((1024, 512), 0.5))
        self.small = nn.Parameter(torch.zeros(3))
        self.whole = nn.Parameter(torch.zeros(1024, 512, dtype=torch.int64), requires_grad=False)
        self.register_buffer("table", torch.arange(1 << 18).float())
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.drawn)
        with torch.no_grad():
            self.ones[0, :7] = 2.0


@pytest.mark.parametrize(
    "make", [Odd, lambda: GPT2LMHeadModel(GPT2Config(vocab_size=8000, n_embd=256, n_layer=2, n_head=4))]
)
def test_initial_values_equal_those_of_torch(make, tmp_path):
    torch.manual_seed(3)
    plain, after = make().state_dict(), torch.rand(())
    torch.manual_seed(3)
    with BuildInFiles(tmp_path):
        model = make()
    assert torch.rand(()) == after
    built = model.state_dict()
    assert built.keys() == plain.keys()
    for name, value in plain.items():
        assert built[name].dtype == value.dtype
        assert torch.equal(built[name], value), name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1, True, 2.5, 1j])
def test_full_takes_the_dtype_of_its_value(value, tmp_path):
    shape = (1 << 10, 1 << 11)
    with BuildInFiles(tmp_path):
        built = torch.full(shape, value)
    assert built.dtype == torch.full((), value).dtype
    assert torch.equal(built, torch.full(shape, value))


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_tensors_in_files_keep_no_file_open(tmp_path):
    """Many systems allow a process 1,024 open files. A large model has more tensors."""
    before = open_files()
    with BuildInFiles(tmp_path):
        made = [torch.full((1 << 18,), float(number)) for number in range(20)]
    assert open_files() == before
    assert [tensor[-1].item() for tensor in made] == list(range(20))


def test_another_default_device_has_no_effect(tmp_path):
    with torch.device("meta"):
        with BuildInFiles(tmp_path):
            small, large = torch.ones(2), torch.ones(LARGE_BYTES // 4)
            with torch.device("meta"):
                inside = torch.ones(2)
        outside = torch.ones(2)
    assert small.device == large.device == torch.device("cpu")
    assert small.sum() == 2 and large.sum() == len(large)
    assert inside.is_meta and outside.is_meta


def test_a_full_disk_is_an_error_when_a_tensor_is_made(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with BuildInFiles(tmp_path), pytest.raises(DiskFullError):
        torch.zeros(1 << 20)


MEMORY = """
import json, sys, torch
from pathlib import Path
from torch import nn
import headwater as hw

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

backend = hw.backend("CSX", disk=sys.argv[1])
torch.nn.Linear(4, 4)
before = status("VmRSS")
with backend.device:
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(64)))
    for layer in model:
        nn.init.normal_(layer.weight)
count = sum(param.numel() for param in model.parameters())
print(json.dumps({"rise": (status("VmHWM") - before) << 10, "bytes": 4 * count}))
"""


@pytest.mark.real_start
def test_memory_stays_small(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert found["bytes"] == 1 << 30
    assert found["rise"] < 300 << 20


LOADED_AND_TRAINED = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from torch import nn
import headwater as hw

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) << 10

folder = Path(sys.argv[1])
save_file({f"{number}.weight": torch.eye(1024) for number in range(96)}, folder / "model.safetensors")
before = status("VmRSS")
backend = hw.backend("CSX", disk=folder / "store", host_memory=before + (400 << 20))
with backend.device:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(96)))
hw.load_pretrained(model, folder)
loaded = status("VmRSS") - before
hw.compile(model, backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.ones(4, 1024)
loss = (model(x) - 2).square().mean()
loss.backward()
optimizer.step()
print(json.dumps({"loaded": loaded, "rise": status("VmHWM") - before, "loss": loss.item()}))
"""


@pytest.mark.real_start
def test_weights_in_files_count_in_no_budget_and_are_loaded_in_little_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOADED_AND_TRAINED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] < 200 << 20  # the weights have 384 MiB
    assert found["rise"] < 400 << 20
    assert found["loss"] == 1.0
