"""Writes to parameters between forwards: initialization, and sums with values that require a gradient."""

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.errors import StreamError

PLANS = [{}, {"num_slabs": 2}]


def model_of(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    if options is not None:
        hw.compile(model, hw.backend("CSX", **options))
    model(torch.ones(2, 4))
    return model


def assert_same_after(change, options):
    models = []
    for each in (None, options):
        model = model_of(each)
        torch.manual_seed(3)
        change(model)
        models.append(model)
    for plain, streamed in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain.detach(), streamed.detach().clone())


INITIALIZERS = {
    "uniform_": (),
    "normal_": (),
    "trunc_normal_": (),
    "constant_": (2.0,),
    "ones_": (),
    "eye_": (),
    "xavier_uniform_": (),
    "kaiming_uniform_": (),
    "kaiming_normal_": (),
    "orthogonal_": (),
    "sparse_": (0.5,),
}


@pytest.mark.parametrize("options", PLANS, ids=["memory", "slabs"])
def test_torch_initializers_write_to_a_parameter(options):
    for name, arguments in INITIALIZERS.items():
        assert_same_after(lambda m, name=name, a=arguments: getattr(nn.init, name)(m[0].weight, *a), options)


@pytest.mark.parametrize("options", PLANS, ids=["memory", "slabs"])
def test_reset_parameters_of_layers_equals_plain(options):
    assert_same_after(lambda model: [layer.reset_parameters() for layer in model], options)


def merged(model):
    adapter = nn.Parameter(torch.randn(1, 4, generator=torch.Generator().manual_seed(1)))
    model[0].weight.data += torch.ones(4, 1) @ adapter
    model[2].bias.data.add_(adapter[0, :3])


@pytest.mark.parametrize("options", PLANS, ids=["memory", "slabs"])
def test_a_value_with_a_gradient_is_added_to_data(options):
    assert_same_after(merged, options)


@pytest.mark.parametrize("options", PLANS, ids=["memory", "slabs"])
def test_in_place_changes_with_gradients_enabled_are_refused(options):
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model_of(None)[0].weight.add_(1)
    with pytest.raises(StreamError, match="changed in place"):
        model_of(options)[0].weight.add_(1)


def fused_adamw(model, weights_of=list):
    """Run a step of torch's fused kernel, which does not count its changes in the version of a tensor."""
    weights = weights_of(model.parameters())
    gradients = [torch.full(weight.shape, 0.5) for weight in weights]
    averages, squares = ([torch.zeros(weight.shape) for weight in weights] for _ in range(2))
    steps = [torch.tensor(1.0) for _ in weights]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    with torch.no_grad():
        torch._fused_adamw_(
            weights, gradients, averages, squares, [], steps, amsgrad=False, maximize=False, **numbers
        )


@pytest.mark.parametrize("options", PLANS, ids=["memory", "slabs"])
def test_fused_kernels_of_torch_write_to_a_parameter(options):
    assert_same_after(fused_adamw, options)
    assert_same_after(lambda m: fused_adamw(m, lambda ps: [p.detach() for p in ps]), options)
    assert_same_after(lambda m: fused_adamw(m, lambda ps: [p[:2] for p in ps]), options)


def test_an_operation_that_declares_its_change_writes_to_a_parameter():
    library = torch.library.Library("declared_changes", "DEF")
    library.define("halve_(Tensor(a!) values) -> ()")

    def halve_(values):
        values.numpy()[:] *= 0.5

    library.impl("halve_", halve_, "CPU")

    def change(model):
        for operator in (torch.ops.declared_changes.halve_, torch.ops.declared_changes.halve_.default):
            operator(model[0].weight.detach())
            operator(values=model[2].weight.data[1])

    for options in PLANS:
        assert_same_after(change, options)
