"""Places in the user's code: the module whose method runs, and the line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from headwater.core import module_calls
from headwater.plan.recipes import APPLY

NOT_THE_USERS = tuple(
    f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent, module_calls.__file__)
)
"""Folders of torch, of the dry run and of `core`: a line in one of their files is not the user's code."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the user's model or code at which an operator ran.

    Attributes:
        module: qualified name of the innermost module whose method runs, empty for the model itself; `None`
            outside the model, in a loss function for example.
        file: source file of the innermost line that is not torch's own.
        line: its number, from 1.
        function: name of the custom autograd function that runs there, if one does.
        tensors: tensors among the arguments of the module's method, as `x float32[4, 8]`.
    """

    module: str | None
    file: str
    line: int
    function: str | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{module_text(self.module)}, {self.file}:{self.line}"


def module_text(path: str | None) -> str:
    """Return the name of a module for messages."""
    if path is None:
        return "outside the model"
    return f"module {path}" if path else "the model itself"


def tensor_text(tensor: torch.Tensor) -> str:
    """Return dtype and shape: `float32[4, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Locator:
    """Finds places in the code of one model.

    Args:
        model: the model.
        boundary: code of the function that calls the user's code. Its frame and its callers are ignored.
    """

    def __init__(self, model: nn.Module, boundary: CodeType) -> None:
        # A module is recognized by its `__dict__`: torch.export calls forward on a proxy that shares it.
        self._paths = {id(vars(module)): path for path, module in model.named_modules()}
        self._boundary = boundary

    def find(self, frames: Iterable[tuple[FrameType, int]]) -> Place | None:
        """Return the innermost place of `frames` in the user's code; `None` if no frame is the user's."""
        user: tuple[str, int] | None = None
        function: str | None = None
        module: tuple[str, FrameType] | None = None
        for frame, line in frames:
            code = frame.f_code
            if code is self._boundary:
                break
            if code is APPLY:  # report the line that applies the function, not a line within it
                function, user = frame.f_locals["cls"].__qualname__, None
            elif user is None and not code.co_filename.startswith(NOT_THE_USERS):
                user = code.co_filename, line
            if module is None and code.co_varnames[:1] == ("self",):
                path = self._path(frame.f_locals.get("self"))
                module = None if path is None else (path, frame)
            if user is not None and module is not None:
                return Place(module[0], *user, function, _argument_texts(module[1]))
        return None if user is None else Place(None, *user, function)

    def _path(self, candidate: Any) -> str | None:
        return self._paths.get(id(getattr(candidate, "__dict__", None)))


def _argument_texts(frame: FrameType) -> tuple[str, ...]:
    code, found = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return tuple(
        f"{name} {tensor_text(found[name])}" for name in names if isinstance(found.get(name), torch.Tensor)
    )


def first_sentence(message: object) -> str:
    """Return the first sentence of an error of torch. The rest is advice that does not apply here."""
    return str(message).strip().split("\n")[0].split(". ")[0].rstrip(".")
