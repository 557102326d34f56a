"""The streamed models of this process.

The registry is shared by the process because torch's hooks are: an optimizer's step and a tensor of its state
know a parameter and its store, and find the model here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.api.streamed import StreamedModel
    from headwater.store.store import WeightStore

_model_of: weakref.WeakKeyDictionary[WeightStore, weakref.ref[StreamedModel]] = weakref.WeakKeyDictionary()
_compiled: weakref.WeakSet[StreamedModel] = weakref.WeakSet()
_kept: dict[int, StreamedModel] = {}
"""With several ranks: all models. None is ever freed, because ranks would free them at different times."""


def register(store: WeightStore, model: StreamedModel) -> None:
    """Record that `model` streams the weights of `store`.

    The model lives at least as long as the store, and thus as long as any of its parameters: an optimizer
    may outlive the module.
    """
    store.owner = model
    _model_of[store] = weakref.ref(model)
    if model.current.fabric.size > 1:
        _kept[id(model)] = model


def unregister(model: StreamedModel) -> None:
    """Forget a model that is not streamed any more."""
    _kept.pop(id(model), None)
    _compiled.discard(model)


def note_compiled(model: StreamedModel) -> None:
    """Record a model that will be streamed from its first call on."""
    _compiled.add(model)


def compiled_models() -> list[StreamedModel]:
    """Return the models that are streamed, and those that will be from their first call on, in any order."""
    return list(_compiled)


def find_model(store: WeightStore) -> StreamedModel | None:
    """Return the model whose weights are in `store`. `None` if the store does not belong to a user's loop."""
    reference = _model_of.get(store)
    return None if reference is None else reference()


def model_of(store: WeightStore) -> StreamedModel:
    """Return the model whose weights are in `store`, which a user's loop trains."""
    model = find_model(store)
    assert model is not None, "the store of a user's loop has a model"
    return model


def streamed_models() -> list[StreamedModel]:
    """Return all streamed models, in the same order on all ranks."""
    models = (reference() for reference in list(_model_of.values()))
    # Without duplicates: a model has several stores while a former one is still in use.
    return list({id(model): model for model in models if model is not None}.values())
