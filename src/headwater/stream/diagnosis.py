"""A search for the first stage whose output is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from headwater.core.stage import StageSpec
from headwater.core.trees import tensors_in


def first_non_finite_stage(
    model: nn.Module, stages: Sequence[StageSpec], forward: Callable[[], object]
) -> str | None:
    """Run `forward` again and return the name of the first stage with a non-finite output, or `None`.

    Args:
        model: the model.
        stages: its stages.
        forward: runs the forward of the model.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = tensors_in(output)
            # Indices and masks are always finite.
            if any(t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors):
                found.append(name)

        return hook

    handles = [model.get_submodule(s.name).register_forward_hook(watch(s.name)) for s in stages if s.name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
