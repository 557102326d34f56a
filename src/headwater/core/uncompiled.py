"""Functions that `torch.compile` neither traces nor compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

_NOT_ITSELF = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""Makes `torch.compile` skip the frame of a wrapper, and handle other frames as usual."""


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of `function` that `torch.compile` never compiles, nor what `function` calls.

    `torch.compiler.disable` does the same, but needs the compiler, which takes a second to import.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Restored below, and not set to a default: the caller may be compiled or not.
        compiler = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(compiler)

    run._torchdynamo_disable = True  # type: ignore[attr-defined] # is not traced within its caller
    code: CodeType = run.__code__  # type: ignore[attr-defined] # a function, though `wraps` does not say so
    eval_frame.set_code_exec_strategy(code, _NOT_ITSELF)
    return run
