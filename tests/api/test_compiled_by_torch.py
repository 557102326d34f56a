"""`torch.compile` of a streamed model, of a part of it, or of a function that a forward calls."""

import warnings

import pytest
import torch
from any_loop import adamw, check, every_plan
from test_changed_models import stack, train
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

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
