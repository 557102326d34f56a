"""The frame of every program: the model's class, its optimizer and its training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.conform.grammar.program import TOKENS, WIDTH, Kind, indented

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.1, fused=True)",
    "momentum": (
        "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True)"
    ),
    "adamw": "torch.optim.AdamW(parameters, lr=0.01, fused=True)",
    "adam": "torch.optim.Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05, fused=True)",
    "rmsprop": "torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True, foreach=False)",
    "nadam": "torch.optim.NAdam(parameters, lr=0.01, foreach=False)",
    "radam": "torch.optim.RAdam(parameters, lr=0.01, foreach=False)",
    "adamax": "torch.optim.Adamax(parameters, lr=0.01, foreach=False)",
    "adadelta": "torch.optim.Adadelta(parameters, lr=0.5, foreach=False)",
    "asgd": "torch.optim.ASGD(parameters, lr=0.05, foreach=False)",
    "rprop": "torch.optim.Rprop(parameters, lr=0.01, foreach=False)",
    "groups": (
        "torch.optim.AdamW([{'params': parameters[:1], 'lr': 0.001}, "
        "{'params': parameters[1:], 'weight_decay': 0.0}], lr=0.01, fused=True)"
    ),
}
"""Name -> source of an optimizer, the simplest first."""

LOSSES = {
    "mean": "loss = (y - target).square().mean()",
    "sum": "loss = (y - target).square().sum() / 8",
    "cross entropy": "loss = F.cross_entropy(y.flatten(0, 1), tokens.flatten() % 2)",
    "huber": "loss = F.huber_loss(y, target)",
    "scalar from parts": "loss = y.std() + (y[:, 0] - target[:, 0]).abs().mean()",
}
"""Name -> source of a loss."""

_CLIPS = {
    "none": "",
    "norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
    "value": "torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)",
}


_SIZES = {"same": "4", "shrinking": "4 - step", "growing": "2 + step"}

_LOOKS = {
    "end": "",
    "gradients": 'show_all(show, f"step {step} gradient", gradients_of(model))',
    "parameters": 'show_all(show, f"step {step} parameter", model.state_dict())',
}

Parts = Mapping[str, Sequence[str]]
"""Place in a program -> the lines that its features add there."""


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings of a random program's training loop.

    Attributes:
        steps: number of optimizer steps.
        optimizer: a key of `OPTIMIZERS`.
        loss: a key of `LOSSES`.
        accumulate: number of backwards in a step.
        clip: a key of `_CLIPS`.
        zero: the line that drops the gradients.
        look: a key of `_LOOKS`: what the program shows at each step.
        sizes: a key of `_SIZES`: the batch size of each step.
    """

    steps: int
    optimizer: str
    loss: str
    accumulate: int
    clip: str
    zero: str
    look: str
    sizes: str


def _write(seed: int, parts: Parts, autocast: str | None, **choices: Any) -> str:
    """Return the source of a program.

    Args:
        seed: seed of its random numbers.
        parts: the lines of its features.
        autocast: the dtype of the autocast around forwards and losses, or `None`.
        choices: the attributes of `_Settings`.
    """
    settings = _Settings(**choices)
    top = "\n\n".join(text.strip("\n") for text in parts["top"])
    parts_of_source = (
        _IMPORTS,
        f"{top}\n\n",
        _network(parts),
        _HELPERS.format(optimizer=OPTIMIZERS[settings.optimizer]),
        _run(seed, parts, settings, autocast),
    )
    return "".join(parts_of_source)


_IMPORTS = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

"""

_HELPERS = """\


def make_optimizer(model):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {optimizer}


def gradients_of(model):
    return {{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def show_all(show, what, values):
    for name, value in sorted(values.items()):
        if isinstance(value, dict):
            show_all(show, f"{{what}} {{name}}", value)
        else:
            show(f"{{what}} {{name}}", value)
"""


def _network(parts: Parts) -> str:
    """Return the source of the model's class."""
    return f"""\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear({WIDTH}, {WIDTH})
{indented(parts["init"], 2)}\
        self.head = nn.Linear({WIDTH}, 2)

    def forward(self, x, tokens):
        x = self.first(x)
{indented(parts["forward"], 2)}\
        return self.head(x)[..., :2]
"""


def _run(seed: int, parts: Parts, settings: _Settings, autocast: str | None) -> str:
    """Return the source of the function that trains the model."""
    return f"""\


def run(compile, show):
    torch.manual_seed({seed})
    model = Net()
{indented(parts["setup"], 1)}\
    model = compile(model)
    optimizer = make_optimizer(model)
{indented(parts["begin"], 1)}\
    for step in range({settings.steps}):
{indented(_step(parts, settings, autocast), 2)}\
    show_all(show, "final", model.state_dict())
    show_all(show, "final", dict(model.named_buffers()))
    show_all(show, "final optimizer", optimizer.state_dict()["state"])
    model.eval()
    with torch.no_grad():
{indented(_cast(autocast, ['show("final eval", model(x, tokens))']), 2)}\
"""


def _cast(autocast: str | None, lines: Sequence[str]) -> Sequence[str]:
    """Return lines, inside of autocast to a dtype if one is given."""
    if autocast is None:
        return lines
    return [f'with torch.autocast("cpu", dtype=torch.{autocast}):\n{indented(lines, 1)}']


def _step(parts: Parts, settings: _Settings, autocast: str | None) -> list[str]:
    """Return the lines of one step."""
    size, look = _SIZES[settings.sizes], _LOOKS[settings.look]
    micro_batch = [
        *_cast(autocast, ["y = model(x, tokens)", LOSSES[settings.loss], *parts["loss"]]),
        "loss.backward()",
        'show(f"step {step} output", y)',
        'show(f"step {step} loss", loss)',
    ]
    if settings.accumulate > 1:
        micro_batch = [f"for part in range({settings.accumulate}):\n{indented(micro_batch, 1)}"]
    lines = [
        f"x, tokens = torch.randn({size}, 3, {WIDTH}), torch.randint({TOKENS}, ({size}, 3))",
        f"target = torch.randn({size}, 3, 2)",
        *parts["batch"],
        *micro_batch,
        look if settings.look == "gradients" else "",
        *parts["gradients"],
        _CLIPS[settings.clip],
        "optimizer.step()",
        settings.zero,
        look if settings.look == "parameters" else "",
        *parts["end"],
    ]
    return [line for line in lines if line]


SETTINGS = Kind(
    "settings",
    _write,
    {
        "steps": (2, 3, 4),
        "optimizer": tuple(OPTIMIZERS),
        "loss": tuple(LOSSES),
        "accumulate": (1, 2),
        "clip": tuple(_CLIPS),
        "zero": ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "model.zero_grad()"),
        "look": ("end", "gradients", "parameters"),
        "sizes": ("same", "shrinking", "growing"),
    },
)
"""The `Kind` of the piece that has a program's settings. Every program has one."""
