"""Lazy tensors against the plain tensors that they stand for."""

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor, pieces_of


class Source:
    """A tensor that is read in pieces of seven elements, with a count of the reads."""

    def __init__(self, values):
        self.values = values
        self.reads = 0

    def pieces(self):
        self.reads += 1
        yield from self.values.reshape(-1).split(7)

    @property
    def lazy(self):
        return LazyTensor(self.pieces, self.values.shape, self.values.dtype)


@pytest.fixture
def source():
    torch.manual_seed(0)
    return Source(torch.randn(4, 5))


def test_operations_without_values_read_nothing(source):
    lazy = source.lazy
    assert (lazy.shape, lazy.dtype, lazy.numel(), lazy.nbytes) == ((4, 5), torch.float32, 20, 80)
    assert (lazy.device.type, lazy.stride(), lazy.is_contiguous()) == ("cpu", (5, 1), True)
    assert isinstance(lazy.detach(), LazyTensor)
    assert isinstance(lazy.data, LazyTensor)
    assert lazy.requires_grad_().requires_grad
    assert "shape=[4, 5]" in repr(lazy)
    assert source.reads == 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t + 1, lambda t: t[1:3, 0], lambda t: t.T @ t, lambda t: t.to(torch.float64),
        lambda t: t.to("cpu"), lambda t: t.clone(), lambda t: torch.cat([t, t]), lambda t: t.bfloat16(),
        lambda t: t.sum(), lambda t: next(iter(t)), lambda t: torch.tensor(t.tolist()),
        lambda t: torch.from_numpy(t.numpy().copy()), copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)),
    ],
)  # fmt: skip
def test_operations_return_plain_tensors(source, operation):
    result, expected = operation(source.lazy), operation(source.values)
    assert type(result) is torch.Tensor
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert source.reads > 0


def test_compares_with_plain_tensors(source):
    assert torch.equal(source.lazy, source.values)
    assert bool((source.values == source.lazy).all())
    assert not torch.equal(source.lazy, source.values + 1)
    assert source.lazy[2, 3].item() == source.values[2, 3].item()


def test_is_a_weight_in_autograd(source):
    weight = source.lazy.requires_grad_()
    plain = source.values.clone().requires_grad_()
    x = torch.randn(3, 5, requires_grad=True)
    results = []
    for w in (weight, plain):
        x.grad = None
        nn.functional.linear(x, w).square().sum().backward()
        results.append((x.grad, w.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_loads_into_modules_and_optimizers(source):
    module = nn.Linear(5, 4, bias=False)
    module.load_state_dict({"weight": source.lazy})
    assert torch.equal(module.weight, source.values)
    assert type(module.weight) is nn.Parameter
    optimizer = torch.optim.AdamW(module.parameters())
    groups = optimizer.state_dict()["param_groups"]
    state = {"step": torch.tensor(1.0), "exp_avg": source.lazy, "exp_avg_sq": source.lazy}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
    module(torch.ones(2, 5)).sum().backward()
    optimizer.step()  # changes its state in place


def test_assigned_as_a_parameter_it_is_copied_as_one(source):
    module = nn.Linear(5, 4, bias=False)
    module.load_state_dict({"weight": source.lazy}, assign=True)
    x = torch.randn(2, 5)
    assert torch.equal(module(x), nn.functional.linear(x, source.values))
    other = copy.deepcopy(module)
    assert type(other.weight) is nn.Parameter
    assert torch.equal(other.weight, source.values)


def test_torch_save(source):
    file = io.BytesIO()
    lazy = source.lazy
    torch.save({"a": lazy, "nested": [lazy.detach()]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["a"], source.values)
    assert torch.equal(loaded["nested"][0], source.values)


def test_safetensors_save_file(source, tmp_path):
    other = Source(torch.arange(30).view(5, 6))
    safetensors.torch.save_file({"a": source.lazy, "b": other.lazy}, tmp_path / "x")
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert torch.equal(loaded["a"], source.values)
    assert torch.equal(loaded["b"], other.values)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1), lambda t: t.detach().zero_(), lambda t: t.data.fill_(1), lambda t: t.copy_(t),
        lambda t: t.__setitem__(0, 1), lambda t: torch.add(t, t, out=t), nn.init.zeros_,
        lambda t: torch._foreach_mul_([t], 2),
    ],
)  # fmt: skip
def test_changes_in_place_are_refused(source, change):
    before = source.values.clone()
    with pytest.raises(StreamError, match="cannot be changed in place"):
        change(source.lazy)
    assert torch.equal(source.values, before)


def test_a_source_with_too_few_elements_is_detected(source):
    lazy = LazyTensor(source.pieces, (5, 5), torch.float32)
    with pytest.raises(AssertionError, match="25 elements have 20"):
        lazy.clone()


@pytest.mark.parametrize("max_bytes", [4, 12, 28, 36, 1000])
def test_pieces_of_any_tensor(source, max_bytes):
    count = max_bytes // 4
    for tensor in (source.lazy, source.values, source.values.T.contiguous().T):
        pieces = [piece.clone() for piece in pieces_of(tensor, max_bytes)]
        assert torch.equal(torch.cat(pieces), source.values.reshape(-1))
        assert [p.numel() for p in pieces[:-1]] == [count] * (len(pieces) - 1)
    assert list(pieces_of(torch.empty(0, 3))) == []
