"""Bytes and numbers of slabs, the memory into which weights are copied for the compute device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache

from headwater.plan.belady import slab_capacity
from headwater.plan.step_trace import Trace


def sizes_in_slabs(slab_sizes: tuple[int, ...], in_place: Collection[int]) -> tuple[int, ...]:
    """Return the bytes of the weights of each stage that is copied to a slab, in the order of stages.

    Args:
        slab_sizes: bytes of the weights of each stage, which are its size class.
        in_place: the stages that need no slab.
    """
    if not in_place:
        return slab_sizes  # one tuple for the many plans of a search
    return tuple(size for stage, size in enumerate(slab_sizes) if stage not in in_place)


@lru_cache(maxsize=4096)
def pool_bytes(slab_sizes: tuple[int, ...], slabs: int) -> int:
    """Return the bytes of all slabs: those of each size class, as `slab_capacity` counts them.

    Args:
        slab_sizes: bytes of the weights of each stage that needs a slab.
        slabs: maximum number of slabs of a size class.
    """
    return sum(size * count for size, count in slab_capacity(slab_sizes, slabs).items())


def minimum_slabs(trace: Trace, ranks: int = 1) -> int:
    """Return the fewest slabs of a size class that hold all stages bound at the same time; at least two.

    Args:
        trace: the dry run.
        ranks: number of ranks that share the slabs; each may be at another place in the model.
    """
    most = 2  # one for the stage that computes, and one for the next fetch
    for site in trace.sites:
        bound = {stage for module in _enclosing(site) for stage in trace.sites.get(module, ())}
        sizes = Counter(trace.stages[stage].slab_bytes for stage in bound)
        # Divided blocks need one more: a backward that starts to recompute one has fetched a weight already.
        most = max(most, *(count + bool(trace.members) for count in sizes.values()))
    largest_class = max(Counter(stage.slab_bytes for stage in trace.stages).values())
    return max(most, min(ranks * most, largest_class))


def _enclosing(module: str) -> Iterator[str]:
    """Yield `module` and the modules that contain it, by their qualified names."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
