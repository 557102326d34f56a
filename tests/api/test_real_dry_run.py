"""A forward that needs real values in the dry run, and changes its own weights."""

import pytest
import torch
from any_loop import check, odd_plans, randn
from torch import nn


def loss_of_step(model, optimizer, batch):
    """Take a training step; return its loss."""
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Net(nn.Module):
    """A model that computes with numpy, which fake tensors cannot, and shrinks a weight in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x) * float(self.first.weight.detach().numpy().mean())
        with torch.no_grad():
            self.middle.weight.mul_(0.9)
        return self.head(torch.tanh(self.middle(x)))


@pytest.mark.parametrize("plan", ["memory", "slabs", "recompute"])
def test_weights_that_a_forward_changes_are_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            if step == 1:  # the model is planned again, with weights that are in the store
                model.head = nn.Linear(6, 2)
                optimizer.add_param_group({"params": list(model.head.parameters())})
            losses.append(loss_of_step(model, optimizer, torch.randn(4, 6)))
        return losses, model

    check(script, plan, tmp_path)


class Packed(nn.Module):
    """A model with an embedding that renormalizes its weight, and with packed sequences."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, max_norm=1.0)
        self.gru = nn.GRU(6, 6, batch_first=True)

    def forward(self, tokens):
        lengths = torch.tensor([3, 2, 1])[: len(tokens)]
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("plan", ["memory", "disk"])
def test_renormalized_embedding_with_packed_sequences_and_another_batch_size(plan, tmp_path):
    def script(place):
        model = place.compile(Packed())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            losses.append(loss_of_step(model, optimizer, torch.randint(11, (2 + step, 3))))
        return losses, model

    check(script, plan, tmp_path)


class Graph(nn.Module):
    """A model with a sparse buffer, which computes with numpy too."""

    def __init__(self, adjacency):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        scale = float(self.first.weight.detach().numpy().mean())
        return self.head(torch.sparse.mm(self.adjacency, torch.tanh(self.first(x) * scale)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_model_with_a_sparse_buffer(layout, tmp_path):
    def script(place):
        model = place.compile(Graph(torch.eye(4).to_sparse(layout=layout)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [loss_of_step(model, optimizer, torch.randn(4, 6)) for _ in range(2)]

    check(script, "memory", tmp_path)


def fixed_point(layer, x):
    value = torch.zeros_like(x)
    while True:
        new = torch.tanh(0.3 * layer(value) + x)
        if (new - value).norm() < 1e-2:
            return new
        value = new


def until_all_halt(layer, x):
    halted = torch.zeros(len(x), dtype=torch.bool)
    while not halted.all():
        x = x + layer(x)
        halted = halted | (x.norm(dim=1) > 5)
    return x


def until_small(layer, x):
    while (x.abs() > 0.5).byte().any():
        x = 0.5 * torch.tanh(layer(x))
    return x


class Loops(nn.Module):
    """A model with a loop that ends when its activations have certain values."""

    def __init__(self, loop):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.loop = loop

    def forward(self, x):
        return self.head(self.loop(self.layer, self.first(x)))


@odd_plans
@pytest.mark.parametrize("loop", [fixed_point, until_all_halt, until_small])
def test_a_loop_that_ends_by_the_values_of_activations(loop, plan, tmp_path):
    def script(place):
        model = place.compile(Loops(loop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [loss_of_step(model, optimizer, randn(4, 6, seed=step)) for step in range(3)], model

    check(script, plan, tmp_path)
