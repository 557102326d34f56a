"""Gradients that the user's loop reads, edits, clips, scales or requests from autograd."""

import pytest
import torch
from any_loop import Net, Place, adamw, batches, check, every_plan, extreme_plans, loss_of, randn, some_plan
from torch import nn

from headwater.core.errors import StreamError


def script_with(edit, *, before=lambda model, optimizer: optimizer.zero_grad()):
    """Return a loop that calls `edit(model)` between backward and step."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses, shown = [], []
        for inputs, targets in batches(4):
            before(model, optimizer)
            loss = loss_of(model(inputs), targets)
            loss.backward()
            shown.append(edit(model))
            optimizer.step()
            losses.append(loss.item())
        return losses, shown, model, optimizer

    return script


EDITS = {
    "norm clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "value clipped": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "by foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "one is replaced": lambda model: setattr(model.head.weight, "grad", model.head.weight.grad.sign()),
    "one is dropped": lambda model: setattr(model.head.weight, "grad", None),
    "one is zero": lambda model: model.blocks[1][0].weight.grad.zero_(),
    "a row is zero": lambda model: model.embedding.weight.grad[0].fill_(0.0),
    "of a buffer's kind": lambda model: model.embedding.weight.grad.data.mul_(2.0),
    "shown": lambda model: {name: param.grad.clone() for name, param in model.named_parameters()},
}


@pytest.mark.same_dry_runs("edit")
@extreme_plans
@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients_equal_plain(edit, plan, tmp_path):
    def edit_and_forget(model):
        result = EDITS[edit](model)
        return result if isinstance(result, torch.Tensor | dict) else None

    check(script_with(edit_and_forget), plan, tmp_path)


def set_none(model, optimizer):
    for param in model.parameters():
        param.grad = None


ZEROING = {
    "the optimizer's, to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "the model's": lambda model, optimizer: model.zero_grad(),
    "the model's, to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": set_none,
}


@pytest.mark.same_dry_runs("zeroing", "when")
@extreme_plans
@pytest.mark.parametrize("zeroing", ZEROING)
@pytest.mark.parametrize("when", ["before forward", "before backward", "after step"])
def test_every_way_to_clear_gradients_equals_plain(zeroing, when, plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []

        def forget(now):
            if when == now:
                ZEROING[zeroing](model, optimizer)

        for inputs, targets in batches(4):
            forget("before forward")
            loss = loss_of(model(inputs), targets)
            forget("before backward")
            loss.backward()
            optimizer.step()
            forget("after step")
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_parameter_unused_in_a_step_has_a_zero_gradient(plan, tmp_path):
    """With `set_to_none=False` an optimizer also moves the parameters that a step did not use."""

    def script(place):
        model = place.compile(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]))
        optimizer = adamw(model.parameters())

        def forward(self, x, *, every):
            for index, layer in enumerate(self):
                x = layer(x) if every or index != 1 else x
            return x

        type(model).forward = forward
        losses = []
        for number in range(5):
            optimizer.zero_grad(set_to_none=False)
            loss = model(torch.randn(3, 4), every=number % 2 == 0).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        del type(model).forward
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_reading_a_consumed_gradient_raises(plan, tmp_path):
    """The store has consumed the gradient, which plain PyTorch would still have, so reading it must fail."""
    place = Place(plan, tmp_path)
    model = place.compile(Net())
    optimizer = adamw(model.parameters())
    inputs, targets = batches(1)[0]
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    gradient = model.head.weight.grad
    assert gradient is not None and gradient.shape == model.head.weight.shape
    with pytest.raises(StreamError, match=r"read it before optimizer\.step"):
        gradient.norm()
    loss_of(model(inputs), targets).backward()
    with pytest.raises(StreamError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    assert model.head.weight.grad is None
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    place.release()


CONVERSIONS = {
    "cpu": lambda model: model.cpu(),
    "to the same dtype": lambda model: model.to(torch.float32),
    "float": lambda model: model.float(),
    "type": lambda model: model.type(torch.float32),
    "to the same layout": lambda model: model.to(memory_format=torch.contiguous_format),
    "one block": lambda model: model.blocks[0].to("cpu"),
    "contiguous": lambda model: model._apply(lambda tensor: tensor.contiguous()),
}


@pytest.mark.parametrize("conversion", [*CONVERSIONS])
@some_plan
def test_conversions_that_change_nothing_between_step_and_zero_grad(conversion, plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for tokens, classes in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(tokens), classes)
            loss.backward()
            optimizer.step()
            CONVERSIONS[conversion](model)
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


def assign(param, value):
    param.grad = value


OVERWRITTEN = {
    "zero of data": lambda p: p.grad.data.zero_(),
    "zero of a detached gradient": lambda p: p.grad.detach().zero_(),
    "zeros like it": lambda p: assign(p, torch.zeros_like(p.grad)),
    "new zeros": lambda p: assign(p, p.grad.new_zeros(p.grad.shape)),
    "like it": lambda p: assign(p, torch.full_like(p.grad, 0.1)),
    "random": lambda p: assign(p, torch.randn_like(p.grad)),
    "fill": lambda p: p.grad.fill_(0),
    "fill of data": lambda p: p.grad.data.fill_(0.5),
    "copy": lambda p: p.grad.copy_(p.detach() * 0.1),
    "copy of one value": lambda p: p.grad.copy_(torch.tensor(0.1)),
}


@extreme_plans
@pytest.mark.parametrize(
    "overwrite",
    [
        lambda gradient: gradient.fill_(0.5),
        lambda gradient: gradient.data.fill_(0.5),
        lambda gradient: gradient.copy_(torch.tensor(0.5)),
        lambda gradient: gradient.zero_(),
    ],
)
def test_a_gradient_that_was_dropped_does_not_replace_the_present_one(overwrite, plan, tmp_path):
    """The loop keeps a gradient that a step has consumed, and that `zero_grad` has dropped."""

    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer, kept, gradients = adamw(model.parameters()), None, []
        for step in range(3):
            model(randn(3, 6, seed=step)).square().mean().backward()
            if kept is not None:
                overwrite(kept)
            gradients.append(model[0].weight.grad.clone())
            optimizer.step()
            kept = model[0].weight.grad
            optimizer.zero_grad()
            overwrite(kept)
            assert model[0].weight.grad is None
        return gradients, model

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("overwrite", OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_consumed_gradients_may_be_overwritten(overwrite, plan, tmp_path):
    def script(place):
        model = Net()
        with torch.no_grad():
            model.head.weight.data = model.head.weight.t().clone().t()  # dense, but not row-major
        model = place.compile(model)
        optimizer = adamw(model.parameters())
        losses = []
        for tokens, classes in batches(3):
            loss = loss_of(model(tokens), classes)
            loss.backward()
            optimizer.step()
            for param in model.parameters():
                overwrite(param)
            losses.append([loss.item(), *(param.grad for param in model.parameters())])
            losses[-1] = [value if isinstance(value, float) else value.clone() for value in losses[-1]]
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("write", ["zero", "copy", "twice"])
def test_gradients_that_a_loop_keeps_after_a_step_can_be_written_in_each_step(write, plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
        optimizer, seen = adamw(model.parameters()), []

        def backward():
            model(randn(3, 6, seed=0)).square().mean().backward()

        backward()
        optimizer.step()
        gradients = [param.grad for param in model.parameters()]
        for number in (1.0, 2.0, 3.0):
            for gradient in gradients:
                gradient.zero_() if write == "zero" else gradient.fill_(number)
            if write == "zero":
                backward()
            if write == "twice":
                torch._foreach_mul_(gradients, 3.0)
                seen += [gradient.sum().item() for gradient in gradients]
            optimizer.step()
        return seen, model, optimizer

    check(script, plan, tmp_path)


def test_a_consumed_gradient_is_not_that_of_a_later_step(tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(Net())
    optimizer, kept = adamw(model.parameters()), None
    for tokens, classes in batches(2):
        optimizer.zero_grad()
        loss_of(model(tokens), classes).backward()
        optimizer.step()
        kept = kept if kept is not None else model.head.weight.grad
    kept.zero_()  # plain PyTorch zeroes a tensor that is not the gradient any more
    assert type(model.head.weight.grad) is type(kept)


USES_OF_CONSUMED = {
    "a product with the weight": lambda p, state: p * p.grad,
    "a product with data": lambda p, state: p.data * p.grad,
    "a product with a detached weight": lambda p, state: p.detach() * p.grad,
    "a product with a view": lambda p, state: p.data[0] * p.grad,
    "a product with optimizer state": lambda p, state: state["exp_avg"] * p.grad,
    "products of lists": lambda p, state: torch._foreach_mul([p], [p.grad]),
    "a sum in place": lambda p, state: p.data.add_(p.grad),
    "a copy": lambda p, state: p.copy_(p.grad),
    "an assignment": lambda p, state: setattr(p, "data", p.grad),
}


@pytest.mark.parametrize("use", USES_OF_CONSUMED.values(), ids=USES_OF_CONSUMED)
def test_operations_of_weights_and_consumed_gradients_raise(use, tmp_path):
    """The weight's class must not compute with the placeholder of the gradient."""
    place = Place("memory", tmp_path)
    model = place.compile(nn.Linear(6, 6))
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with torch.no_grad(), pytest.raises(StreamError, match="consumed this gradient"):
        use(model.weight, optimizer.state[model.weight])
    assert torch.equal(model.weight, before)
    place.release()


@pytest.mark.parametrize("conversion", [torch.nn.Module.double, torch.nn.Module.bfloat16])
def test_conversions_of_consumed_gradients_are_refused(conversion, tmp_path):
    model = Place("memory", tmp_path).compile(Net())
    optimizer = adamw(model.parameters())
    ((tokens, classes),) = batches(1)
    loss_of(model(tokens), classes).backward()
    optimizer.step()
    with pytest.raises(StreamError, match=r"consumed this gradient(.|\n)*zero_grad"):
        conversion(model)


@extreme_plans
def test_steps_without_backward_use_assigned_gradients(plan, tmp_path):
    """One step without gradients, then one with gradients that the loop has assigned."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        inputs, targets = batches(1)[0]
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()
        return model, optimizer, model(inputs)

    check(script, plan, tmp_path)


@extreme_plans
def test_changing_kept_gradients_after_a_step_does_not_change_the_update(plan, tmp_path):
    """A change after the step does not affect the update that the store applies later."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            kept = [param.grad for param in model.parameters()]
            optimizer.step()
            for gradient in kept:
                gradient.zero_()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_penalties_on_weights_in_the_loss_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss = loss + 1e-2 * sum(param.square().sum() for param in model.parameters())
            loss = loss + 1e-3 * model.head.weight.abs().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@every_plan
def test_a_penalty_from_before_the_first_forward_equals_plain(plan, tmp_path):
    """Its graph has saved the parameters, trained and frozen ones, before they have streamed weights."""

    def script(place):
        model = Net()
        model.norm.requires_grad_(False)
        penalty = 1e-3 * (model.blocks[0][0].weight * model.norm.weight).sum()
        place.compile(model)
        optimizer = adamw(param for param in model.parameters() if param.requires_grad)
        penalty = penalty + 1e-2 * sum(param.square().sum() for param in model.parameters())
        losses = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            (loss + penalty).backward()
            optimizer.step()
            losses.append(loss.item())
            penalty = 0.0
        return losses, model, optimizer

    check(script, plan, tmp_path)


@every_plan
def test_a_penalty_on_a_weight_that_was_frozen_then_equals_plain(plan, tmp_path):
    def script(place):
        model, scale = Net(), nn.Parameter(torch.ones(()))
        weight = model.blocks[0][0].weight.requires_grad_(False)
        penalty = (weight * scale).square().sum()
        weight.requires_grad_(True)
        place.compile(model)
        optimizer = adamw(model.parameters())
        ((inputs, targets),) = batches(1)
        loss = loss_of(model(inputs), targets)
        (loss + penalty).backward()
        optimizer.step()
        return [loss.item(), scale.grad.item()], model, optimizer

    check(script, plan, tmp_path)


def _bytes_in_memory(model):
    """Return the bytes to which the parameters of a streamed model point now."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(param.untyped_storage().nbytes() for param in model.parameters())


def test_the_memory_that_an_early_penalty_needs_is_freed_after_the_step(tmp_path):
    place = Place("slabs", tmp_path)
    model = place.compile(Net())
    optimizer = adamw(model.parameters())
    penalty = sum(param.square().sum() for param in model.parameters())
    (inputs, targets), *_ = batches(1)
    loss = loss_of(model(inputs), targets)
    assert _bytes_in_memory(model) > 2000
    (loss + penalty).backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    model(inputs)
    assert _bytes_in_memory(model) < 200
    place.release()


def test_an_early_penalty_is_refused_if_the_weights_are_streamed_in_another_dtype(tmp_path):
    place = Place("slabs", tmp_path)
    model = place.compile(Net())
    penalty = sum(param.square().sum() for param in model.parameters())
    (inputs, targets), *_ = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(inputs), targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + penalty).backward()
    place.release()


def test_gradients_of_16_bits_return_to_released_parameters_in_the_dtype_of_these(tmp_path):
    place = Place("slabs", tmp_path)
    model = place.compile(Net())
    (inputs, targets), *_ = batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model(inputs), targets).backward()
    streamed = [param.grad.clone() for param in model.parameters()]
    place.release()
    assert [param.grad.dtype for param in model.parameters()] == [torch.float32] * len(streamed)
    for param, gradient in zip(model.parameters(), streamed, strict=True):
        assert torch.equal(param.grad, gradient.float())


@every_plan
def test_gradients_that_autograd_returns_for_a_tied_head_equal_plain(plan, tmp_path):
    """The forward of the head runs again in backward, and reads a weight of another stage."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
            self.head = nn.Linear(8, 10)
            self.head.weight = self.words.weight

        def forward(self, x):
            hidden = self.words(x)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return self.head(hidden)

    def script(place):
        model = place.compile(Tied())
        optimizer = adamw(model.parameters())
        shown = []
        for _ in range(3):
            words = torch.randint(0, 10, (4, 6))
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            params = list(model.parameters())
            gradients = torch.autograd.grad(loss, params)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            shown.append([gradient.clone() for gradient in gradients])
            optimizer.step()
            optimizer.zero_grad()
        return shown, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_gradient_penalty_with_second_derivatives_equals_plain(plan, tmp_path):
    """A gradient penalty as in WGAN-GP needs second derivatives of the model."""

    def script(place):
        model = place.compile(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        )
        optimizer = adamw(model.parameters())
        losses = []
        for _ in range(3):
            inputs = torch.randn(5, 4, requires_grad=True)
            outputs = model(inputs)
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            loss = outputs.mean() + (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), slope))
        return losses, model, optimizer

    check(script, plan, tmp_path)


@every_plan
def test_autograd_grad_of_only_the_inputs_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        )
        inputs = torch.randn(5, 4, requires_grad=True)
        slopes = [torch.autograd.grad(model(inputs).sum(), inputs)[0] for _ in range(2)]
        return slopes, [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


@extreme_plans
def test_autograd_grad_of_parameters_equals_plain(plan, tmp_path):
    """The loop assigns the results of `torch.autograd.grad` to the parameters."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            loss = loss_of(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for param, gradient in zip(model.parameters(), gradients, strict=True):
                param.grad = gradient
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("registered", ["before compile", "after the first step"])
def test_hooks_on_parameters_equal_plain(plan, registered, tmp_path):
    def script(place):
        model, seen = Net(), []

        def register():
            model.head.weight.register_hook(lambda gradient: gradient * 2)
            model.embedding.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
            model.norm.weight.register_post_accumulate_grad_hook(
                lambda param: seen.append(param.grad.clone())
            )

        if registered == "before compile":
            register()
        model = place.compile(model)
        optimizer = adamw(model.parameters())
        losses = []
        for number, (inputs, targets) in enumerate(batches(6), start=1):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if registered != "before compile" and number == 2:
                register()
        return losses, seen, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_hooks_that_a_forward_adds_to_parameters_equal_plain(plan, tmp_path):
    """A recomputed forward adds its hooks again; each must run once for each backward."""
    seen, handles = [], []

    def see(param):
        seen.append(param.grad.clone())

    class Hooked(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                handles.append(self.weight.register_hook(lambda gradient: gradient * 0.5))
                hook = self.bias.register_post_accumulate_grad_hook(
                    lambda param: seen.append(param.grad.sum())
                )
                handles.append(hook)
            return torch.tanh(super().forward(x))

    def script(place):
        seen.clear()
        model = place.compile(nn.Sequential(*[Hooked(6, 6) for _ in range(3)]))
        optimizer = adamw(model.parameters())
        losses = []
        for step in range(3):
            loss = model(randn(4, 6, seed=step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            while handles:
                handles.pop().remove()
        return losses, model, optimizer, list(seen)

    check(script, plan, tmp_path)


@extreme_plans
def test_the_optimizer_steps_in_backward(plan, tmp_path):
    """Each parameter has an optimizer that steps in a hook, so no gradient is kept after its use."""

    def script(place):
        model = Net(dropout=0.0)
        optimizers = {param: adamw([param]) for param in model.parameters()}

        def hook(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        model = place.compile(model)
        losses = []
        for inputs, targets in batches(3):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
        return losses, model, [optimizer.state_dict()["state"] for optimizer in optimizers.values()]

    check(script, plan, tmp_path)


@extreme_plans
def test_hooks_on_modules_equal_plain(plan, tmp_path):
    """Observing hooks are added after the first step: the dry run before it would show them fake tensors."""

    def script(place):
        model, seen = Net(), []
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.5)
        model = place.compile(model)
        model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        optimizer = adamw(model.parameters())
        losses = []
        for number, (inputs, targets) in enumerate(batches(4)):
            if number == 1:
                model.blocks[2].register_full_backward_hook(
                    lambda module, mine, theirs: seen.append(theirs[0].clone())
                )
                model.norm.register_forward_hook(
                    lambda module, args, output: seen.append(module.weight.clone())
                )
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, seen, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_sharpness_aware_minimization_equals_plain(plan, tmp_path):
    """Each step has two forwards; the loop changes the weights between them and restores them after."""

    def script(place):
        model = place.compile(Net(dropout=0.0))
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                before = [param.clone() for param in model.parameters()]
                norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
                for param in model.parameters():
                    param.add_(param.grad * (0.05 / norm))
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            for param, value in zip(model.parameters(), before, strict=True):
                param.data = value
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)
