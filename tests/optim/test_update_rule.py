"""Fifty steps of every optimizer through the store's update rule, against the plain one, bit for bit."""

import pytest
import torch

import headwater.optim
from headwater.core.stage import ParamSpec
from headwater.optim import OptimizerSpec, group_options
from headwater.store.rule import UpdateRule

STEPS = 50
SHAPES = ((64, 6), (128, 2), (64, 4))
PIECE = 64
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")

OPTIMIZERS = [
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.01, "t0": 20, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.01}),
    ("Muon", {"lr": 0.01}),
    ("Lamb", {"lr": 0.01, "weight_decay": 0.1}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(name, params):
    """Return groups in which the first parameter has other options than the rest."""
    own = {} if name == "Rprop" else {"weight_decay": 0.03}
    return [{"params": params[:1], "lr": 0.003, "tags": ("first",), **own}, {"params": params[1:]}]


class Piecewise:
    """An updater that works as the weight store does: in slices with separate state, or whole."""

    def __init__(self, rule, param):
        self.rule = rule
        self.values = param.detach().clone()
        spec = ParamSpec("p", tuple(param.shape), torch.float32, torch.float32)
        size = PIECE if rule.elementwise else param.numel()
        self.pieces = self.values.view(-1).split(size)
        self.shape = (size,) if rule.elementwise else param.shape
        self.states = [
            {
                name: torch.full(state.shape or self.shape, float("nan"), dtype=state.dtype)
                for name, state in rule.state_layout(spec).items()
            }
            for _ in self.pieces
        ]
        self.scalars = [None] * len(self.pieces)

    def update(self, gradient, options):
        parts = gradient.reshape(-1).split(self.pieces[0].numel())
        for index, (piece, part) in enumerate(zip(self.pieces, parts, strict=True)):
            (self.scalars[index],) = self.rule.apply(
                [piece.view(self.shape)],
                [part.clone().view(self.shape)],
                [self.states[index]],
                [self.scalars[index]],
                options,
            )


@pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS)
def test_updates_of_slices_equal_updates_of_whole_parameters(name, kwargs):
    params = parameters()
    fused = {"fused": True} if name in FUSED else {}
    plain = getattr(headwater.optim, name)(groups(name, params), **kwargs, **fused)
    rule = UpdateRule(OptimizerSpec.of(plain))
    streamed = [Piecewise(rule, param) for param in params]
    group_of = {id(p): group for group in plain.param_groups for p in group["params"]}
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for group in plain.param_groups:
            group["lr"] *= 0.97
        for param, pieces in zip(params, streamed, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            pieces.update(param.grad, group_options(plain, group_of[id(param)]))
        plain.step()
        for param, pieces in zip(params, streamed, strict=True):
            assert torch.equal(param.detach(), pieces.values), f"step {step}"


def test_every_optimizer_is_tried():
    tried = {entry.values[0] if hasattr(entry, "values") else entry[0] for entry in OPTIMIZERS}
    exported = {
        name
        for name in headwater.optim.__all__
        if isinstance(getattr(headwater.optim, name), type)
        and issubclass(getattr(headwater.optim, name), torch.optim.Optimizer)
    }
    assert exported == tried | {"Optimizer"}
    assert len(exported) == 16
