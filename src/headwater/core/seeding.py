"""Random seeds keyed by their purpose, so that neither schedule nor rank count changes them."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed that depends on `seed` and every key, and on nothing else.

    It is the same on every machine and Python version.
    """
    text = "\x1f".join([str(seed), *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def drawing_devices() -> list[int]:
    """Return the current CUDA device in a list, or [] if CUDA is not in use; for `torch.random.fork_rng`."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
