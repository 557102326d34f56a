"""A linear layer that computes its input again in backward is bit-identical to the plain one."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from headwater.models.layers.feed_forward import GATED, NONLINEARITIES, FeedForward
from headwater.models.layers.linear import LinearAfter

WIDTH, INNER = 24, 40


class Plain(nn.Module):
    """The same feed-forward layer, written with torch's own layers."""

    def __init__(self, layer):
        super().__init__()
        self.function = layer.function
        shapes = {"input": (WIDTH, INNER), "gate": (WIDTH, INNER), "output": (INNER, WIDTH)}
        names = [name for name in shapes if getattr(layer, name) is not None]
        self.layers = nn.ModuleDict({name: nn.Linear(*shapes[name]) for name in names})
        self.layers.load_state_dict(copy.deepcopy(layer.state_dict()))

    def forward(self, x):
        inputs = [self.layers[name](x) for name in ("gate", "input") if name in self.layers]
        return self.layers["output"](self.function(*inputs))


def make(nonlinearity="gelu", **options):
    torch.manual_seed(0)
    layer = FeedForward(WIDTH, INNER, nonlinearity, bias=True, dropout=0.0, **options)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.3)
    return layer


def train(layer, x, autocast=None):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
        output = layer(x)
    output.float().square().sum().backward()
    return (
        output,
        x.grad,
        {name.removeprefix("layers."): param.grad for name, param in layer.named_parameters()},
    )


@pytest.mark.parametrize("nonlinearity", NONLINEARITIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_output_and_gradients_equal_torch(nonlinearity, autocast):
    layer, x = make(nonlinearity), torch.randn(3, 5, WIDTH)
    assert (layer.gate is not None) == (nonlinearity in GATED)
    ours, oracle = (train(each, x, autocast) for each in (layer, Plain(layer)))
    assert torch.equal(ours[0], oracle[0])
    assert torch.equal(ours[1], oracle[1])
    assert ours[2].keys() == oracle[2].keys()
    assert all(torch.equal(ours[2][name], oracle[2][name]) for name in oracle[2])


def saved_elements(layer, x):
    sizes = {}

    def count(tensor):
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        layer(x)
    weights = {param.data_ptr() for param in layer.parameters()}
    return sum(size for address, size in sizes.items() if address not in weights)


@pytest.mark.parametrize(("nonlinearity", "inner"), [("gelu", 1), ("swiglu", 2)])
def test_the_function_is_not_saved(nonlinearity, inner):
    x = torch.randn(50, WIDTH, requires_grad=True)
    assert saved_elements(make(nonlinearity), x) == 50 * (WIDTH + inner * INNER)


def test_frozen_parts_get_no_gradient():
    layer, x = make(), torch.randn(4, WIDTH)
    layer.output.weight.requires_grad_(False)
    layer.input.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.output.weight.grad is None
    assert layer.input.weight.grad is None
    assert torch.equal(layer.output.bias.grad, torch.full((WIDTH,), 4.0))


def test_dropout_between_the_layers_is_drawn():
    layer, x = make(inner_dropout=0.5), torch.ones(4, WIDTH)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_it_can_be_transformed():
    layer, x = make(), torch.randn(4, WIDTH)
    weights = dict(layer.named_parameters())

    def loss(them):
        return torch.func.functional_call(layer, them, (x,)).square().sum()

    found = torch.func.grad(loss)(weights)
    loss(weights).backward()
    assert all(torch.allclose(found[name], param.grad, rtol=1e-5) for name, param in weights.items())


def test_operands_of_different_dtypes_are_an_error():
    layer = make()
    layer.output.double()
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(4, WIDTH))


def test_without_a_gradient_nothing_is_saved():
    layer = LinearAfter(F.gelu, WIDTH, INNER, bias=False)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        assert layer(torch.ones(2, WIDTH), apply_function=True).grad_fn is None


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_wrapped_layer_does_not_apply_the_function_twice():
    layer, x = make("swiglu"), torch.randn(4, WIDTH)
    expected = layer(x)
    layer.output = Wrapper(layer.output)
    assert torch.equal(layer(x), expected)


def test_one_vector():
    layer, x = make(), torch.randn(WIDTH)
    ours, oracle = (train(each, x) for each in (layer, Plain(layer)))
    assert torch.equal(ours[1], oracle[1])
    assert all(torch.equal(ours[2][name], oracle[2][name]) for name in oracle[2])


def test_meta_tensors():
    layer = make().to("meta")
    layer(torch.ones(4, WIDTH, device="meta")).sum().backward()
    assert layer.output.weight.grad.shape == (WIDTH, INNER)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use of it
def test_forward_mode_derivatives():
    layer, x, direction = make(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    _, expected = torch.func.jvp(Plain(layer), (x,), (direction,))
    assert torch.equal(tangent, expected)


def test_autocast_leaves_fp64_as_it_is():
    layer, x = make().double(), torch.randn(4, WIDTH).double()
    ours, oracle = (train(each, x, torch.bfloat16) for each in (layer, Plain(layer).double()))
    assert torch.equal(ours[0], oracle[0])
    assert all(torch.equal(ours[2][name], oracle[2][name]) for name in oracle[2])
