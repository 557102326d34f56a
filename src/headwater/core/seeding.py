"""Random seeds keyed by what they are for, so that neither schedule nor rank count changes them."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed that depends on `seed` and every key, and on nothing else.

    The same keys give the same seed on every machine and Python version.
    """
    text = "\x1f".join([str(seed), *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
