"""Fake results that are made from those of equal calls are like the results that torch computes."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.core.precision import Precision
from headwater.plan import known_results, stand_ins
from headwater.plan.known_results import call_known
from headwater.plan.trace import trace_step

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(known_results, "_RESULTS", {})


def layout(tensor):
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(),
        tensor.untyped_storage().nbytes(), tensor.requires_grad, tensor.is_inference(), tensor.is_conj(),
    )  # fmt: skip


def fake(mode, *shape, dtype=torch.float32):
    return mode.from_tensor(torch.ones(*shape, dtype=dtype))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x):
        x, _ = self.rnn(self.embedding(x))
        x, weights = self.attention(x, x, x)
        first, second = x.chunk(2, -1)
        weights[:, 0].mul_(2.0)
        picked = x[x.detach().sum(-1) > 0]
        return (first * second).sum() + weights.sum() + picked.sum()


def gpt():
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=16, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


TOKENS = torch.arange(22).reshape(2, 11) % 11
MODELS = {
    "gpt": (gpt, TOKENS, lambda model, batch: model(input_ids=batch, labels=batch).loss),
    "convolutions": (Convolutions, torch.zeros(2, 4, 8, 8), lambda model, batch: model(batch).sum()),
    "recurrent": (Recurrent, TOKENS, lambda model, batch: model(batch)),
}


def operators_and_trace(name, precision, device="cpu"):
    """Return the operators of a dry run with the layouts of their tensors, and its trace."""
    make, batch, loss = MODELS[name]
    torch.manual_seed(0)
    operators, model = [], make()

    def observe(call):
        leaves = tree_leaves((call.args, call.out))
        layouts = [layout(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        operators.append((call.func, layouts, call.flops, call.stage, call.backward))

    options = {"loss_function": loss, "device": device}
    trace_step(model, batch, precision, observer=observe, **options)
    return operators, trace_step(model, batch, precision, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), ("bf16", "cpu"), ("bf16", "cuda")])
def test_dry_runs_are_those_without_known_results(name, precision, device, monkeypatch):
    def dry_run():
        return operators_and_trace(name, Precision(precision), device)

    with monkeypatch.context() as patch:
        patch.setattr(stand_ins, "call_known", lambda func, args, kwargs: func(*args, **kwargs))
        dry_run()  # torch's own cache, while it is filled, keeps some gradients alive, which are copied then
        operators, trace = dry_run()
    first, again = dry_run(), dry_run()
    assert len(known_results._RESULTS) > 20
    assert operators == first[0] == again[0]
    assert trace == first[1] == again[1]
    # `PhaseCost` leaves the number of operators out when it compares.
    numbers = [[dataclasses.asdict(cost) for cost in each.costs] for each in (trace, first[1], again[1])]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize(
    ("func", "shapes", "others"),
    [
        (aten.t.default, [(3, 4)], ()),
        (aten.slice.Tensor, [(3, 4)], (1, 1, 3)),
        (aten._unsafe_view.default, [(3, 4)], ([4, 3],)),
        (aten.split.Tensor, [(6, 4)], (2,)),
        (aten.add_.Tensor, [(3, 4), (3, 4)], ()),
        (aten.native_layer_norm.default, [(3, 4)], ([4], None, None, 1e-5)),
        (aten.view.dtype, [(3, 4)], (torch.int32,)),
        (aten.sum.dim_IntList, [(3, 4)], ([0], True)),
    ],
)
def test_results_share_memory_as_those_of_torch_do(func, shapes, others):
    with FakeTensorMode() as mode:
        calls = [[fake(mode, *shape) for shape in shapes] for _ in range(3)]
        plain = func(*calls[0], *others)
        for given in calls:
            out = call_known(func, (*given, *others), {})
            assert type(out) is type(plain)
            ours, theirs = ((out,), (plain,)) if isinstance(out, torch.Tensor) else (out, plain)
            for one, other in zip(ours, theirs, strict=True):
                assert layout(one) == layout(other)
                assert [one is tensor for tensor in given] == [other is tensor for tensor in calls[0]]
                for tensor, first in zip(given, calls[0], strict=True):
                    assert shares_memory(one, tensor) == shares_memory(other, first)
    assert len(known_results._RESULTS) == 1


def shares_memory(one, other):
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_arguments_of_other_classes_and_other_settings_have_other_results():
    add, ones, multiply = aten.add.Scalar, aten.ones.default, aten.mul.Tensor
    with FakeTensorMode() as mode:
        counts, x = fake(mode, 3, dtype=torch.int64), fake(mode, 3, dtype=torch.complex64)
        dtypes = [call_known(add, (counts, number), {}).dtype for number in (1, 1.0, True, 1)]
        assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]
        assert call_known(add, (counts[:2], 1), {}).shape == (2,)
        torch.set_default_dtype(torch.float64)
        try:
            assert call_known(add, (counts, 1.0), {}).dtype == torch.float64
            assert call_known(ones, ([2],), {}).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert call_known(ones, ([2],), {}).dtype == torch.float32
        assert call_known(ones, ([2],), {"dtype": torch.int8}).dtype == torch.int8
        conjugated = [call_known(aten._conj.default, (x,), {}) for _ in range(2)]
        assert [tensor.is_conj() for tensor in conjugated] == [True, True]
        plain = [call_known(multiply, (tensor, tensor), {}) for tensor in (x, *conjugated)]
        assert not any(tensor.is_conj() for tensor in plain)
        for _ in range(2):
            with torch.inference_mode():
                assert call_known(ones, ([4],), {}).is_inference()
            assert not call_known(ones, ([4],), {}).is_inference()


def test_numbers_that_torch_knows_stay_known():
    with FakeTensorMode():
        for number in (2.0, 3.0, 2.0):
            constant = torch.tensor(number)
            doubled = call_known(aten.mul.Tensor, (constant, constant), {})
            assert doubled.item() == number**2


def test_operators_of_a_user_run_each_time():
    calls = []
    with torch.library._scoped_library("known_results_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")

        @torch.library.register_fake("known_results_test::twice", lib=library)
        def twice(x):
            calls.append(x)
            return x.new_empty(len(calls))

        with FakeTensorMode() as mode:
            x, operator = fake(mode, 5), torch.ops.known_results_test.twice.default
            assert [call_known(operator, (x,), {}).shape for _ in range(2)] == [(1,), (2,)]
    assert len(calls) == 2


def test_old_results_are_forgotten(monkeypatch):
    monkeypatch.setattr(known_results, "_MOST", 3)
    with FakeTensorMode() as mode:
        for length in (*range(1, 8), 1):
            assert call_known(aten.neg.default, (fake(mode, length),), {}).shape == (length,)
            assert len(known_results._RESULTS) <= 3
