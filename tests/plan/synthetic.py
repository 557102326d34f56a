"""Synthetic traces: the stages and costs of a GPT, computed by arithmetic without building it."""

import functools

from headwater.core.precision import Precision
from headwater.core.stage import ParamSpec, StageSpec
from headwater.plan.step_trace import PhaseCost, StageCost, Trace


def gpt_trace(
    micro_batch_size=1, *, layers=4, hidden=64, vocabulary=512, length=32, precision="bf16", tied=True
):
    """Return a trace of an embedding, `layers` blocks and a head; a tied embedding is used twice."""
    wire = Precision(precision).wire_dtype
    tokens = micro_batch_size * length

    def stage(index, name, shapes, aliases=()):
        specs = tuple(
            ParamSpec(f"{name}.{key}", shape, dtype=Precision().wire_dtype, wire_dtype=wire, aliases=aliases)
            for key, shape in shapes.items()
        )
        return StageSpec(index, name, specs)

    def cost(index, flops, saved, wide=1):
        edge = tokens * hidden * wire.itemsize
        return StageCost(
            PhaseCost(flops),
            PhaseCost(2 * flops),
            saved_bytes=saved,
            input_bytes=edge if index else 0,
            output_bytes=edge,
            transient_bytes=edge * wide,
            recomputable=0 < index <= layers,
        )

    block = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden)}
    block |= {"down": (hidden, 4 * hidden), "norm": (2 * hidden,)}
    stages = [stage(0, "embedding", {"weight": (vocabulary, hidden)}, ("head.weight",) if tied else ())]
    stages += [stage(1 + i, f"blocks.{i}", block) for i in range(layers)]
    costs = [cost(0, 0, tokens * 8)]
    flops, saved = 24 * tokens * hidden**2, 16 * tokens * hidden * wire.itemsize
    costs += [cost(1 + i, flops, saved, wide=4) for i in range(layers)]
    head = cost(0, 2 * tokens * hidden * vocabulary, tokens * vocabulary * wire.itemsize)
    if tied:
        costs[0] = head
    else:
        stages.append(stage(layers + 1, "head", {"weight": (vocabulary, hidden), "bias": (vocabulary,)}))
        costs.append(head)
    uses = (*range(layers + 1), 0 if tied else layers + 1)
    sites = {each.name: (each.index,) for each in stages} | ({"head": (0,)} if tied else {})
    return Trace(tuple(stages), uses, tuple(costs), sites, micro_batch_size)


def gpt(**shape):
    """Return the `trace_for` of a GPT, which caches its traces."""
    return functools.cache(functools.partial(gpt_trace, **shape))
