"""Optimizers built from a spec against torch's own, and what is refused."""

import pytest
import torch

from headwater.core.errors import ConfigError
from headwater.optim import OptimizerSpec, is_bias_or_norm, is_elementwise
from headwater.optim.spec import state_signature

EVERY = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)
USABLE = [name for name in EVERY if name not in ("LBFGS", "SparseAdam")]


def make_params():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5, 3))]


def train(optimizer, params, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", USABLE)
def test_every_optimizer_of_torch_is_built_by_name(name):
    ours, theirs = make_params(), make_params()
    built = train(OptimizerSpec(name, {"lr": 0.01}).build(ours), ours)
    plain = train(getattr(torch.optim, name)(theirs, lr=0.01), theirs)
    for left, right in zip(built, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_used_on_cpu(name):
    assert OptimizerSpec(name, {"lr": 0.1}).build(make_params()).defaults["fused"] is True
    assert OptimizerSpec(name, {"lr": 0.1, "fused": False}).build(make_params()).defaults["fused"] is False


@pytest.mark.parametrize("name", USABLE)
def test_elementwise_means_that_a_split_parameter_ends_the_same(name):
    whole = make_params()
    halves = [torch.nn.Parameter(part.clone()) for part in whole[0].detach().split(3)]
    spec = OptimizerSpec(name, {"lr": 0.01})
    optimizer, split = spec.build(whole[:1]), spec.build(halves)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        whole[0].grad = torch.randn(whole[0].shape, generator=generator)
        for half, grad in zip(halves, whole[0].grad.split(3), strict=True):
            half.grad = grad.clone()
        optimizer.step()
        split.step()
    same = torch.equal(whole[0], torch.cat([half.detach() for half in halves]))
    assert same or not is_elementwise(name)


def test_row_wise_optimizers_are_not_elementwise():
    assert is_elementwise("AdamW")
    assert not any(is_elementwise(name) for name in ("Adafactor", "Muon", "Lamb"))


@pytest.mark.parametrize("name", ["LBFGS"])
def test_optimizers_that_cannot_stream_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be used here: it"):
        OptimizerSpec(name)


def test_unknown_optimizer_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        OptimizerSpec("AdmaW")
    assert "did you mean AdamW?" in (caught.value.remedy or "")


def test_wrong_arguments_are_the_users_error():
    with pytest.raises(ConfigError, match="AdamW cannot be built"):
        OptimizerSpec("AdamW", {"lr": 0.1, "momentum": 0.9}).build(make_params())
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        OptimizerSpec("AdamW", {"lr": -1.0}).build(make_params())


def test_biases_and_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    model[0].weight.grad = None
    spec = OptimizerSpec("AdamW", {"lr": 0.1, "weight_decay": 0.5}, no_decay=is_bias_or_norm)
    groups = spec.groups(model.named_parameters())
    assert [len(group["params"]) for group in groups] == [1, 3]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    spec.build(groups).step()
    for name, param in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "0.weight" else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)


def test_without_decay_there_is_one_group():
    model = torch.nn.Linear(4, 4)
    spec = OptimizerSpec("SGD", {"lr": 0.1}, no_decay=is_bias_or_norm)
    assert len(spec.groups(model.named_parameters())) == 1


def test_learning_rates_are_scaled_by_name():
    spec = OptimizerSpec("SGD", {"lr": 0.4}, lr_scale=lambda name: 0.25 if name == "hidden.weight" else 1.0)
    assert spec.options("hidden.weight", (2, 2)) == {"lr": 0.1}
    assert spec.options("hidden.weight", (2, 2), {"lr": 1.0}) == {"lr": 0.25}
    assert spec.options("hidden.bias", (2,), {"lr": 1.0}) == {"lr": 1.0}
    assert spec.options("hidden.bias", (2,)) == {}
    model = torch.nn.ModuleDict({"hidden": torch.nn.Linear(2, 2)})
    assert [group.get("lr", 0.4) for group in spec.groups(model.named_parameters())] == [0.1, 0.4]


def test_a_tensor_option_with_several_elements_has_a_signature():
    signature = state_signature({"lr": 0.1, "scale": torch.ones(3)})
    assert signature == state_signature({"lr": 0.2, "scale": torch.zeros(3)})
    assert signature != state_signature({"lr": 0.1, "scale": torch.ones(4)})
