"""A script with a typical training loop on several ranks: ranks_script.py NUM_CSX FOLDER [OPTIONS]."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import headwater as hw

STEPS = 12
SKIPPED = 7


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def make_data():
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)
    return torch.utils.data.TensorDataset(inputs, labels)


class Seen:
    """The values that closures and the loop have seen."""

    def __init__(self):
        self.closures, self.norms, self.accumulated = [], [], []


def train(backend, folder):
    """Train; return the values that were seen (with several ranks, on the first one)."""
    seen, model = Seen(), hw.compile(make_model(), backend)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    @hw.step_closure
    def note(loss, correct, losses, labels):
        assert losses.shape == labels.shape == (8,), "closures see the whole batch"
        seen.closures.append([loss.item(), correct.item(), *losses.tolist()])
        seen.closures.append([params["0.weight"].norm().item()])

    @hw.checkpoint_closure
    def save(step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        hw.save(state, folder / f"checkpoint_{step}.mdl")

    @hw.trace
    def training_step(number, inputs, labels):
        optimizer.zero_grad()
        outputs = model(inputs)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        losses.mean().backward()
        seen.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        if number % 3 == 0:  # adds to clipped gradients
            (model(inputs) ** 2).mean().backward()
            params["4.bias"].grad.mul_(0.5)
        if number == SKIPPED:
            raise ValueError("a bad batch")
        optimizer.step()
        scheduler.step()
        return losses.mean(), (outputs.argmax(-1) == labels).sum(), losses, labels

    loader = torch.utils.data.DataLoader(make_data(), 8, shuffle=True)
    executor = hw.utils.data.DataExecutor(loader, num_steps=STEPS, checkpoint_steps=STEPS)
    for number, (inputs, labels) in enumerate(executor):
        try:
            results = training_step(number, inputs, labels)
        except ValueError:
            continue
        note(*results)
        with torch.no_grad():
            params["2.weight"].mul_(0.999)
        save(number)
    optimizer.zero_grad()
    for number, (inputs, labels) in enumerate(hw.utils.data.DataExecutor(loader, num_steps=4)):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        seen.accumulated.append(params["0.weight"].grad.norm().item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "weights.pt")
    return seen


if __name__ == "__main__":
    print("begun")
    out, options = Path(sys.argv[2]), json.loads(sys.argv[3]) if sys.argv[3:] else {}
    found = train(hw.backend("CSX", num_csx=int(sys.argv[1]), **options), out)
    print("trained")
    print("every rank warns", file=sys.stderr)
    (out / f"seen_{hw.distributed.task_id()}.json").write_text(json.dumps(vars(found)))
