"""The registry finds the streamed model of a store."""

import torch
from torch import nn

import headwater as hw
from headwater.api import registry
from headwater.api.compile import streamed


def called():
    model = hw.compile(nn.Linear(2, 2), hw.backend("CSX", tier="memory"))
    model(torch.ones(1, 2))
    return model


def test_models_are_found_by_their_stores_in_the_order_of_their_first_calls():
    models = [called() for _ in range(3)]
    streams = [streamed(model) for model in models]
    assert [registry.model_of(stream.engine.store) for stream in streams] == streams
    assert [each for each in registry.streamed_models() if each in streams] == streams
    stores = [stream.engine.store for stream in streams]
    for model in models:
        hw.release(model)
    assert stores[0].owner is streams[0]


def test_a_model_with_a_new_store_is_listed_once():
    model = called()
    stream = streamed(model)
    first = stream.engine.store
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.Adam(model.parameters()).step()  # needs other state
    assert stream.engine.store is not first
    assert registry.streamed_models().count(stream) == 1
    hw.release(model)
