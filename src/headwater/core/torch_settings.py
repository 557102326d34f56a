"""Settings and modes of torch that decide what the operators of a forward compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import overrides
from torch.backends import cuda, opt_einsum
from torch.utils import _python_dispatch as dispatch

_Setting = tuple[Callable[[], Any], Callable[[Any], None]]
"""Two functions: one returns the present value of a setting, the other sets it."""


def _attribute(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _precision(backend: str, operator: str) -> _Setting:
    """Return the setting for the precision of fp32 products of one kind of operator."""

    def get() -> str:
        precision: str = torch._C._get_fp32_precision_getter(backend, operator)
        return precision

    def set_precision(value: str) -> None:
        # First remove the operator's own value: without one it follows its backend, also after later changes.
        torch._C._set_fp32_precision_setter(backend, operator, "none")
        if get() != value:
            torch._C._set_fp32_precision_setter(backend, operator, value)

    return get, set_precision


_SETTINGS: tuple[_Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    *(_attribute(torch.backends.mkldnn, name) for name in ("enabled", "deterministic")),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "deterministic", "benchmark")),
    *(_attribute(opt_einsum, name) for name in ("enabled", "strategy")),
    *(_precision(backend, op) for backend in ("mkldnn", "cuda") for op in ("matmul", "conv", "rnn")),
)
"""The settings of the process. Those for one device have values on machines without the device too."""


@final
class TorchSettings:
    """A record of torch's settings and of the user's modes (`TorchFunctionMode`, `TorchDispatchMode`) now.

    A context around a forward changes these: `sdpa_kernel`, `torch.device`, `torch.backends.mkldnn.flags`.
    The backward usually runs outside of this context.
    """

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]
        self._function_modes = overrides._get_current_function_mode_stack()
        self._dispatch_modes = _users(dispatch._get_current_dispatch_mode_stack())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter a context with the recorded settings and modes. Those before are restored at the end."""
        with ExitStack() as stack:
            for (get, set_value), value in zip(_SETTINGS, self._values, strict=True):
                if (present := get()) != value:
                    stack.callback(set_value, present)
                    set_value(value)
            self._enter_dispatch_modes(stack)
            self._enter_function_modes(stack)
            yield

    def _enter_function_modes(self, stack: ExitStack) -> None:
        present = overrides._get_current_function_mode_stack()
        if not _are_same(present, self._function_modes):
            _pop(present, overrides._pop_mode)
            stack.callback(_push, present, overrides._push_mode)
            _push(self._function_modes, overrides._push_mode)
            stack.callback(_pop, self._function_modes, overrides._pop_mode)

    def _enter_dispatch_modes(self, stack: ExitStack) -> None:
        present = dispatch._get_current_dispatch_mode_stack()
        users = _users(present)
        if not _are_same(users, self._dispatch_modes):
            wanted = [*self._dispatch_modes, *(mode for mode in present if mode not in users)]
            _pop(present, dispatch._pop_mode)
            stack.callback(_push, present, dispatch._push_mode)
            _push(wanted, dispatch._push_mode)
            stack.callback(_pop, wanted, dispatch._pop_mode)


def has_dispatch_mode() -> bool:
    """True inside a `TorchDispatchMode` of the user, which may change the results of all operators."""
    return bool(_users(dispatch._get_current_dispatch_mode_stack()))


def _users(modes: Sequence[Any]) -> list[Any]:
    """Return the dispatch modes that are not those of a dry run or of this package."""
    return [
        mode
        for mode in modes
        if getattr(mode, "_mode_key", None) is None and type(mode).__module__.partition(".")[0] != "headwater"
    ]


def _are_same(modes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(modes) == len(others) and all(mode is other for mode, other in zip(modes, others, strict=True))


def _push(modes: Sequence[Any], push: Callable[[Any], Any]) -> None:
    for mode in modes:
        push(mode)


def _pop(modes: Sequence[Any], pop: Callable[[], Any]) -> None:
    for _ in modes:
        pop()
