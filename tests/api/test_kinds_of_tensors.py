"""Models with inputs, outputs and weights that are not ordinary tensors, or have no elements."""

import collections

import pytest
import torch
from any_loop import check, odd_plans, randn, train
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headwater.core.errors import StreamError
from headwater.stream import recompute

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def linears(count=3, width=6):
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def stack(width=6):
    return nn.Sequential(*linears(3, width))


class PackedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, packed):
        output, _ = self.recurrent(packed)
        return self.head(pad_packed_sequence(output, batch_first=True)[0])


@odd_plans
def test_packed_sequences_may_be_inputs(plan, tmp_path):
    def script(place):
        model = place.compile(PackedInput())

        def call(number):
            lengths = torch.tensor([5, 4, 2])
            packed = pack_padded_sequence(randn(3, 5, 4, seed=number), lengths, batch_first=True)
            return model(packed).square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


class PackedInside(nn.Module):
    """A model that packs its input, runs two recurrent layers and returns a packed sequence."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.first = nn.GRU(4, 6, batch_first=True)
        self.second = nn.GRU(6, 6)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=False)
        return self.second(self.first(packed)[0])[0]


@odd_plans
def test_packed_sequences_may_be_made_inside_and_returned(plan, tmp_path):
    def script(place):
        model = place.compile(PackedInside())
        lengths = torch.tensor([2, 5, 4])
        return train(model, lambda number: model(randn(3, 5, 4, seed=number), lengths).data.square().mean())

    check(script, plan, tmp_path)


class Pair(tuple):
    """A tuple whose constructor does not take its items."""

    def __new__(cls, first, second):
        pair = super().__new__(cls, (first, second))
        pair.name = "pair"
        return pair


class Strict(collections.namedtuple("Strict", ["values", "count"])):
    """A named tuple that accepts only tensors."""

    def __new__(cls, values, count):
        assert isinstance(values, torch.Tensor)
        return super().__new__(cls, values, count)


class Batch(list):
    """A list with an attribute."""

    def __init__(self, items, scale):
        super().__init__(items)
        self.scale = scale


class Containers(nn.Module):
    """A model that passes objects from layer to layer whose classes torch's pytrees do not know."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, pair, strict, batch):
            x = self.linear(pair[0] + strict.values) * batch.scale + batch[0]
            assert pair.name == "pair"
            return Pair(x, pair[1]), Strict(x.tanh(), strict.count + 1), Batch([x], batch.scale)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, *given):
        for layer in self.layers:
            given = layer(*given)
        assert given[1].count == 3
        return given[0]


@odd_plans
def test_subclasses_of_tuples_and_lists_pass_between_layers(plan, tmp_path):
    def script(place):
        model = place.compile(Containers())

        def call(number):
            x = randn(2, 6, seed=number)
            return model(Pair(x, None), Strict(x, 0), Batch([x], 0.5))[0].square().mean()

        return train(model, call)

    check(script, plan, tmp_path)


class Graph(nn.Module):
    """A model that multiplies by a sparse adjacency matrix, which its forward makes."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, neighbours):
            return torch.sparse.mm(neighbours, self.linear(x)).relu() + x

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x, edges):
        ones = torch.ones(edges.shape[1])
        size = (x.shape[0], x.shape[0])
        neighbours = torch.sparse_coo_tensor(edges, ones, size, check_invariants=False)
        for layer in self.layers:
            x = layer(x, neighbours)
        return x


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@odd_plans
def test_sparse_tensors_may_be_made_in_a_forward(plan, tmp_path):
    def script(place):
        model = place.compile(Graph())
        edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
        return train(model, lambda number: model(randn(5, 4, seed=number), edges).square().mean())

    check(script, plan, tmp_path)


def test_a_large_sparse_tensor_is_counted_by_its_indices_and_values(tmp_path):
    """As a dense matrix this graph would take 40 GB, and no plan would fit."""

    def script(place):
        model = place.compile(Graph())
        nodes = 100_000
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        x = randn(nodes, 4, seed=0)
        return train(model, lambda number: model(x, edges).square().mean(), steps=1)

    check(script, "memory", tmp_path)


@odd_plans
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_may_be_inputs(plan, layout, tmp_path):
    def script(place):
        model = place.compile(stack())

        def call(number):
            parts = [randn(3, 6, seed=number), randn(5, 6, seed=number + 1)]
            output = model(torch.nested.nested_tensor(parts, layout=layout))
            return torch.cat([part.flatten() for part in output.unbind()]).square().mean()

        return train(model, call)

    if layout is torch.strided and plan == "recompute on disk" and not recompute._SAVES_NESTED:
        with pytest.raises(StreamError, match=r"(?s)its input is a nested tensor.*use layout=torch\.jagged"):
            check(script, plan, tmp_path)
    else:
        check(script, plan, tmp_path)


class JaggedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = linears()

    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        for layer in self.layers:
            nested = layer(nested)
        return torch.nested.to_padded_tensor(nested, 0.0)


@odd_plans
def test_jagged_tensors_may_be_made_in_a_forward(plan, tmp_path):
    def script(place):
        model = place.compile(JaggedInside())
        return train(model, lambda number: model(randn(5, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


class NestedAttention(nn.Module):
    """Attention over parts of different lengths. Autograd saves nested tensors of strided layout in it."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=self.layout)
        query, value = (layer(nested).view(2, -1, 2, 3).transpose(1, 2) for layer in (self.query, self.value))
        if self.layout is torch.strided:  # its attention needs it
            query, value = query.contiguous(), value.contiguous()
        mixed = nn.functional.scaled_dot_product_attention(query, query, value)
        return torch.cat(mixed.transpose(1, 2).unbind()).flatten(1)


@odd_plans
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_attention_of_nested_tensors_equals_plain(plan, layout, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*(NestedAttention(layout) for _ in range(3))))
        return train(model, lambda number: model(randn(5, 6, seed=number)).square().mean())

    check(script, plan, tmp_path)


class WithoutElements(nn.Module):
    """A model with layers whose weights, or weights and biases, have no elements."""

    def __init__(self, bias):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.narrow = nn.Linear(8, 0, bias=bias)
        self.widen = nn.Linear(0, 8, bias=bias)
        self.leave = nn.Linear(8, 8)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x) + self.widen(self.narrow(x))


@odd_plans
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_empty_weights_equal_plain(plan, bias, tmp_path):
    def script(place):
        model = place.compile(WithoutElements(bias))
        return train(model, lambda number: model(randn(3, 8, seed=number)).square().mean())

    check(script, plan, tmp_path)


@odd_plans
def test_the_first_batch_may_be_empty(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        return train(model, lambda number: model(randn(4 * number, 6, seed=number)).square().sum())

    check(script, plan, tmp_path)


@odd_plans
def test_empty_batches_may_be_evaluated(plan, tmp_path):
    def script(place):
        model = place.compile(stack()).eval()
        with torch.no_grad():
            return model(randn(0, 6, seed=0)), model(randn(0, 3, 6, seed=0)), model(randn(2, 6, seed=0))

    check(script, plan, tmp_path)


@odd_plans
@pytest.mark.parametrize("first", ["training", "evaluation"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules_compiled_before_their_first_forward(plan, first, tmp_path):
    def script(place):
        layers = [nn.LazyLinear(6), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)]
        model = place.compile(nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if first == "evaluation":
            with torch.no_grad():
                model.eval()(randn(4, 5, seed=9))
            model.train()

        def call(number):
            return model(randn(4, 5, seed=number)).square().mean()

        trained = train(model, call, optimizer=optimizer)
        return trained, torch.rand(2)

    check(script, plan, tmp_path)
