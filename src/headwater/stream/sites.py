"""Hooks around the forwards of modules that read weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from headwater.core.module_calls import Layer, surround
from headwater.core.stage import StageSpec

Stages = Sequence[int]


class Sites:
    """The hooks of a model: they call `enter` before the forward of a module and `leave` after it.

    `leave` is called also if the forward raises an error. The user's hooks run in between.

    Args:
        model: the model.
        sites: qualified module name -> stages read while that module's forward runs.
        stages: all stages.
        enter: called with these stages before the forward.
        bind_early: called after `enter` if a module reads attributes of weights before its layers run.
        leave: called with the stages after the forward.
        left: called after `leave` with the stages, the output of the forward, and the sequence number of the
            first node of its graph, but not if the forward has raised an error; `None` if it is not needed.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, Stages],
        stages: Sequence[StageSpec],
        enter: Callable[[Stages], None],
        bind_early: Callable[[Stages], None],
        leave: Callable[[Stages], None],
        left: Callable[[Stages, Any, int], None] | None,
    ) -> None:
        with ExitStack() as layers:  # a layer that cannot be made must not leave the others behind
            for path, own in sites.items():
                layers.callback(surround(model.get_submodule(path), _around(own, enter, leave, left)))
            for path, module in model.named_modules():
                if isinstance(module, nn.TransformerEncoder):
                    ahead = _of_first_layer(path, stages)
                    layer = _ahead_of(module, ahead, enter, bind_early, leave)
                    layers.callback(surround(module, layer))
            self._layers = layers.pop_all()

    def remove(self) -> None:
        """Remove all hooks."""
        self._layers.close()


def _around(
    stages: Stages,
    enter: Callable[[Stages], None],
    leave: Callable[[Stages], None],
    left: Callable[[Stages, Any, int], None] | None,
) -> Layer:
    def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = torch._C._autograd._get_sequence_nr()
        enter(stages)
        try:
            output = call(*args, **kwargs)
        finally:
            leave(stages)
        if stages and left is not None:
            left(stages, output, first)
        return output

    return layer


def _ahead_of(
    encoder: nn.TransformerEncoder,
    stages: Stages,
    enter: Callable[[Stages], None],
    bind_early: Callable[[Stages], None],
    leave: Callable[[Stages], None],
) -> Layer:
    """Return a hook that binds the weights of an encoder's first layer before the encoder's own forward.

    In evaluation torch's encoder uses a fast path, with zeros at padded positions, only if these weights are
    plain tensors.
    """

    def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enter(())
        try:
            if not encoder.training:
                bind_early(stages)
            return call(*args, **kwargs)
        finally:
            leave(())

    return layer


def _of_first_layer(path: str, stages: Sequence[StageSpec]) -> tuple[int, ...]:
    """Return the stages that hold parameters of the first layer of the encoder called `path`."""
    prefix = f"{path}.layers.0." if path else "layers.0."
    return tuple(
        stage.index
        for stage in stages
        if any(name.startswith(prefix) for param in stage.params for name in (param.name, *param.aliases))
    )
