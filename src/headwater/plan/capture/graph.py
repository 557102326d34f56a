"""The graph of each distinct stage, or the reason why a stage has no graph."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.func import functional_call

from headwater.core.effects import effects_undone
from headwater.core.module_parameters import named_parameters_of
from headwater.core.precision import autocast
from headwater.plan.capture.export import StageFunction, export_call, quiet, serialise
from headwater.plan.capture.findings import WHOLE_FORWARD, Finding, Findings
from headwater.plan.capture.graph_source import graph_source, mark_places
from headwater.plan.capture.mlir import Lowering
from headwater.plan.capture.place import Locator, Place, first_sentence
from headwater.plan.capture.record import ModuleCall, StepRecord
from headwater.plan.tensors import fake_state

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """One graph and the modules that share it.

    Attributes:
        name: qualified name of the first module, with a number if that module has several graphs.
        modules: qualified names of the modules.
        stages: indices of the stages whose weights the modules read.
        kind: the class of the modules.
        text: the graph as Python; each operator has its module and its line in the source.
        serialised: the program as `torch.export.save` writes it; `None` if that fails. It takes a dictionary
            of weights and buffers by their names in the module, and a list of the tensors among the arguments
            of the module's forward. It returns the tensors in the result of the forward.
        mlir: the program as MLIR; `None` if that fails, or torch-mlir is not installed.
    """

    name: str
    modules: tuple[str, ...]
    stages: tuple[int, ...]
    kind: str
    text: str
    serialised: bytes | None
    mlir: str | None


@dataclasses.dataclass(frozen=True)
class Captured:
    """The graphs of a step, and what is missing in them."""

    graphs: tuple[StageGraph, ...]
    findings: tuple[Finding, ...]


def capture_stages(model: nn.Module, record: StepRecord, lowering: Lowering | None = None) -> Captured:
    """Capture the graph of each module that reads the weights of a stage. Equal graphs are captured once.

    Args:
        model: the model of `record`; it is not changed.
        record: its dry run.
        lowering: returns the MLIR of a program.

    Returns:
        The graphs and the findings.
    """
    capture = _Capture(model, record, lowering)
    with quiet():
        programs = _with_fake_state(model, record, capture.programs)
        graphs = [capture.graph(name, *rest) for name, rest in programs.items()]
    return Captured(tuple(graphs), tuple(capture.findings))


def _with_fake_state(model: nn.Module, record: StepRecord, action: Callable[[], T]) -> T:
    """Return the result of `action`, called while the model has fake weights in the precision of the run."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with effects_undone(model), mode, autocast(record.precision, "cpu"):
        state = {f"model.{name}": tensor for name, tensor in fake_state(model, record.partition).items()}
        result: T = functional_call(_Within(model, action), state, ())
        return result


class _Within(nn.Module):
    """Calls an action as the forward of a module, as `functional_call` requires."""

    def __init__(self, model: nn.Module, action: Callable[[], Any]) -> None:
        super().__init__()
        self.model = model
        self._action = action

    def forward(self) -> Any:
        return self._action()


class _Capture:
    """Captures graphs. A failure becomes a finding."""

    def __init__(self, model: nn.Module, record: StepRecord, lowering: Lowering | None) -> None:
        self._model = model
        self._record = record
        self._lowering = lowering
        self._locator = Locator(model, StageFunction.forward.__code__)
        self.findings = Findings(record.findings)

    def programs(self) -> dict[str, tuple[tuple[str, ...], ExportedProgram]]:
        """Return modules and program of each graph, by name. The model must have fake weights."""
        programs: dict[str, tuple[tuple[str, ...], ExportedProgram]] = {}
        for calls in _distinct(self._model, self._record):
            call, modules = calls[0], tuple(call.path for call in calls)
            module = self._model.get_submodule(call.path)
            program = self._attempt(
                modules, "torch.export: ", partial(export_call, module, call), captured=False
            )
            if program is not None:
                programs[_free_name(call.path, programs)] = modules, program
        return programs

    def graph(self, name: str, modules: tuple[str, ...], program: ExportedProgram) -> StageGraph:
        """Return a graph with its text and files."""
        mark_places(program, modules[0])
        lowering, readers = self._lowering, self._record.readers
        return StageGraph(
            name=name,
            modules=modules,
            stages=tuple(dict.fromkeys(stage for path in modules for stage in readers[path])),
            kind=type(self._model.get_submodule(modules[0])).__qualname__,
            text=graph_source(program),
            serialised=self._attempt(modules, "no .pt2 file: ", lambda: serialise(program)),
            mlir=lowering and self._attempt(modules, "no MLIR: ", lambda: lowering(program, name)),
        )

    def _attempt(
        self, modules: tuple[str, ...], failure: str, action: Callable[[], T], *, captured: bool = True
    ) -> T | None:
        """Return the result of `action`. If it fails or warns, add a finding."""
        start = _start_of(self._model.get_submodule(modules[0]), modules[0])
        with warnings.catch_warnings(record=True) as caught:
            # By default Python reports a warning of a line only once, but each module needs its finding.
            warnings.simplefilter("always")
            # torch 2.11 gives this warning about its own buffer when it saves a constant of the graph.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            try:
                return action()
            except Exception as error:  # noqa: BLE001  (a forward and torch.export may raise any exception)
                frames = reversed(list(traceback.walk_tb(error.__traceback__)))
                place = self._locator.find(frames) or start
                self.findings.add_failure(failure + first_sentence(error), place, modules, captured=captured)
                return None
            finally:
                for each in caught:
                    if issubclass(each.category, UserWarning):
                        # The user does not know of the `StageFunction` around the module.
                        reason = first_sentence(each.message).replace("self.stage.", "self.")
                        self.findings.add(WHOLE_FORWARD, reason, start, modules)


def _distinct(model: nn.Module, record: StepRecord) -> list[list[ModuleCall]]:
    """Return the calls in groups of equal ones, in order of first appearance."""
    groups: dict[object, dict[str, ModuleCall]] = {}
    for call in record.calls:
        module = model.get_submodule(call.path)
        params = [(name, param.shape, param.requires_grad) for name, param in named_parameters_of(module)]
        key = type(module), tuple(params), call.digest
        groups.setdefault(key, {}).setdefault(call.path, call)
    return [list(calls.values()) for calls in groups.values()]


def _free_name(path: str, taken: dict[str, Any]) -> str:
    name, number = path or "model", 1
    while name in taken:
        number += 1
        name = f"{path or 'model'}-{number}"
    return name


def _start_of(module: nn.Module, path: str) -> Place:
    """Return where the forward of a module begins, for a failure without a line."""
    code = type(module).forward.__code__
    return Place(path, code.co_filename, code.co_firstlineno)
