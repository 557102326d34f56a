"""Random seeds keyed by what they are for, so that neither schedule nor rank count changes them."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed that depends on `seed` and every key, and on nothing else.

    The same keys give the same seed on every machine and Python version.
    """
    text = "\x1f".join([str(seed), *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def drawing_devices() -> list[int]:
    """The CUDA device on which random numbers are drawn beside the CPU, for `torch.random.fork_rng`."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
