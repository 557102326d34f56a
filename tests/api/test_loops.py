"""Training loops as users write them: streamed weights equal plain PyTorch."""

import pytest
import torch
from any_loop import Net, adamw, batches, check, every_plan, extreme_plans, loss_of, some_plan
from torch import nn

import headwater as cstorch


@every_plan
def test_a_basic_training_loop_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(6):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_the_optimizer_may_come_before_compile(plan, tmp_path):
    def script(place):
        model = Net()
        optimizer = adamw(model.parameters())
        model = place.compile(model)
        losses = [train_step(model, optimizer, batch) for batch in batches(4)]
        return losses, model, optimizer

    check(script, plan, tmp_path)


def train_step(model, optimizer, batch):
    inputs, targets = batch
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@every_plan
@pytest.mark.parametrize("traced", [True, False])
def test_gradient_accumulation_equals_plain(plan, traced, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []

        def accumulate(inputs, targets):
            loss = loss_of(model(inputs), targets) / 3
            loss.backward()
            return loss

        if traced:
            accumulate = place.trace(accumulate)
        for number, (inputs, targets) in enumerate(batches(8), start=1):
            losses.append(accumulate(inputs, targets))
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, model, optimizer, [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, noise):
        return self.layers(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = nn.functional.leaky_relu(layer(x))
        return self.layers[-1](x)


@every_plan
@pytest.mark.parametrize("order", ["generator first", "discriminator first"])
@pytest.mark.parametrize("detach", [True, False])
def test_generator_and_discriminator_equal_plain(plan, order, detach, tmp_path):
    def script(place):
        generator, discriminator = place.compile(Generator()), place.compile(Discriminator())
        generator_optimizer = adamw(generator.parameters(), lr=0.01)
        discriminator_optimizer = torch.optim.SGD(
            discriminator.parameters(), lr=0.05, momentum=0.5, fused=True
        )
        judge = nn.functional.binary_cross_entropy_with_logits

        def train_generator(noise):
            generator_optimizer.zero_grad()
            verdict = discriminator(generator(noise))
            loss = judge(verdict, torch.ones_like(verdict))
            loss.backward()
            generator_optimizer.step()
            return loss

        def train_discriminator(noise, real):
            discriminator_optimizer.zero_grad()
            fake = generator(noise)
            verdicts = discriminator(real), discriminator(fake.detach() if detach else fake)
            loss = judge(verdicts[0], torch.ones(5, 1)) + judge(verdicts[1], torch.zeros(5, 1))
            loss.backward()
            discriminator_optimizer.step()
            return loss

        @place.trace
        def step(noise, real):
            if order == "generator first":
                return train_generator(noise), train_discriminator(noise, real)
            return train_discriminator(noise, real), train_generator(noise)

        losses = [step(torch.randn(5, 4), torch.randn(5, 6)) for _ in range(4)]
        return losses, generator, discriminator, generator_optimizer, discriminator_optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_two_models_may_share_one_loss_and_backward(plan, tmp_path):
    def script(place):
        generator, discriminator = place.compile(Generator()), place.compile(Discriminator())
        optimizer = adamw([*generator.parameters(), *discriminator.parameters()])

        @place.trace
        def step(noise):
            optimizer.zero_grad()
            loss = discriminator(generator(noise)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_([*generator.parameters(), *discriminator.parameters()], 0.1)
            optimizer.step()
            return loss

        losses = [step(torch.randn(5, 4)) for _ in range(4)]
        return losses, generator, discriminator, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_the_discriminator_is_frozen_while_the_generator_learns(plan, tmp_path):
    def script(place):
        generator, discriminator = place.compile(Generator()), place.compile(Discriminator())
        optimizers = adamw(generator.parameters()), adamw(discriminator.parameters())
        losses = []
        for turn in range(6):
            discriminator.requires_grad_(turn % 2 == 0)
            generator.requires_grad_(turn % 2 == 1)
            optimizer = optimizers[1 - turn % 2]
            loss = (discriminator(generator(torch.randn(5, 4))) - turn % 2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, generator, discriminator, *optimizers

    check(script, plan, tmp_path)


@extreme_plans
def test_a_head_outside_of_the_streamed_model_equals_plain(plan, tmp_path):
    def script(place):
        body, head = place.compile(Net()), nn.Linear(5, 5)
        optimizer = adamw([*body.parameters(), *head.parameters()])
        losses = []
        for inputs, targets in batches(4):
            optimizer.zero_grad()
            loss = loss_of(head(body(inputs)), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, body, head, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_several_forwards_before_one_backward(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for _ in range(3):
            loss = sum(loss_of(model(inputs), targets) for inputs, targets in batches(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_backward_may_run_twice_through_a_graph(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_of(outputs, targets)
            loss.backward(retain_graph=True)
            (outputs.square().mean() * 0.1).backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_another_forward_may_run_between_forward_and_backward(plan, tmp_path):
    """Backward needs the weights of the first forward after the second one has used the slabs."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(3):
            loss = loss_of(model(inputs), targets)
            with torch.no_grad():
                teacher = model(inputs.flip(0))
            loss = loss + (model(inputs) - teacher).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_optimizer_closures_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []
        for inputs, targets in batches(4):

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_torch_schedulers_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters(), lr=0.02)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [2])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        losses = []
        for batch in batches(6):
            losses.append(train_step(model, optimizer, batch))
            both.step()
            plateau.step(losses[-1])
        return losses, model, optimizer, both.state_dict()

    check(script, plan, tmp_path)


@extreme_plans
def test_the_loop_may_change_the_learning_rate(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters(), lr=0.02)
        losses = []
        for number, batch in enumerate(batches(4)):
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = 0.01 * (number + 1), (0.8, 0.9 + number / 100)
            losses.append(train_step(model, optimizer, batch))
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_layers_may_run_in_an_order_that_depends_on_data(plan, tmp_path):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x, order):
            for index in order:
                x = torch.tanh(self.experts[index](x))
            return x

    def script(place):
        model = place.compile(Routed())
        optimizer = adamw(model.parameters())
        losses = []
        for order in [[0, 1, 2, 3], [3, 1], [2, 2, 0], [], [1, 3, 0, 2, 1], [3]]:
            loss = model(torch.randn(3, 6, requires_grad=True), order).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@some_plan
def test_a_loop_in_a_class_equals_plain(plan, tmp_path):
    class Trainer:
        def __init__(self, place):
            self.model = place.compile(Net())
            self.optimizer = cstorch.optim.configure_optimizer(
                "AdamW", params=self.model.parameters(), lr=0.01
            )
            self.step = place.trace(self.step)

        def step(self, inputs, targets):
            loss = loss_of(self.model(inputs), targets)
            cstorch.amp.optimizer_step(loss, self.optimizer, max_gradient_norm=1.0)
            return loss

    def script(place):
        trainer = Trainer(place)
        losses = [trainer.step(*batch) for batch in batches(4)]
        return losses, trainer.model, trainer.optimizer

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_interrupted_call_leaves_no_trace(when, error, plan, tmp_path):
    """In a notebook a user interrupts the training cell and runs it again."""

    def script(place):
        model = place.compile(Net())
        optimizer = adamw(model.parameters())
        losses = []

        def stop(*_):
            raise error

        for number, (inputs, targets) in enumerate(batches(6)):
            optimizer.zero_grad()
            handle = None
            if number % 2 and when == "forward":
                handle = model.blocks[1].register_forward_pre_hook(stop)
            try:
                output = model(inputs)
                if number % 2 and when == "backward":
                    output.register_hook(stop)
                loss = loss_of(output, targets)
                loss.backward()
            except error:
                if handle:
                    handle.remove()
                continue
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)


@extreme_plans
def test_a_model_may_call_itself_recursively(plan, tmp_path):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x, depth=2):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self(x, depth - 1) if depth else x

    def script(place):
        model = place.compile(Recursive())
        optimizer = adamw(model.parameters())
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 6)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    check(script, plan, tmp_path)
