"""The catalogue of architectures: every one trains in plain PyTorch, and some are compared under a plan.

All are compared by `python -m benchmarks.architectures`.
"""

import pytest
import torch
from benchmarks.architectures import others, sequence, vision  # noqa: F401 they fill the list
from benchmarks.architectures.catalogue import ARCHITECTURES, Architecture, vectors
from benchmarks.architectures.compare import compare
from benchmarks.architectures.page import page
from torch import nn

from headwater.conform.subject import seed_all, subject_of

BY_NAME = {each.name: each for each in ARCHITECTURES}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_catalogue_has_sixty_architectures_of_many_families():
    assert len(BY_NAME) == len(ARCHITECTURES) >= 60
    assert len({each.family for each in ARCHITECTURES}) >= 12


@pytest.mark.filterwarnings("ignore")  # of torch, about sparse tensors and empty layers
@pytest.mark.parametrize("name", BY_NAME)
def test_an_architecture_trains_in_plain_pytorch(name):
    seed_all(0)
    subject = subject_of(BY_NAME[name].make())
    optimizer = subject.optimizer(subject.model)
    loss = subject.loss(subject.model, subject.batches[0])
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert any(parameter.grad is not None for parameter in subject.model.parameters())


@pytest.mark.parametrize("name", ["Graph attention", "Spectral norm (power iteration in buffers)"])
def test_an_architecture_is_equal_on_disk(name):
    row = compare(BY_NAME[name], ["disk_recompute"])
    assert row.equal, row.reasons
    assert f"| {name} |" in page([row], ["disk_recompute"])


def test_a_model_that_fails_in_plain_pytorch_is_a_row_with_the_reason():
    def make():
        def optimizer(parameters):
            raise RuntimeError("no optimizer for these")

        return nn.Linear(8, 8), vectors(), None, optimizer

    row = compare(Architecture("Any", "any", make), ["disk_recompute"])
    assert not row.equal
    assert "| Any | plain | failed: RuntimeError: no optimizer for these |" in page([row], ["disk_recompute"])
