"""Tensors that claim to be on a GPU, on a machine without one: operations of GPU and CPU tensors do not mix.

In the context `fake_cuda()` tensors are created on the device `cuda` or `meta`, and copied to it, where they
have values: in host memory. An operator gets all its tensors from one device, or raises the error of torch.
Without support for CUDA, torch itself takes these tensors for tensors of the device `meta`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, META = torch.device("cuda", 0), torch.device("meta")


class OnFakeCuda(torch.Tensor):
    """A tensor whose device is `cuda:0`.

    Attributes:
        values: the same tensor in host memory.
    """

    values: torch.Tensor
    device = CUDA
    is_cuda, is_meta = True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=META,
        )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self):
        return self.values.tolist()

    def __repr__(self, *, tensor_contents=None):
        return f"on a fake GPU: {self.values!r}"


def _run(func, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
        return _copied(func, args, kwargs)
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnFakeCuda)]
    if on_gpu and any(not isinstance(tensor, OnFakeCuda) and tensor.dim() for tensor in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu, in {func}"
        )
    device = kwargs.get("device")
    here = kwargs if device is None else {**kwargs, "device": torch.device("cpu")}
    results = func(*tree_map_only(OnFakeCuda, _values, args), **tree_map_only(OnFakeCuda, _values, here))
    to_gpu = _is_gpu(device) if device is not None else bool(on_gpu)
    if not to_gpu:
        return results
    same = {id(tensor.values): tensor for tensor in on_gpu}
    return tree_map_only(
        torch.Tensor,
        lambda tensor: same[id(tensor)] if id(tensor) in same else OnFakeCuda(tensor),
        results,
    )


def _copied(func, args, kwargs):
    if func is torch.ops.aten.copy_.default:
        target, source = args[:2]
        _values(target).copy_(_values(source))
        return target
    here = {**kwargs, "device": torch.device("cpu")}
    copy = func(_values(args[0]), **here)
    return OnFakeCuda(copy) if _is_gpu(kwargs.get("device") or args[0].device) else copy


def _is_gpu(device):
    return torch.device(device).type in ("cuda", "meta")


def _values(tensor):
    return tensor.values if isinstance(tensor, OnFakeCuda) else tensor


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is not OnFakeCuda and hasattr(kind, "__torch_dispatch__"):
                with self:  # the operators that this class runs may create tensors on the GPU, too
                    return kind.__torch_dispatch__(func, types, args, kwargs)
        return _run(func, args, kwargs)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Enter a context in which tensors can be created on, and copied to, a GPU that does not exist."""
    with pytest.MonkeyPatch.context() as patch, _Factories():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # torch calls it for any tensor of the device
        yield
