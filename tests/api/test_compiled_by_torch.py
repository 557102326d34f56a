"""`torch.compile` of a streamed model, of a part of it, or of a function that a forward calls."""

import copy
import warnings

import pytest
import torch
from any_loop import Place, adamw, check, every_plan, some_plan
from test_changed_models import inputs, stack, train
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from headwater.core.errors import StreamError
from headwater.core.uncompiled import CompilerOffWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler
plans = pytest.mark.parametrize("plan", ["memory", "recompute"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@plans
def test_torch_compiles_a_submodule_after_the_first_forward(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 1)
        model[1].compile(backend="eager")
        model[2][0].compile(backend="eager")
        return losses, train(model, optimizer, 2, start=1), model

    check(script, plan, tmp_path)


@plans
def test_torch_compiles_a_submodule_before_streaming(plan, tmp_path):
    def script(place):
        model = stack()
        model[1].compile(backend="eager")
        model = place.compile(model)
        return train(model, adamw(model.parameters())), model

    check(script, plan, tmp_path)


@plans
@pytest.mark.parametrize("streamed_before", [False, True])
def test_torch_compiles_a_streamed_model(plan, streamed_before, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = train(model, optimizer, 1) if streamed_before else []
        torch._dynamo.reset()  # torch may not compile what it has compiled for the plain model
        compiled = torch.compile(model, backend="eager")
        return losses, train(compiled, optimizer, 2), model

    with pytest.warns(CompilerOffWarning, match="no effect on this Sequential"):
        check(script, plan, tmp_path)


@pytest.mark.parametrize("record", [torch.jit.script, lambda model: torch.jit.trace(model, inputs(0))])
def test_a_model_of_torchscript_is_refused_and_the_remedy_works(record, tmp_path):
    place = Place("recompute", tmp_path)
    with pytest.raises(StreamError, match="got one of TorchScript") as raised:
        place.compile(record(stack()))
    assert "headwater.compile(torch.nn.Sequential(model))" in raised.value.remedy
    place._compiled.clear()
    torch.manual_seed(0)
    plain = stack()
    model = place.compile(nn.Sequential(record(copy.deepcopy(plain))))
    losses, expected = (train(each, adamw(each.parameters())) for each in (model, plain))
    assert losses == pytest.approx(expected)  # TorchScript rounds differently after some calls


class Counter:
    """A compiler that counts how often its compiled code runs. The code has the bits of eager code."""

    def __init__(self, name):
        self.name, self.runs = name, 0

    def __call__(self, graph, inputs):
        compiled = lookup_backend(self.name)(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run


def activation(x):
    return nn.functional.gelu(x) * torch.sigmoid(x)


class Block(nn.Module):
    """A block whose forward calls a function."""

    def __init__(self, function, width=6):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(width, width), nn.Linear(width, width), function

    def forward(self, x):
        return x + self.second(self.function(self.first(x)))


def blocks(kind, counter):
    """Four blocks; the given part of each is compiled."""
    function = torch.compile(activation, backend=counter) if kind == "function" else activation
    made = [Block(function) for _ in range(4)]
    if kind == "method":
        for block in made:
            block.compile(backend=counter)
    if kind == "wrapper":
        made = [torch.compile(block, backend=counter) for block in made]
    return nn.Sequential(*made)


@every_plan
@pytest.mark.parametrize("kind", ["function", "method", "wrapper"])
def test_parts_that_the_user_compiles_run_compiled(kind, plan, tmp_path):
    runs = []

    def script(place):
        torch._dynamo.reset()
        counter = Counter("aot_eager")
        model = place.compile(blocks(kind, counter))
        losses = train(model, adamw(model.parameters()))
        runs.append(counter.runs)
        return losses, model

    if kind == "method" and plan == "recompute":
        with pytest.warns(CompilerOffWarning, match="this Block are computed again in backward"):
            check(script, plan, tmp_path)
        assert [number > 0 for number in runs] == [True, False]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CompilerOffWarning)
            check(script, plan, tmp_path)
        assert all(runs), "neither plain PyTorch nor streaming runs the parts eagerly"


def test_a_function_compiled_by_inductor_has_the_same_bits(tmp_path):
    def script(place):
        torch._dynamo.reset()
        model = place.compile(blocks("function", "inductor"))
        return train(model, adamw(model.parameters())), model

    check(script, "recompute", tmp_path)


def _average(model, averages):
    for average, param in zip(averages, model.parameters(), strict=True):
        average.lerp_(param, 0.25)


def _clamp(model, averages):
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def _average_detached(model, averages):
    for average, param in zip(averages, model.parameters(), strict=True):
        average.mul_(0.75).add_(param.detach(), alpha=0.25)


@some_plan
@pytest.mark.parametrize("update", [_average, _average_detached, _clamp])
def test_a_compiled_function_reads_and_writes_present_weights(update, plan, tmp_path):
    def script(place):
        model = stack()
        averages = [param.detach().clone() for param in model.parameters()]
        model = place.compile(model)
        optimizer = adamw(model.parameters())
        compiled = torch.compile(update, backend="aot_eager")
        losses = []
        for step in range(3):
            losses.append(train(model, optimizer, 1, start=step))
            with torch.no_grad():
                compiled(model, averages)
        return losses, averages, model

    check(script, plan, tmp_path)


@some_plan
def test_a_compiled_function_of_weights_and_gradients_between_steps(plan, tmp_path):
    @torch.compile(backend="aot_eager")
    def penalty(params):
        return sum(param.square().sum() for param in params)

    @torch.compile(backend="aot_eager")
    def clip(params):
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.grad.mul_(1 / (norm + 1))

    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(3):
            batch = inputs(step)
            loss = model(batch).square().mean() + 0.01 * penalty(list(model.parameters()))
            loss.backward()
            clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, model

    check(script, plan, tmp_path)


@some_plan
def test_a_compiled_optimizer_step_is_exact_and_warns_that_it_is_not_compiled(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = adamw(model.parameters())
        # In plain PyTorch the compiled step rounds differently, so the plain model takes an eager step.
        step = torch.compile(optimizer.step, backend="eager") if place.plan else optimizer.step
        losses = []
        for number in range(3):
            batch = inputs(number)
            loss = model(batch).square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, model

    with pytest.warns(CompilerOffWarning, match=r"no effect on AdamW\.step"):
        check(script, plan, tmp_path)
