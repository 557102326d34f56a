"""The backward of a dry run, which stays inside the graph that the dry run has recorded.

[Note: graphs from outside]
A forward may use a tensor that was computed before its call: the weight that `prune` has set, or a hidden
state that the last call has left. Such a tensor has a graph. A graph can be used by one backward only, which
must be the user's. Its leaves are the user's tensors, whose gradients a dry run must not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from headwater.core.errors import StreamError
from headwater.core.graphs import nodes_behind

_REENTRANT = "CheckpointFunctionBackward"
"""Name of the node of `checkpoint(..., use_reentrant=True)`, which refuses `backward(inputs=...)`."""


@final
class OwnGraph:
    """The autograd graph that a dry run records. It begins when this object is made.

    Args:
        leaves: parameters and buffers of the dry run.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._leaves = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
        self._start: int = torch._C._autograd._get_sequence_nr()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of a loss, but only inside the recorded graph; see [Note: graphs from outside].

        Raises:
            StreamError: if the forward uses a graph from outside and a reentrant checkpoint.
        """
        nodes = [] if loss.grad_fn is None else list(nodes_behind([loss.grad_fn]))
        is_reentrant = any(node.name() == _REENTRANT for node in nodes)
        uses_graph = any(self._is_older(node) for node in nodes)
        if is_reentrant and uses_graph:
            raise StreamError(
                "the forward has a reentrant checkpoint, and uses a tensor whose graph was recorded before "
                "the call; the dry run would free that graph, which your own backward needs",
                where="torch.utils.checkpoint",
                remedy="pass use_reentrant=False to the checkpoint",
            )
        if is_reentrant or not (uses_graph or any(map(self._is_foreign_leaf, nodes))):
            loss.backward()
        elif self._leaves:  # torch refuses an empty list of inputs
            torch.autograd.backward(loss, inputs=list(self._leaves.values()))

    def _is_older(self, node: Any) -> bool:
        """True if a node was recorded before the dry run began."""
        return not hasattr(node, "variable") and node._sequence_nr() < self._start

    def _is_foreign_leaf(self, node: Any) -> bool:
        """True if a node adds to the gradient of a tensor that the dry run has not made."""
        leaf = getattr(node, "variable", None)
        return leaf is not None and id(leaf) not in self._leaves and not isinstance(leaf, FakeTensor)
