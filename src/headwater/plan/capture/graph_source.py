"""A captured graph as Python source: each operator has its module and its line in the user's source."""

from __future__ import annotations

import re

import torch
from torch.export import ExportedProgram

from headwater.plan.capture.place import NOT_THE_USERS


def mark_places(program: ExportedProgram, path: str) -> None:
    """Replace each operator's stack trace by one line: the innermost line of the user, with its module.

    torch would show the innermost line of all, without a module: for a linear layer, a line of torch.
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


def graph_source(program: ExportedProgram) -> str:
    """Return the graph as Python, with one argument on each line, without details of torch."""
    text = program.graph_module.print_readable(print_output=False)
    text = re.sub(r"\n.*aten\._assert_tensor_metadata\..*", "", text)  # each name shows its dtype
    text = re.sub(r";  (\w+ = )+None$", "", text, flags=re.MULTILINE)  # statements that only release memory
    return re.sub(r'(?<=["f]), (?=\w+: ")|(?<=self), ', ",\n            ", text)


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in .+\n\s*(?P<code>.+)')


def _shortened(trace: str, module: str) -> str:
    """Return the innermost line of a stack trace that is the user's, with `module` as its function."""
    frames = list(_FRAME.finditer(trace))
    users = [frame for frame in frames if not frame["file"].startswith(NOT_THE_USERS)]
    if not frames:
        return trace
    frame = (users or frames)[-1]
    return f'File "{frame["file"]}", line {frame["line"]}, in {module}\n    {frame["code"]}'
