"""Layers that are frozen, unfrozen, added or adapted before or during training."""

import pytest
import torch
from any_loop import Net, adamw, batches, check, extreme_plans, loss_of, randn, some_plan
from torch import nn

import headwater as cstorch


def train(model, optimizer, steps):
    losses = []
    for inputs, targets in steps:
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@extreme_plans
@pytest.mark.parametrize("optimizer_has", ["all", "trained"])
def test_layers_may_be_unfrozen_during_training(plan, optimizer_has, tmp_path):
    def script(place):
        model = Net()
        model.embedding.requires_grad_(False)
        model.blocks.requires_grad_(False)
        model = place.compile(model)
        params = [p for p in model.parameters() if p.requires_grad or optimizer_has == "all"]
        optimizer = adamw(params)
        losses = train(model, optimizer, batches(2))
        for block in reversed(model.blocks):
            block.requires_grad_(True)
            if optimizer_has == "trained":
                optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.005})
            losses += train(model, optimizer, batches(2))
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_layers_may_be_frozen_during_training(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(2))
        for layer in [model.embedding, model.blocks[0], model.blocks[2]]:
            layer.requires_grad_(False)
            losses += train(model, optimizer, batches(2))
        return losses, model, optimizer

    check(script, plan, tmp_path)


class LoRA(nn.Module):
    """A linear layer with a trained low-rank correction."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@extreme_plans
def test_handwritten_adapters_equal_plain(plan, tmp_path):
    def script(place):
        model = Net().requires_grad_(False)
        for block in model.blocks:
            block[0], block[2] = LoRA(block[0]), LoRA(block[2])
        model = place.compile(model)
        optimizer = adamw(param for param in model.parameters() if param.requires_grad)
        return train(model, optimizer, batches(4)), model, optimizer

    check(script, plan, tmp_path)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@some_plan
@pytest.mark.parametrize("compiled", ["outside", "inside"])
def test_peft_adapters_equal_plain(plan, compiled, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=23, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )

    def script(place):
        model = transformers.LlamaForCausalLM(config)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        if compiled == "outside":
            model = place.compile(model)
        else:
            place.compile(model.base_model.model)
        optimizer = adamw([param for param in model.parameters() if param.requires_grad])
        losses = []
        for _ in range(3):
            tokens = torch.randint(23, (2, 6))
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad(), model.disable_adapter():
            losses.append(model(input_ids=tokens, labels=tokens).loss.item())
        return losses, peft.get_peft_model_state_dict(model), model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("keeps_zeros", [False, True])
def test_layers_frozen_between_forward_and_backward_get_no_gradient(plan, keeps_zeros, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        frozen = [model.embedding, model.blocks[0], model.head]
        shown = []
        for inputs, targets in batches(3):
            optimizer.zero_grad(set_to_none=not keeps_zeros)
            loss_of(model(inputs[:2]), targets[:2]).backward()
            loss = loss_of(model(inputs), targets)
            seen = []
            hook = model.head.weight.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append(p.grad)
            )
            for layer in frozen:
                layer.requires_grad_(False)
            loss.backward()
            hook.remove()
            shown += [loss.item(), seen, [param.grad for param in model.parameters()]]
            optimizer.step()
            for layer in frozen:
                layer.requires_grad_(True)
        return shown, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_layer_that_is_frozen_before_a_backward_stays_frozen(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, batches(1))
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            model.blocks[1].requires_grad_(False)
            loss.backward()
            losses += [loss.item(), [param.grad for param in model.parameters()]]
            optimizer.step()
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_layers_unfrozen_between_forward_and_backward_get_no_gradient(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        model.blocks[1].requires_grad_(False)
        model.head.requires_grad_(False)
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            model.requires_grad_(True)
            loss.backward()
            losses += [loss.item(), [param.grad for param in model.parameters()]]
            optimizer.step()
        return losses, model, optimizer

    check(script, plan, tmp_path)


class Adapted(nn.Module):
    """A frozen base, and a layer after it that is trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.base(x))


def adapted_steps(call, optimizer, numbers):
    losses = []
    for number in numbers:
        loss = call(randn(4, 6, seed=number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@some_plan
@pytest.mark.parametrize("looks_at_gradients", [False, True])
def test_a_part_that_was_frozen_may_be_trained_alone(looks_at_gradients, plan, tmp_path):
    def script(place):
        model = place.compile(Adapted())
        losses = adapted_steps(model, adamw(model.head.parameters()), range(2))
        model.base.requires_grad_(True)
        optimizer = adamw(model.base.parameters())
        if looks_at_gradients:
            model.base(randn(4, 6, seed=5)).sum().backward()
            losses += [param.grad.clone() for param in model.base.parameters()]
        losses += adapted_steps(model.base, optimizer, range(2, 4))
        optimizer.add_param_group({"params": list(model.head.parameters())})
        losses += adapted_steps(model, optimizer, range(4, 6))
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_frozen_parameter_may_get_a_gradient(momentum, plan, tmp_path):
    def script(place):
        model = place.compile(Adapted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        losses = []
        for number in range(3):
            loss = model(randn(4, 6, seed=number)).square().mean()
            loss.backward()
            for param in model.base.parameters():
                param.grad = randn(*param.shape, seed=number)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer, [param.requires_grad for param in model.parameters()]

    check(script, plan, tmp_path)


def test_a_gradient_of_another_kind_is_refused_as_in_plain_pytorch(tmp_path):
    def script(place):
        model = place.compile(Adapted())
        model(randn(4, 6, seed=0)).sum().backward()
        errors = []
        weight = model.head.weight
        for value in (torch.zeros(3), torch.zeros(2, 6, dtype=torch.float64), 3.0, weight.to("meta")):
            with pytest.raises((TypeError, RuntimeError)) as caught:
                weight.grad = value
            errors.append(str(caught.value))
        return errors, weight.grad

    check(script, "memory", tmp_path)


def square_sums(model, hidden):
    sum(param.square().sum() for param in model.blocks.parameters()).backward()


def call_of_a_part(model, hidden):
    model.blocks[1](hidden).square().mean().backward()


def assigned(model, hidden):
    for param in model.blocks[1].parameters():
        param.grad = torch.ones_like(param)


@extreme_plans
@pytest.mark.parametrize("make_gradients", [square_sums, call_of_a_part, assigned])
@pytest.mark.parametrize("calls_model", [False, True])
def test_unfrozen_layers_get_gradients_before_the_next_call(plan, make_gradients, calls_model, tmp_path):
    def script(place):
        model = Net()
        model.blocks.requires_grad_(False)
        model = place.compile(model)
        losses = train(model, adamw([p for p in model.parameters() if p.requires_grad]), batches(2))
        model.blocks.requires_grad_(True)
        seen = []
        for param in model.blocks.parameters():
            param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm().item()))
        optimizer = adamw(model.blocks.parameters())
        for inputs, targets in batches(2):
            make_gradients(model, torch.ones(2, 3, 12))
            if calls_model:
                loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses, seen, model, optimizer

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.parametrize("options", [{"loss_scale": 8.0}, {"max_norm": 0.01}])
def test_gradients_of_layers_unfrozen_for_a_part_are_unscaled_and_clipped(options, plan, tmp_path):
    def script(place):
        model = place.compile(Adapted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(randn(4, 6, seed=0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.base.requires_grad_(True)
        (8 * model.base(randn(4, 6, seed=1)).sum()).backward()
        cstorch.api.optimizers.step(optimizer, **options)
        return model

    check(script, plan, tmp_path)


def test_a_gradient_under_autocast_of_a_part_that_was_frozen_is_kept(tmp_path):
    def script(place):
        model = place.compile(Adapted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for call in (model, model.base):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(randn(4, 6, seed=0)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.base.requires_grad_(True)
        return [param.dtype for param in model.parameters()], model

    check(script, "memory", tmp_path)


OPTIMIZERS = {
    "adamw": adamw,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@some_plan
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_that_was_frozen_with_a_gradient_before_streaming_is_updated_by_it(name, plan, tmp_path):
    def script(place):
        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())
        (first, second) = batches(2)
        loss_of(model(first[0]), first[1]).backward()
        model.head.requires_grad_(False)
        model = place.compile(model)
        with torch.no_grad():
            model(first[0])
        losses = []
        for _ in range(2):
            loss = loss_of(model(second[0]), second[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)
