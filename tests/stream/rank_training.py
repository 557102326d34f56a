"""A small model, and its training on several ranks, each with its part of every batch."""

import torch
from harness import SEED, Job
from torch import nn

from headwater.plan.partition import find_stages
from headwater.plan.step_trace import StageCost, Trace
from headwater.plan.types import Activations, Plan
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions

VOCABULARY, WIDTH = 50, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.chosen(tokens):
            x = block(x)
        return self.head(x)

    def chosen(self, tokens):
        return self.blocks


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(0, VOCABULARY, (4, 9), generator=generator)


def plan_of(precision, micro_batches, net=Net):
    """Return a plan with weights in place in memory; each stage is read in the module of its name."""
    stages = find_stages(net(), precision).stages
    nothing = StageCost(saved_bytes=1)
    trace = Trace(
        stages,
        uses=tuple(range(len(stages))),
        costs=(nothing,) * len(stages),
        sites={stage.name: (stage.index,) for stage in stages},
        micro_batch_size=2,
    )
    return Plan(
        trace,
        precision,
        device="cpu",
        tier="memory",
        in_place=True,
        slabs=len(stages),
        activations=(Activations.KEEP,) * len(stages),
        micro_batch_size=2,
        num_micro_batches=micro_batches,
        gradient_tier="memory",
    )


def nothing_beside(engine):
    """Return two functions that do nothing, to be called before each update and after each step."""
    return lambda update: None, lambda step: None


def train(
    fabric,
    plan,
    micro_batches,
    net=Net,
    make_batch=None,
    read=None,
    beside=nothing_beside,
    max_norm=0.5,
    **options,
):
    """Return losses and norms, the results of an evaluation after each step, and the final weights.

    A store rank does not evaluate.

    Args:
        fabric: the ranks.
        plan: the plan for the micro-batch of one rank.
        micro_batches: the number of micro-batches of each rank.
        net: makes the model.
        make_batch: returns the batch of a step and micro-batch; by default this rank's part of `tokens`.
        read: returns the weights of an engine; the default is `wire`.
        beside: returns two functions for an engine: one to call before each update, one after each step.
        max_norm: the norm to which gradients are clipped, or `None`.
        options: fields of `EngineOptions`.
    """

    def part(step, index):
        return tokens(step, index).chunk(fabric.num_csx)[fabric.rank] if fabric.computes else None

    work, told = Job(net, make_batch or part, loss_of, micro_batches=micro_batches, max_norm=max_norm), []
    with Engine(
        work.model(),
        plan,
        work.optimizer,
        seed=SEED,
        loss_function=loss_of,
        fabric=fabric,
        options=EngineOptions(**options),
    ) as engine:
        amend, after_step = beside(engine)
        for step in range(3):
            report = engine.train_step(work.batches(step), work.update(step), amend)
            after_step(step)
            loss = float(engine.evaluate(tokens(99, 0))) if fabric.computes else None
            told.append((report.loss, report.gradient_norm, loss))
        weights = {name: value.detach().float().numpy() for name, value in (read or wire)(engine)}
        fabric.barrier("the weights to be read")
    return told, weights


def wire(engine):
    """Return all weights in memory, in their wire dtype."""
    engine.store.flush()
    return [
        (spec.name, value.clone())
        for stage in engine.store.stages
        for spec, value in zip(
            stage.params, stage.views(engine.store.tier.resident_wire(stage.index)), strict=True
        )
    ]


def masters(engine):
    """Return all masters on rank 0, and nothing on other ranks."""
    return engine.named_masters() if engine.fabric.rank == 0 else []
