"""Walks through graphs of autograd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def nodes_behind(last: Iterable[Any], first: int = 0) -> Iterator[Any]:
    """Yield each node of a graph once, beginning with its last nodes.

    Args:
        last: the last nodes.
        first: leave out nodes with a lower sequence number, and all nodes behind them. The number of the next
            node of this thread is `torch._C._autograd._get_sequence_nr()`.
    """
    # This is a loop without recursion, because graphs are deeper than Python's stack.
    seen = set(last)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < first:
            continue
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
