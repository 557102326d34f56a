"""A block is sent to another process without its weights, and measured there eager and compiled."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from block_samples import PLACE, Failing, Killed, Leaving, Shifted, Talking, Waiting
from torch import nn

from headwater.core.loss_function import call_model
from headwater.core.precision import Precision
from headwater.fabric.parent import is_alive
from headwater.stream.block_call import BlockCall, find_calls, pack, unpack
from headwater.stream.block_measuring import measure_block
from headwater.stream.block_probe import Conditions

CONDITIONS = Conditions("cpu", "bf16", 1, "exact", [str(Path(__file__).parent), *sys.path])
DTYPES = {"linear.weight": torch.bfloat16, "linear.bias": torch.bfloat16}


def call_of(block, **inputs):
    return BlockCall(block, (torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True),), inputs)


def test_a_packed_call_has_shapes_dtypes_and_shared_weights_but_no_values():
    call = call_of(Shifted(), mask=torch.zeros(2, 5, dtype=torch.bool))
    with torch.no_grad():
        call.block.linear.weight.fill_(123.0)
    found = unpack(io.BytesIO(pack(call, DTYPES)), "cpu")
    weight = found.block.linear.weight
    assert isinstance(weight, nn.Parameter)
    assert found.block.again.weight is weight
    assert (weight.shape, weight.dtype) == ((8, 8), torch.bfloat16)
    assert (weight != 123).all()
    (x,) = found.args
    assert (x.shape, x.dtype, x.requires_grad) == ((2, 5, 8), torch.bfloat16, True)
    assert not torch.equal(x, call.args[0])
    assert found.block.order.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]  # indices, so the values matter
    assert found.kwargs["mask"].dtype == torch.bool


def test_a_packed_block_is_small():
    wide = nn.Linear(1024, 1024)
    packed = pack(BlockCall(wide, (torch.zeros(1, 1024),), {}), {})
    assert len(packed) < 4000


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x):
        for block in self.blocks[:2]:
            x = block(x)
        return x.square().mean()


def test_the_calls_of_blocks_are_found_in_a_dry_run():
    model = Model().to("meta")
    calls = find_calls(model, torch.zeros(2, 5, 8), Precision("bf16"), call_model, ["blocks.1", "blocks.2"])
    assert list(calls) == ["blocks.1"]  # the model does not call the third
    call = calls["blocks.1"]
    assert call.block is model.blocks[1]
    assert (call.args[0].shape, call.args[0].requires_grad) == ((2, 5, 8), True)
    assert "_call_impl" not in vars(call.block)
    pack(call, DTYPES)


def test_a_block_that_another_process_cannot_have_is_refused():
    class Local(Shifted):
        pass

    with pytest.raises((AttributeError, TypeError), match="Local"):
        pack(call_of(Local()), DTYPES)


def test_a_measurement_ends_at_its_limit():
    found = measure_block(pack(call_of(Shifted()), DTYPES), CONDITIONS, most_wall_s=0.05)
    assert found == "a block was not compiled and measured within 0.05 s"


def ended(process):
    """Block until a process has ended."""
    while is_alive(process):
        time.sleep(0.01)


def test_a_measurement_ends_with_its_parent(tmp_path):
    (tmp_path / "call").write_bytes(pack(call_of(Waiting()), DTYPES))
    code = (
        "import pathlib; from headwater.stream.block_measuring import measure_block; "
        "from headwater.stream.block_probe import Conditions; "
        f"measure_block(pathlib.Path({str(tmp_path / 'call')!r}).read_bytes(), {CONDITIONS!r})"
    )
    place = tmp_path / "number"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, PLACE: str(place)})
    while not place.exists():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    ended(int(place.read_text()))


def test_a_measurement_leaves_no_process_behind(tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE, str(tmp_path / "number"))
    found = measure_block(pack(call_of(Leaving()), DTYPES), CONDITIONS)
    assert found == "a block could not be compiled and measured: ValueError: it has crashed"
    ended(int((tmp_path / "number").read_text()))


def test_a_measurement_that_is_killed_has_no_times():
    found = measure_block(pack(call_of(Killed()), DTYPES), CONDITIONS)
    assert found == "a block could not be compiled and measured: its process was ended by SIGKILL"


@pytest.mark.slow
def test_a_block_is_measured_eager_and_compiled():
    mask = torch.ones(2, 5, dtype=torch.bool)
    times = measure_block(pack(call_of(Talking(), mask=mask), DTYPES), CONDITIONS)
    assert min(times.eager_forward_s, times.eager_backward_s) > 0
    assert min(times.compiled_forward_s, times.compiled_backward_s) > 0
    assert times.compile_s > times.compiled_forward_s
    assert times.noise >= 0


@pytest.mark.slow
def test_a_machine_without_a_compiler_has_no_times(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no code of an earlier run
    found = measure_block(pack(call_of(Shifted()), DTYPES), CONDITIONS)
    assert isinstance(found, str)
    assert found.startswith("a block could not be compiled and measured: ")
    assert "ompiler" in found


def test_an_error_of_the_block_is_repeated():
    found = measure_block(pack(call_of(Failing()), DTYPES), CONDITIONS)
    assert found == "a block could not be compiled and measured: ValueError: no values, no output"
