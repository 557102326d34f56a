"""The modules of a model that are timed, and the wrappers around their calls while a profile is taken.

[Note: backward of a module]
Autograd numbers its nodes in the order of their creation. So the nodes of a module are those that its outputs
depend on and that were created after its call began. Each of them gets a hook that runs before the node, and
that starts to count time for the module. torch's own module hooks insert nodes into the graph; these do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any, final

import torch
from torch import nn

from headwater.core.module_calls import Layer, surround
from headwater.core.trees import tensors_in
from headwater.profiler.attribution import REST

LOSS = -2
"""The number of the row of a loss that is computed after the model."""

_NO_TASK = -1
_OF_PARAMETER = (1 << 64) - 1
"""The number of the node that accumulates the gradient of a parameter."""


def profiled_modules(model: nn.Module, stages: Iterable[str], depth: int = 1) -> dict[str, nn.Module]:
    """Return the modules with rows: the model, the modules of stages, and modules inside these.

    Args:
        model: the model.
        stages: names of the stages.
        depth: levels below the module of a stage that have rows.

    Returns:
        The modules by qualified name. Modules inside compiled code are left out.
    """
    found = {"": model}
    modules = dict(model.named_modules())
    compiled = [path for path, module in modules.items() if _is_compiled(module)]
    for stage in stages:
        for path, module in modules.items():
            inside = path == stage or path.startswith(f"{stage}." if stage else "")
            levels = path.count(".") - stage.count(".") if stage else path.count(".") + 1
            hidden = any(path.startswith(f"{outer}.") for outer in compiled)
            if path and inside and levels <= depth and not hidden:
                found[path] = module
    return found


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or hasattr(
        own.get("forward"), "_torchdynamo_orig_callable"
    )


@final
class ModuleWatch:
    """Records which module runs, in forward or backward, until `close` is called.

    Attributes:
        names: name of each row; `.fwd` and `.bwd` of each module.
        stamps: (clock, row) whenever another row begins, in order.
        calls: number of calls by row; only forwards are counted.

    Args:
        modules: the modules by qualified name; the model itself has the empty name.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names: list[str] = []
        self.stamps: list[tuple[int, int]] = []
        self.calls: Counter[int] = Counter()
        self._row = REST
        self._task = _NO_TASK
        self._claimed: set[Any] = set()
        self._inputs: list[list[Any]] = []  # for each running call: nodes of inputs of the calls inside it
        self._layers = ExitStack()
        for path, module in modules.items():
            forward = len(self.names)
            name = f"model.{path}" if path else "model"
            self.names += [f"{name}.fwd", f"{name}.bwd"]
            layer = self._layer(forward, forward + 1, after=REST if path else LOSS)
            # Outermost, so that the time for fetching its weights counts for the module.
            self._layers.callback(surround(module, layer, outermost=True))

    def _layer(self, forward: int, backward: int, after: int) -> Layer:
        begins = self._hook(backward)

        def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outer, is_backward = self._row, torch._C._current_graph_task_id() != _NO_TASK
            first = torch._C._autograd._get_sequence_nr()
            # A recomputed forward counts as backward.
            self._switch(backward if is_backward else forward)
            trains = torch.is_grad_enabled() and not is_backward
            self.calls[forward] += trains
            self._inputs.append([])
            try:
                output = call(*args, **kwargs)
            finally:
                inner = self._inputs.pop()
                self._switch(after if outer == REST and trains else outer)
            if not trains:
                # Also for a recomputed forward: its graph is not used for hooks, and its nodes would keep
                # weights in memory.
                return output
            behind = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
            inputs = self._claim([*behind, *inner], first, begins)
            if self._inputs:
                self._inputs[-1] += inputs
            return output

        return layer

    def _hook(self, row: int) -> Callable[[Any], None]:
        def hook(gradients: Any) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                # The graph is freed node by node during the backward, so nothing may keep its nodes.
                self._claimed.clear()
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._switch(row)

        return hook

    def _end_backward(self) -> None:
        self._task = _NO_TASK
        self._switch(REST)

    def _claim(self, behind: list[Any], first: int, hook: Callable[[Any], None]) -> list[Any]:
        """Register a hook on all nodes that were created since number `first`, unless they have one.

        Args:
            behind: nodes of the outputs of the module.
            first: number of the first node of the module.
            hook: called before each of the nodes runs.

        Returns:
            Nodes of the inputs of the module, which were created before its call.
        """
        inputs = []
        while behind:
            node = behind.pop()
            if node is None or node in self._claimed:
                continue
            number = node._sequence_nr()
            if number < first:
                inputs.append(node)
            elif number != _OF_PARAMETER:
                self._claimed.add(node)
                node.register_prehook(hook)
                behind += [before for before, _ in node.next_functions]
        return inputs

    def _switch(self, row: int) -> None:
        if row != self._row:
            self._row = row
            self.stamps.append((perf_counter_ns(), row))

    def end_step(self) -> None:
        """Note that a step has ended."""
        self._claimed.clear()
        self._switch(REST)

    def close(self) -> None:
        """Remove the wrappers around calls. Hooks in graphs that still exist do no harm."""
        self.end_step()
        self._layers.close()
