"""A user's loop trains a model whose blocks do not fit, by dividing them."""

import pytest
import torch
from tests.large_blocks import BATCH, Blocks, known_base, points  # noqa: F401

import headwater as cstorch
from headwater.core.errors import DoesNotFitError
from headwater.core.units import MIB

pytestmark = pytest.mark.usefixtures("known_base")


def losses(model, optimizer, steps):
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x, labels = points(step)
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run(backend=None):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    streamed = model if backend is None else cstorch.compile(model, backend)
    found = losses(streamed, optimizer, 3)
    weights = {
        name: param.detach().clone().as_subclass(torch.Tensor) for name, param in model.named_parameters()
    }
    return found, weights


@pytest.mark.parametrize(("host_memory", "tier"), [(120, "disk"), (140, "memory")])
def test_a_model_whose_blocks_do_not_fit_equals_plain_pytorch(host_memory, tier, tmp_path, monkeypatch):
    backend = cstorch.backend("CSX", host_memory=host_memory * MIB, disk=tmp_path, tier=tier)
    expected, weights = run()
    found, streamed = run(backend)
    assert found == expected
    for name, value in weights.items():
        assert torch.equal(streamed[name], value), name
    monkeypatch.setattr("headwater.api.retracing.divisions", lambda model, partition: iter(()))
    with pytest.raises(DoesNotFitError):
        run(backend)
