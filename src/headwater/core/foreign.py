"""Classes and functions that belong to Python, torch, numpy or this package, and not to the user."""

from __future__ import annotations

import argparse
import functools
import queue
import sys
import threading
from collections import UserDict, UserList
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "headwater", "builtins"}

HOLDERS = (SimpleNamespace, argparse.Namespace, UserDict, UserList, queue.Queue, threading.local)
"""Python's own classes whose objects have their state in attributes."""


def is_foreign(value: Any) -> bool:
    """True if a function or class is not the user's: it belongs to Python, torch, numpy or this package."""
    while isinstance(value, functools.partial):
        value = value.func  # a partial itself is of functools, whatever it calls
    return is_of_foreign(getattr(getattr(value, "__func__", value), "__module__", None))


def is_of_foreign(module: object) -> bool:
    """True if a Python module, by its name, is not the user's.

    Args:
        module: the attribute `__module__` of a class or function. In metaclasses written in C, as Cython's,
            it is the descriptor with which they give their classes a module.
    """
    return not isinstance(module, str | None) or (module or "").partition(".")[0] in _FOREIGN


def keeps_state(value: object) -> bool:
    """True for an object of a user's class, or of a class of Python that only holds attributes."""
    return isinstance(value, HOLDERS) or not (isinstance(value, type) or is_foreign(type(value)))


def slots_of(cls: type) -> list[MemberDescriptorType]:
    """Return the descriptors of the attributes that a class and its bases keep in `__slots__`."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base) and not is_foreign(base)]
    return [slot for base in bases for slot in vars(base).values() if isinstance(slot, MemberDescriptorType)]
