"""The weights of a store by name, whole."""

from __future__ import annotations

from torch import Tensor

from headwater.store.store import WeightStore


class StoredWeights:
    """The weights of a store, by name of the parameter.

    Args:
        store: holds them.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.places = {
            param.name: (stage.index, index)
            for stage in store.stages
            for index, param in enumerate(stage.params)
        }

    def read(self, name: str) -> Tensor:
        """A copy of the weight."""
        return self._store.read_param(*self.places[name])

    def write(self, name: str, weight: Tensor) -> None:
        """Replace it."""
        self._store.write_param(*self.places[name], weight)

    def clear(self, name: str, kept: Tensor) -> None:
        """Set the optimizer state to zero where `kept` is false."""
        clear_state(self._store, *self.places[name], kept)


def clear_state(store: WeightStore, stage: int, param: int, kept: Tensor) -> None:
    """Set the optimizer state of one parameter to zero where `kept`, bool and of its shape, is false."""
    for state in store.rule.state_layout(store.stages[stage].params[param]):
        value = store.read_param(stage, param, state)
        store.write_param(stage, param, value.masked_fill(~kept.view(value.shape), 0), state)
