"""The captured graph of each distinct stage: `torch.export` on fake tensors, with the weights as arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call

from headwater.plan.capture.place import NOT_THE_USERS, Locator, Place
from headwater.plan.capture.record import Finding, ModuleCall, StepRecord
from headwater.plan.capture.tensors import list_tensors, map_tensors
from headwater.plan.trace import autocast, fake_state

_LOUD = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers of torch that tell of what ends in an exception all the same."""


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """One graph and the modules that share it.

    Attributes:
        modules: their qualified names.
        stages: indices of the stages whose weights they read.
        kind: their class.
        program: takes a dictionary of weights and buffers by their names in the module, and a list of the
            tensors among the arguments of the module's forward; gives the tensors in its result.
        text: the graph as Python, each operator with the module and the line it comes from.
    """

    modules: tuple[str, ...]
    stages: tuple[int, ...]
    kind: str
    program: ExportedProgram
    text: str


@dataclasses.dataclass(frozen=True)
class Captured:
    """The graphs of a step, and what they do not hold."""

    graphs: tuple[StageGraph, ...]
    findings: tuple[Finding, ...]


def capture_stages(model: nn.Module, record: StepRecord) -> Captured:
    """Capture the graph of each stage that has a module of its own, equal ones once.

    Args:
        model: the model that `record` is of; nothing of it is changed.
        record: its dry run.
    """
    findings = list(record.findings)
    graphs = []

    def capture_all() -> None:
        for calls in _distinct(model, record):
            graph = _capture(model, record, calls, findings)
            if graph is not None:
                graphs.append(graph)

    with FakeTensorMode(allow_non_fake_inputs=True), autocast(record.precision, "cpu"), _quiet():
        state = fake_state(model, record.partition)
        functional_call(_Within(model, capture_all), {f"model.{k}": v for k, v in state.items()}, ())
    return Captured(tuple(graphs), tuple(findings))


class _Within(nn.Module):
    """Does something while the model holds other weights."""

    def __init__(self, model: nn.Module, action: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self._action = action

    def forward(self) -> None:
        self._action()


def _distinct(model: nn.Module, record: StepRecord) -> list[list[ModuleCall]]:
    """Calls in groups of equal ones, in order of first appearance."""
    groups: dict[object, dict[str, ModuleCall]] = {}
    for call in record.calls:
        module = model.get_submodule(call.path)
        params = [(name, param.shape, param.requires_grad) for name, param in module.named_parameters()]
        key = type(module), tuple(params), call.digest
        groups.setdefault(key, {}).setdefault(call.path, call)
    return [list(calls.values()) for calls in groups.values()]


class _StageFunction(nn.Module):
    """A stage as a function of its weights and of the tensors that it is called with."""

    def __init__(self, stage: nn.Module, call: ModuleCall, names: Mapping[str, str]) -> None:
        super().__init__()
        self.stage = stage
        self._call = call
        self._names = names

    def forward(self, weights: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors = iter(inputs)
        args, kwargs = map_tensors(lambda _: next(tensors), (self._call.args, self._call.kwargs))
        state = {name: weights[first] for name, first in self._names.items()}
        return list_tensors(functional_call(self.stage, state, args, kwargs))


def _capture(
    model: nn.Module, record: StepRecord, calls: list[ModuleCall], findings: list[Finding]
) -> StageGraph | None:
    """The graph of equal calls; what it cannot hold is added to `findings`."""
    paths = tuple(call.path for call in calls)
    module = model.get_submodule(paths[0])
    locator = Locator(model, _StageFunction.forward.__code__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program = _export(module, calls[0])
        except Exception as error:  # noqa: BLE001  a forward may raise anything, and torch.export may too
            frames = reversed(list(traceback.walk_tb(error.__traceback__)))
            place = locator.find(frames) or _start_of(module, paths[0])
            _add_failure(findings, _first_line(str(error)), place, paths)
            return None
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            place = _start_of(module, paths[0])
            findings.append(Finding("forward", _first_line(str(warning.message)), True, place, paths))
    _mark_places(program, paths[0])
    stages = dict.fromkeys(stage for path in paths for stage in record.trace.sites[path])
    return StageGraph(paths, tuple(stages), type(module).__qualname__, program, _text(program))


def _export(module: nn.Module, call: ModuleCall) -> ExportedProgram:
    """The graph of one call of a module whose parameters are fake."""
    state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    firsts: dict[int, str] = {}
    names = {name: firsts.setdefault(id(tensor), name) for name, tensor in state}
    weights = {name: tensor for name, tensor in state if names[name] == name}
    inputs = [_fresh(tensor) for tensor in list_tensors((call.args, call.kwargs))]
    function = _StageFunction(module, call, names)
    with _without_state(module):
        return torch.export.export(function, (weights, inputs), strict=False)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
    )


@contextlib.contextmanager
def _without_state(module: nn.Module) -> Iterator[None]:
    """Within it no tensor is registered in `module`, so that weights can only be arguments."""
    holders = [holder for inner in module.modules() for holder in (inner._parameters, inner._buffers)]
    before = [dict(holder) for holder in holders]
    try:
        for holder in holders:
            holder.update(dict.fromkeys(holder))
        yield
    finally:
        for holder, tensors in zip(holders, before, strict=True):
            holder.update(tensors)


def _mark_places(program: ExportedProgram, path: str) -> None:
    """Let each operator's stack trace be the line that called it, with the module in place of a function.

    torch shows the innermost line and no module: for a linear layer that is a line of torch.
    """
    for graph_module in program.graph_module.modules():
        assert isinstance(graph_module, torch.fx.GraphModule), "graphs hold graphs"
        for node in graph_module.graph.nodes:
            trace = node.meta.get("stack_trace")
            if trace:
                node.meta["stack_trace"] = _shortened(trace, _module_of(node, path))
        graph_module.recompile()


def _module_of(node: torch.fx.Node, path: str) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    inner = stack[-1][0].removeprefix("stage").removeprefix(".") if stack else ""
    return ".".join(part for part in (path, inner) if part) or "(model)"


def _text(program: ExportedProgram) -> str:
    """The graph as Python: an argument a line, without what has no meaning to a reader."""
    text = program.graph_module.print_readable(print_output=False)
    text = re.sub(r"\n.*aten\._assert_tensor_metadata\..*", "", text)  # dtypes stand beside each name
    text = re.sub(r";  (\w+ = )+None$", "", text, flags=re.MULTILINE)  # when memory is released
    return re.sub(r'(?<=["f]), (?=\w+: ")|(?<=self), ', ",\n            ", text)


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in .+\n\s*(?P<code>.+)')


def _shortened(trace: str, module: str) -> str:
    """The innermost line of a stack trace that is the user's, said to be in `module`."""
    frames = list(_FRAME.finditer(trace))
    users = [frame for frame in frames if not frame["file"].startswith(NOT_THE_USERS)]
    if not frames:
        return trace
    frame = (users or frames)[-1]
    return f'File "{frame["file"]}", line {frame["line"]}, in {module}\n    {frame["code"]}'


def _add_failure(findings: list[Finding], story: str, place: Place, paths: tuple[str, ...]) -> None:
    """Note that a stage has no graph; where an operator in that line was found before, it is the reason."""
    problem = f"the stage has no graph: {story}"
    known = [
        i
        for i, found in enumerate(findings)
        if (found.place.file, found.place.line) == (place.file, place.line)
    ]
    if not known:
        findings.append(Finding("forward", problem, False, place, paths))
    for index in known:
        before = findings[index]
        problem = f"{before.problem}; {problem}"
        findings[index] = dataclasses.replace(before, problem=problem, captured=False)


def _start_of(module: nn.Module, path: str) -> Place:
    """Where the forward of a module begins, for what has no line of its own."""
    code = type(module).forward.__code__
    return Place(path, code.co_filename, code.co_firstlineno)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing what it raises, too."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
