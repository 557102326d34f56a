"""An update that waits for its stage runs in the context of its step, not in that of the next forward."""

from contextlib import nullcontext

import pytest
import torch
from any_loop import check, odd_plans, randn, some_plan
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Multiplies(torch.optim.Optimizer):
    """Multiplies gradients as matrices, which autocast would do in bf16."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rows = param.grad.view(len(param), -1)
                    product = (rows @ rows.T @ rows).float() + rows
                    param.sub_(product.view_as(param), alpha=group["lr"])


class ScalesProducts(TorchDispatchMode):
    """Multiplies the results of matrix products."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.1 if func is torch.ops.aten.mm.default else result


class ScalesMatmul(TorchFunctionMode):
    """Multiplies the results of `matmul`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return (
            result * 1.1 if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) else result
        )


def net():
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


OPTIMIZERS = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "of the user": Multiplies,
}


@pytest.mark.same_dry_runs("optimizer", "step_context")
@odd_plans
@pytest.mark.parametrize("step_context", [nullcontext, autocast])
@pytest.mark.parametrize("context", [autocast, ScalesProducts, ScalesMatmul])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_of_a_loop_with_contexts_equal_plain(optimizer, context, step_context, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        chosen = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for number in range(3):
            with context():
                loss = model(randn(4, 6, seed=number)).float().square().mean()
            chosen.zero_grad()
            loss.backward()
            with step_context():
                chosen.step()
            losses.append(loss.item())
        return losses, model, chosen

    check(script, plan, tmp_path)


@some_plan
def test_a_vectorized_call_after_a_step_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(net())
        optimizer = Multiplies(model.parameters())
        model(randn(4, 6, seed=0)).square().mean().backward()
        optimizer.step()
        return torch.vmap(lambda row: model(row[None])[0])(randn(3, 6, seed=1)), model

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", ["memory"])
@pytest.mark.parametrize("make", [Multiplies, lambda params: torch.optim.AdamW(params, fused=True)])
def test_gradients_of_single_samples_after_each_step_equal_plain(make, plan, tmp_path):
    def script(place):
        model = place.compile(net())
        model(randn(4, 6, seed=0))
        optimizer = make(model.parameters())

        def loss(params, row):
            return torch.func.functional_call(model, params, (row[None],)).square().mean()

        for number in range(3):
            params = {name: param.detach() for name, param in model.named_parameters()}
            rows = randn(4, 6, seed=number)
            gradients = torch.vmap(torch.func.grad(loss), (None, 0))(params, rows)
            for name, param in model.named_parameters():
                param.grad = gradients[name].clamp(-0.1, 0.1).mean(0)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    check(script, plan, tmp_path)


VARIABLES = {"rate": 0.1}


class ReadsVariables(torch.optim.Optimizer):
    """Multiplies its learning rate by variables outside of its groups."""

    factor = 1.0

    def __init__(self, params, rate_of):
        super().__init__(params, {"rate_of": rate_of})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=VARIABLES["rate"] * self.factor * group["rate_of"]())


@pytest.mark.filterwarnings("error::headwater.api.loop_steps.LoopStepWarning")
@odd_plans
@pytest.mark.parametrize("changed", ["global variable", "class attribute", "local variable"])
@pytest.mark.parametrize("traced", [False, True])
def test_an_update_reads_the_variables_of_its_step(changed, traced, plan, tmp_path, monkeypatch):
    def script(place):
        monkeypatch.setitem(VARIABLES, "rate", 0.1)
        monkeypatch.setattr(ReadsVariables, "factor", 1.0)
        local = 1.0
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer = ReadsVariables(model.parameters(), lambda: local)

        def step(number):
            optimizer.zero_grad()
            model(randn(3, 6, seed=number)).square().sum().backward()
            optimizer.step()

        run = place.trace(step) if traced else step
        for number in range(3):
            run(number)
            if changed == "global variable":
                VARIABLES["rate"] *= 0.5
            elif changed == "class attribute":
                ReadsVariables.factor *= 0.5
            else:
                local *= 0.5
        return model

    check(script, plan, tmp_path)
