"""Reads and restores the items of lists, dictionaries and sets. Methods of subclasses are not called."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from typing import Any

CONTAINERS = (OrderedDict, dict, list, set, deque)
"""The classes of containers whose items can be read and restored."""

FIXED = (tuple, frozenset)
"""The classes of containers that keep their items. The items can be read, and may change themselves."""

Items = dict[Any, Any] | list[Any]
"""The items of a dictionary with their keys, or those of another container."""


def items_of(container: Any) -> Items:
    """Return the items of a container; those of a dictionary with their keys.

    A subclass may override any method: the table of activations in transformers makes a new object for each
    item that is read. So only the methods of Python's own classes are called here.
    """
    if type(container) in (dict, OrderedDict):
        return dict(container)
    if isinstance(container, OrderedDict):
        return {key: dict.__getitem__(container, key) for key in OrderedDict.__iter__(container)}
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(_own_class(container).__iter__(container))


def has_items(container: Any, items: Items) -> bool:
    """True if a container has the same objects in the same order as before, with the same keys."""
    if type(container) in (dict, list, OrderedDict):
        if len(container) != len(items):
            return False
        if not items:
            return True
        return _identical(container, items)
    return _identical(items_of(container), items)


def restore(container: Any, items: Items) -> None:
    """Put former items back into a container, unless the container still has the same items."""
    if has_items(container, items):
        return
    own = _own_class(container)
    # By Python's own class: a subclass may refuse or record changes.
    own.clear(container)
    if isinstance(items, dict):
        for key, value in items.items():
            own.__setitem__(container, key, value)
    else:
        (own.update if own is set else own.extend)(container, items)


def _own_class(container: Any) -> Any:
    """Return the built-in class, such as `list`, that a container has or inherits from."""
    return next(own for own in (*CONTAINERS, *FIXED) if isinstance(container, own))


def _identical(now: Any, before: Any) -> bool:
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return not isinstance(before, dict) or all(map(operator.is_, now.values(), before.values()))
