"""`torch.compile` of a streamed model or of a part of it: streaming runs outside of compiled code."""

import pytest
import torch
from any_loop import adamw, check
from test_changed_models import stack, train

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
        compiled = torch.compile(model, backend="eager")
        return losses, train(compiled, optimizer, 2), model

    check(script, plan, tmp_path)
