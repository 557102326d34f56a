"""Sparse gradients, complex parameters, and optimizers with torch's default settings."""

import pytest
import torch
from any_loop import Net, batches, check, loss_of, odd_plans, randn, train
from torch import nn

import headwater as cstorch
from headwater.core.errors import StreamError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")


def tokens(number):
    return torch.randint(20, (3, 4), generator=torch.Generator().manual_seed(number))


class Sparse(nn.Module):
    """A model of an embedding with sparse gradients and layers with dense ones."""

    def __init__(self, kind=nn.Embedding, rows=20):
        super().__init__()
        self.embedding = kind(rows, 6, sparse=True)
        self.layers = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))

    def forward(self, numbers):
        return self.layers(self.embedding(numbers))


def sparse_adam(model):
    return [
        torch.optim.SparseAdam(model.embedding.parameters(), lr=0.1),
        torch.optim.SGD(model.layers.parameters(), lr=0.1),
    ]


def one(kind):
    return lambda model: [kind(model.parameters(), lr=0.1)]


OPTIMIZERS = {
    "SGD": one(torch.optim.SGD),
    "Adagrad": one(torch.optim.Adagrad),
    "SparseAdam": sparse_adam,
}


def train_sparse(model, optimizers, *, set_to_none=True, micro_batches=1):
    seen = []
    for number in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none)
        for index in range(micro_batches):
            loss = model(tokens(10 * number + index)).square().mean()
            loss.backward()
        gradient = model.embedding.weight.grad
        assert gradient.is_sparse
        seen.append((loss, gradient.coalesce().indices(), gradient.to_dense()))
        for optimizer in optimizers:
            optimizer.step()
    return seen, model, optimizers


@odd_plans
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_embeddings(plan, name, kind, tmp_path):
    def script(place):
        model = place.compile(Sparse(kind))
        return train_sparse(model, OPTIMIZERS[name](model))

    check(script, plan, tmp_path)


@odd_plans
def test_sparse_gradients_are_summed_and_set_to_zero(plan, tmp_path):
    def script(place):
        model = place.compile(Sparse())
        return train_sparse(model, OPTIMIZERS["Adagrad"](model), set_to_none=False, micro_batches=2)

    check(script, plan, tmp_path)


@odd_plans
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sparse_embedding_larger_than_a_piece_equals_plain(plan, name, tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.store.layout.PIECE_ELEMENTS", 50)

    def script(place):
        model = place.compile(Sparse())
        return train_sparse(model, OPTIMIZERS[name](model))

    check(script, plan, tmp_path)


class Tied(nn.Module):
    """A model whose head shares the weight of a sparse embedding: sparse and dense gradients are summed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers):
        return self.head(self.layer(self.embedding(numbers)).tanh())


@odd_plans
def test_a_sparse_embedding_tied_to_a_dense_head(plan, tmp_path):
    def script(place):
        model = place.compile(Tied())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return train(model, lambda number: model(tokens(number)).square().mean(), optimizer=optimizer)

    check(script, plan, tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.SparseAdam, {})],
)
def test_optimizers_that_cannot_use_a_gradient_are_refused_at_their_step(kind, options):
    model = cstorch.compile(Sparse(), "CSX")
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(tokens(0)).sum().backward()
    before = model.embedding.weight.detach().clone()
    with pytest.raises(StreamError, match=rf"{kind.__name__} cannot use a (sparse|dense) gradient"):
        optimizer.step()
    assert torch.equal(model.embedding.weight, before)
    cstorch.release(model)


def energy(model, number):
    return model(randn(3, 4, seed=number)).square().mean()


class Complex(nn.Module):
    """A model with complex weights between a Fourier transform and a real layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        self.layers = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(2)))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layers(torch.fft.fft(x) @ self.scale).abs())


@odd_plans
@pytest.mark.parametrize(
    "kind",
    ["SGD", "AdamW", "Adam", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "RMSprop", "Rprop"],
)
def test_complex_parameters_with_every_optimizer_that_takes_them(plan, kind, tmp_path):
    def script(place):
        model = place.compile(Complex())
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        return train(
            model, lambda number: model(randn(3, 4, seed=number)).square().mean(), optimizer=optimizer
        )

    check(script, plan, tmp_path)


@odd_plans
def test_complex_gradients_are_clipped(plan, tmp_path):
    def script(place):
        model = place.compile(Complex())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []

        def call(number):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            return energy(model, number)

        return train(model, call, optimizer=optimizer), norms

    check(script, plan, tmp_path)


@odd_plans
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_default_optimizer_settings_equal_plain(plan, kind, tmp_path):
    def script(place):
        model = place.compile(Net())
        options = {"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.1}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        samples = batches(6)

        def call(number):
            numbers, classes = samples[number]
            return loss_of(model(numbers), classes)

        return train(model, call, optimizer=optimizer, steps=6)

    check(script, plan, tmp_path)
