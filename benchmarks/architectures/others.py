"""Other architectures: graphs, weights computed by networks, derivatives inside the model, averages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from benchmarks.architectures.catalogue import BATCHES, architecture, images, sequences, tokens, vectors

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])


def nodes() -> list[torch.Tensor]:
    """Return batches of features of five nodes [5, 8]."""
    return [torch.randn(5, 8) for _ in range(BATCHES)]


def _gathered(messages: torch.Tensor) -> torch.Tensor:
    """Return the sum of the messages that each node receives."""
    return torch.zeros(5, messages.shape[-1]).index_add(0, EDGES[1], messages)


@architecture("Graph convolution", "graph")
def graph_convolution():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x + _gathered(x[EDGES[0]])).relu()
            return x

    return Convolution(), nodes()


@architecture("Graph convolution by a sparse matrix", "graph")
def sparse_graph():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.register_buffer("graph", torch.sparse_coo_tensor(EDGES, torch.ones(7), (5, 5)).coalesce())

        def forward(self, x):
            for layer in self.layers:
                x = torch.sparse.mm(self.graph, layer(x)).relu()
            return x

    return Convolution(), nodes()


@architecture("Graph attention", "graph")
def graph_attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.score = nn.Linear(8, 8), nn.Linear(16, 1)

        def forward(self, x):
            value = self.value(x)
            pairs = torch.cat([value[EDGES[0]], value[EDGES[1]]], -1)
            weight = F.leaky_relu(self.score(pairs)).exp()
            return _gathered(weight * value[EDGES[0]]) / (_gathered(weight) + 1e-6)

    return nn.Sequential(Attention(), nn.ELU(), Attention()), nodes()


@architecture("Message passing with a gated update", "graph")
def message_passing():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(16, 8), nn.GRUCell(8, 8)

        def forward(self, x):
            for _ in range(3):
                pairs = torch.cat([x[EDGES[0]], x[EDGES[1]]], -1)
                x = self.update(_gathered(self.message(pairs).relu()), x)
            return x.mean(0)

    return Passing(), nodes()


@architecture("Equivariant graph network", "graph")
def equivariant():
    class Equivariant(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.move, self.node = nn.Linear(11, 8), nn.Linear(8, 1), nn.Linear(13, 5)

        def forward(self, x):
            places, features = x[:, :3], x[:, 3:]
            gap = places[EDGES[0]] - places[EDGES[1]]
            pair = torch.cat([features[EDGES[0]], features[EDGES[1]], gap.square().sum(-1, keepdim=True)], -1)
            message = self.edge(pair).tanh()
            places = places + _gathered(gap * self.move(message))
            return places, self.node(torch.cat([features, _gathered(message)], -1))

    return Equivariant(), nodes()


@architecture("Set network (invariant pooling)", "graph")
def deep_sets():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.outer(self.inner(x).relu().max(1).values)

    return Sets(), sequences()


@architecture("Point cloud with nearest neighbours", "graph")
def points():
    class Points(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.head = nn.Linear(16, 8), nn.Linear(8, 2)

        def forward(self, x):
            near = torch.cdist(x, x).topk(3, largest=False).indices
            batch = torch.arange(len(x))[:, None, None]
            pairs = torch.cat([x[:, :, None].expand(-1, -1, 3, -1), x[batch, near]], -1)
            return self.head(self.edge(pairs).relu().amax((1, 2)))

    return Points(), sequences()


@architecture("Hypernetwork (functional_call)", "weights by networks")
def hypernetwork():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.code = nn.Linear(8, 8), nn.Parameter(torch.randn(4))
            self.makes = nn.Linear(4, 72)

        def forward(self, x):
            weight, bias = self.makes(self.code).split([64, 8])
            weights = {"weight": self.base.weight + 0.1 * weight.view(8, 8), "bias": bias}
            return torch.func.functional_call(self.base, weights, (x,)).tanh()

    return Hyper(), vectors()


@architecture("Fast weights (one inner step, MAML)", "weights by networks")
def maml():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            weights: dict[str, torch.Tensor] = dict(self.layer.named_parameters())
            loss = torch.func.functional_call(self.layer, weights, (x[:2],)).tanh().square().mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=self.training)
            moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            return torch.func.functional_call(self.layer, moved, (x[2:],))

    return Inner(), vectors()


@architecture("Low-rank adapters on a frozen base", "weights by networks")
def adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    return nn.Sequential(Adapted(), nn.Tanh(), Adapted()), vectors()


@architecture("Weights shared across layers with scales (ALBERT, BitFit)", "weights by networks")
def shared():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(4))

        def forward(self, x):
            for scale in self.scales:
                x = (self.layer(x) * scale).tanh()
            return x

    return Shared(), vectors()


@architecture("Kronecker and butterfly factors", "weights by networks")
def kronecker():
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return F.linear(x, torch.kron(self.left, self.right) / 4).tanh()

    return nn.Sequential(Factors(), Factors(), nn.Linear(8, 2)), vectors()


@architecture("Weight norm", "parametrizations")
def weight_norm():
    return nn.Sequential(*(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))), vectors()


@architecture("Spectral norm (power iteration in buffers)", "parametrizations")
def spectral_norm():
    return nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3))), vectors()


@architecture("Orthogonal weights", "parametrizations")
def orthogonal():
    return nn.Sequential(*(parametrizations.orthogonal(nn.Linear(8, 8)) for _ in range(2))), vectors()


@architecture("Two parametrizations on one weight", "parametrizations")
def stacked():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()

    class Positive(nn.Module):
        def forward(self, w):
            return F.softplus(w)

    layers = [nn.Linear(8, 8) for _ in range(2)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Symmetric())
        parametrize.register_parametrization(layer, "weight", Positive())
    return nn.Sequential(layers[0], nn.Tanh(), layers[1]), vectors()


@architecture("Quantization-aware training", "parametrizations")
def quantized():
    class Rounded(nn.Linear):
        def forward(self, x):
            step = self.weight.abs().max().detach() / 7
            rounded = self.weight + ((self.weight / step).round() * step - self.weight).detach()
            return F.linear(x, rounded, self.bias)

    return nn.Sequential(Rounded(8, 16), nn.ReLU(), Rounded(16, 2)), vectors()


@architecture("SIREN with a Laplacian", "derivatives")
def siren():
    class Siren(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.out = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)]), nn.Linear(16, 1)

        def forward(self, x):
            x = x.requires_grad_()
            y = x
            for layer in self.layers:
                y = torch.sin(3 * layer(y))
            y = self.out(y)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            return (second.sum(-1) - 1).square().mean() + y.square().mean()

    return Siren(), vectors()


@architecture("Hamiltonian network (gradient as output)", "derivatives")
def hamiltonian():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            first, second = slope.chunk(2, -1)
            return torch.cat([second, -first], -1)

    return Energy(), vectors()


@architecture("Neural ODE (Runge-Kutta)", "derivatives")
def neural_ode():
    class Ode(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x):
            for _ in range(3):
                first = self.field(x)
                second = self.field(x + 0.05 * first)
                x = x + 0.1 * self.field(x + 0.05 * second) + 0.0 * first
            return x

    return Ode(), vectors()


@architecture("Deep equilibrium (implicit gradient)", "derivatives")
def equilibrium():
    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.enter = nn.Linear(8, 8), nn.Linear(8, 8)
            with torch.no_grad():
                self.inner.weight.mul_(0.3)

        def forward(self, x):
            enter = self.enter(x)
            with torch.no_grad():
                z = torch.zeros_like(x)
                while (moved := (self.inner(z) + enter).tanh()).sub(z).abs().max() > 1e-3:
                    z = moved
            return (self.inner(z) + enter).tanh()

    return Equilibrium(), vectors()


@architecture("Physics-informed network", "derivatives")
def physics():
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            x = x[:, :2].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
            return (slope[:, 1] - 0.1 * bend[:, 0]).square().mean()

    return Field(), vectors()


@architecture("Student and moving average (BYOL)", "averages")
def byol():
    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.predictor = nn.Linear(8, 8), nn.Linear(8, 8)
            self.teacher = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                for kept, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
                wanted = self.teacher(x.flip(-1))
            found = self.predictor(self.student(x))
            return 1 - F.cosine_similarity(found, wanted, dim=-1).mean()

    return Byol(), vectors()


@architecture("Queue of keys in a buffer (MoCo)", "averages")
def moco():
    class Moco(nn.Module):
        queue: torch.Tensor
        place: torch.Tensor

        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            query, key = F.normalize(self.query(x), dim=-1), F.normalize(self.key(x), dim=-1)
            logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone()], 1)
            place = int(self.place)
            self.queue[:, place : place + len(x)] = key.detach().t()
            self.place.fill_((place + len(x)) % 16)
            return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    return Moco(), vectors()


@architecture("Two towers with a learned temperature (CLIP)", "averages")
def clip():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            left = F.normalize(self.left(x), dim=-1)
            right = F.normalize(self.right(x.flip(-1)), dim=-1)
            return F.cross_entropy(left @ right.t() * self.temperature.exp(), torch.arange(len(x)))

    return Towers(), vectors()


@architecture("Tabular factors with a sparse embedding", "recommendation")
def factorization():
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.bias = nn.Embedding(20, 8, max_norm=2.0), nn.EmbeddingBag(20, 1, mode="sum")

        def forward(self, ids):
            x = self.embed(ids)
            pairs = x.sum(1).square() - x.square().sum(1)
            return self.bias(ids)[:, 0] + pairs.sum(-1) / 2

    return Factors(), tokens()


@architecture("Mixture density", "density")
def mixture_density():
    class Density(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 9)

        def forward(self, x):
            weight, mean, scale = self.out(self.inner(x).tanh()).chunk(3, -1)
            parts = torch.distributions.Normal(mean, F.softplus(scale) + 0.1).log_prob(x[:, :1])
            return -(weight.log_softmax(-1) + parts).logsumexp(-1).mean()

    return Density(), vectors()


@architecture("Actor and critic with sampled actions", "reinforcement")
def actor_critic():
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, x):
            hidden = self.body(x).tanh()
            actions = torch.distributions.Categorical(logits=self.policy(hidden))
            chosen = actions.sample()
            gain = chosen.float() - self.value(hidden)[:, 0]
            return -(actions.log_prob(chosen) * gain.detach()).mean() + gain.square().mean()

    return Actor(), vectors()


@architecture("Complex numbers of real parameters", "other numbers")
def complex_layers():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8, 2) / 3)

        def forward(self, x):
            return torch.view_as_real(x.to(torch.complex64) @ torch.view_as_complex(self.weight)).norm(dim=-1)

    return nn.Sequential(Complex(), Complex()), vectors()


@architecture("Fourier neural operator (complex parameters)", "other numbers")
def fourier_operator():
    class Operator(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.cfloat) / 3)

        def forward(self, x):
            spectrum = torch.fft.rfft2(x)
            mixed = torch.einsum("bihw,iow->bohw", spectrum[..., :5], self.weight)
            return x + torch.fft.irfft2(mixed, x.shape[-2:])

    def optimizer(parameters):  # the fused AdamW of other rows does not take complex parameters
        return torch.optim.AdamW(parameters, lr=1e-3)

    return nn.Sequential(Operator(), nn.GELU(), Operator()), images(), None, optimizer


@architecture("Parts in float64 and bfloat16", "other numbers")
def mixed_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).double()).float()

    return Mixed(), vectors()
