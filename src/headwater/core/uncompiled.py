"""Functions that `torch.compile` neither traces nor compiles, and a context without its compiler."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

_NOT_ITSELF = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""Makes `torch.compile` skip the frame of a wrapper, and handle other frames as usual."""

_NOT_AT_ALL = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


_STREAMED = (
    "the weights of this model are streamed by headwater; record a copy of it, for example "
    "torch.export.export(copy.deepcopy(model), ...)"
)
"""Why functions that read streamed weights are not traced."""


class CompilerOffWarning(UserWarning):
    """A `torch.compile` of the user has no effect on a part of a streamed model."""


def uncompiled(
    function: Callable[P, R], *, if_compiled: Callable[P, None] | None = None, reason: str = _STREAMED
) -> Callable[P, R]:
    """Return a wrapper of `function` that `torch.compile` never compiles, nor what `function` calls.

    `torch.compiler.disable` does the same, but needs the compiler, which takes a second to import.

    Args:
        function: the function.
        if_compiled: is called before `function`, with the same arguments, if the caller is compiled.
        reason: what torch's compiler says if it must trace the function, as `torch.export` does.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Restored below, and not set to a default: the caller may be compiled or not.
        compiler = eval_frame.set_eval_frame(None)
        try:
            if if_compiled is not None and callable(compiler):
                if_compiled(*args, **kwargs)
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(compiler)

    run._torchdynamo_disable = True  # type: ignore[attr-defined] # is not traced within its caller
    run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    code: CodeType = run.__code__  # type: ignore[attr-defined] # a function, though `wraps` does not say so
    eval_frame.set_code_exec_strategy(code, _NOT_ITSELF)
    return run


def never_compile(function: Callable[..., Any]) -> None:
    """Make `torch.compile` skip a function from now on, and all functions that it calls.

    Args:
        function: a function of Python. If it is a wrapper made with `functools.wraps`, the innermost function
            is skipped.
    """
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        eval_frame.set_code_exec_strategy(code, _NOT_AT_ALL)


@contextmanager
def compiler_off() -> Iterator[None]:
    """Run functions that the user has compiled with `torch.compile` eagerly inside the context.

    If torch meets a compiled function while a dispatch mode is active, it runs the function eagerly from then
    on. So without this context, a dry run would turn off the user's compiler for the rest of the process.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
