"""Scripts for the cstorch API run with only the import line changed, and equal plain PyTorch."""

import functools

import pytest
import torch
from torch import nn

import headwater as cstorch

STEPS = 7


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(-1))


def get_train_dataloader(batch_size=4):
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    )
    return torch.utils.data.DataLoader(data, batch_size)


FUSED_ADAMW = functools.partial(torch.optim.AdamW, fused=True)
"""What `configure_optimizer` builds; on some CPUs torch's loop differs from it in the last bit."""


def plain_losses(optimizer_class, steps, **clip):
    model = make_model()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    losses = []
    batches = [batch for _ in range(steps) for batch in get_train_dataloader()][:steps]
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(inputs), targets)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["max_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_the_short_documented_script_equals_plain(kind, capsys):
    model = cstorch.compile(make_model(), kind)
    loss_fn = nn.NLLLoss()
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01)
    dataloader = cstorch.utils.data.DataLoader(get_train_dataloader)
    executor = cstorch.utils.data.DataExecutor(dataloader)
    losses = []

    @cstorch.trace
    def training_step(inputs, targets):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_fn(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def print_loss(loss: torch.Tensor):
        print(f"Loss: {loss.item()}")
        losses.append(loss.item())

    for inputs, targets in executor:
        loss = training_step(inputs, targets)
        print_loss(loss)

    expected, _ = plain_losses(torch.optim.SGD, 3)
    assert losses == expected
    assert capsys.readouterr().out.splitlines() == [f"Loss: {loss}" for loss in expected]


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_the_full_documented_script_with_checkpoints_equals_plain(kind, tmp_path):
    def run(num_steps, checkpoint=None):
        backend = cstorch.backend(kind)
        with backend.device:
            model = make_model()
        compiled_model = cstorch.compile(model, backend)
        loss_fn = nn.NLLLoss()
        optimizer = cstorch.optim.configure_optimizer(
            optimizer_type="AdamW", params=model.parameters(), lr=0.01, weight_decay=0.01
        )
        grad_scaler = cstorch.amp.GradScaler("dynamic")
        losses, global_step = [], 0
        if checkpoint is not None:
            state_dict = cstorch.load(checkpoint)
            model.load_state_dict(state_dict["model"])
            optimizer.load_state_dict(state_dict["optimizer"])
            grad_scaler.load_state_dict(state_dict["grad_scaler"])
            global_step = state_dict.get("global_step", 0)

        @cstorch.checkpoint_closure
        def save_checkpoint(step):
            state_dict = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "grad_scaler": grad_scaler.state_dict(),
                "global_step": step,
            }
            cstorch.save(state_dict, tmp_path / f"checkpoint_{step}.mdl")

        @cstorch.compile_step
        def training_step(batch):
            inputs, targets = batch
            loss = loss_fn(compiled_model(inputs), targets)
            cstorch.amp.optimizer_step(loss, optimizer, grad_scaler, max_gradient_norm=1.0)
            return loss

        @cstorch.step_closure
        def post_training_step(loss: torch.Tensor):
            losses.append(loss.item())

        executor = cstorch.utils.data.DataExecutor(
            dataloader=cstorch.utils.data.DataLoader(get_train_dataloader, batch_size=4),
            num_steps=num_steps,
            checkpoint_steps=3,
            cs_config=cstorch.utils.CSConfig(num_csx=1),
        )
        for batch in executor:
            loss = training_step(batch)
            global_step += 1
            post_training_step(loss)
            save_checkpoint(global_step)
        return losses

    expected, weights = plain_losses(FUSED_ADAMW, STEPS, max_norm=1.0)
    assert run(STEPS) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint_{n}.mdl" for n in (3, 6, 7)]
    saved = cstorch.load(tmp_path / "checkpoint_7.mdl")
    assert saved["global_step"] == 7
    assert all(torch.equal(saved["model"][name], weights[name]) for name in weights)
    assert run(1, checkpoint=tmp_path / "checkpoint_6.mdl") == [pytest.approx(resumed_loss(), rel=0)]


def resumed_loss():
    """Return the loss on the first batch with the weights after six steps of plain PyTorch."""
    _, weights = plain_losses(FUSED_ADAMW, 6, max_norm=1.0)
    model = make_model()
    model.load_state_dict(weights)
    inputs, targets = next(iter(get_train_dataloader()))
    return nn.functional.nll_loss(model(inputs), targets).item()
