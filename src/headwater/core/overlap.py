"""Search for tensors that share memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Pair = tuple[str, str]


def overlapping(tensors: Mapping[str, torch.Tensor]) -> Pair | None:
    """Return the names of two of the tensors that share at least one element of memory, or `None`."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if _has_memory(tensor):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        # Sorted by address, so that the inner loop ends at the first tensor behind this one.
        names.sort(key=lambda name: tensors[name].data_ptr())
        for position, name in enumerate(names):
            for other in names[position + 1 :]:
                if tensors[other].data_ptr() >= _end(tensors[name]):
                    break
                if _share_elements(tensors[name], tensors[other]):
                    return name, other
    return None


def _has_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0


def _end(tensor: torch.Tensor) -> int:
    """Return the address of the first byte after the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two views of one storage have an element in common; `first` begins first."""
    start = first.data_ptr()
    num_bytes = max(_end(first), _end(second)) - start
    used = torch.zeros(num_bytes, dtype=torch.bool, device="cpu")
    for each, begin in ((first, 0), (second, second.data_ptr() - start)):
        size = each.element_size()
        strides = tuple(stride * size for stride in each.stride())
        # An expanded dimension repeats one element, and counts once.
        sizes = (1 if stride == 0 else extent for extent, stride in zip(each.shape, strides, strict=True))
        view = used.as_strided((*sizes, size), (*strides, 1), begin)
        if bool(view.any()):
            return True
        view.fill_(True)
    return False
