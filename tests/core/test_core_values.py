"""Seeds, precision, errors and buffers."""

import copy
import pickle

import pytest
import torch

from headwater.core import errors
from headwater.core.buffers import PAGE_BYTES, aligned_empty, round_up
from headwater.core.loss_function import call_model
from headwater.core.precision import Precision, autocast
from headwater.core.seeding import derive_seed, seed_generators

ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_cross_process_boundaries(cls):
    error = cls("it is wrong", where="here", remedy="do that")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is cls
        assert (other.what, other.where, other.remedy) == ("it is wrong", "here", "do that")
        assert str(other) == str(error) == "it is wrong\n  where: here\n  remedy: do that"


def test_every_error_is_in_the_tree_of_the_docstring():
    assert {cls.__name__ for cls in ERRORS} == {
        word for word in errors.__doc__.replace("\n", " ").split() if word.endswith("Error")
    }
    assert all(issubclass(cls, errors.HeadwaterError) for cls in ERRORS)


def test_an_error_may_have_no_place_and_no_remedy():
    assert str(errors.PlanError("no")) == "no"


def test_seeds_depend_on_every_key_and_on_its_type():
    keys = [(1,), (2,), (1, 2), (1, "2"), (12,), (1, "a"), (1, "a", 0), (1, "a0")]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_do_not_change():
    assert derive_seed(0) == 4246866556266386882
    assert derive_seed(7, "micro_batch", 3, 1) == 1431090238444440271


def test_every_seed_is_one_that_torch_takes():
    for seed in (-1, 0, 2**70):
        torch.Generator().manual_seed(derive_seed(seed, "any", -1))


@pytest.mark.parametrize("cuda", [False, True])
def test_generators_are_seeded_as_by_torch(cuda, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    seed_generators(2**62 + 1)
    drawn = torch.rand(3)
    assert seeded == [2**62 + 1] * cuda
    torch.manual_seed(2**62 + 1)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("name", "wire", "mixed"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, True), ("fp16", torch.float16, True)],
)
def test_precision(name, wire, mixed):
    assert Precision(name).wire_dtype == wire
    assert Precision(name).mixed is mixed


def test_unknown_precision():
    with pytest.raises(errors.ConfigError, match="'fp8'") as caught:
        Precision("fp8")
    assert "bf16" in caught.value.remedy


@pytest.mark.parametrize("count", [0, 1, PAGE_BYTES, PAGE_BYTES + 1])
def test_buffers_are_whole_pages(count):
    buffer = aligned_empty(count)
    assert buffer.data_ptr() % PAGE_BYTES == 0
    assert buffer.numel() == max(round_up(count), PAGE_BYTES)
    buffer.fill_(7)
    assert buffer.dtype == torch.uint8


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_autocast_computes_matrix_products_in_the_wire_dtype(name):
    precision = Precision(name)
    matrix = torch.ones(2, 2)
    with autocast(precision, "cpu"):
        assert (matrix @ matrix).dtype == precision.wire_dtype
        assert torch.is_autocast_enabled("cpu") == precision.mixed
    assert not torch.is_autocast_enabled("cpu")


def test_the_default_loss_is_the_output_of_the_model():
    model, batch = torch.nn.Identity(), torch.tensor(3.0)
    assert call_model(model, batch) is batch
