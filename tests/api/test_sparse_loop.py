"""Sparse weights in the user's loop: the documented script equals plain PyTorch on both backends."""

import functools

import pytest
import torch
from torch import nn

import headwater as cstor
from headwater.core.errors import CheckpointError, ConfigError

STEPS = 8


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3), nn.LogSoftmax(-1)
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(4, 12, generator=generator), torch.randint(3, (4,), generator=generator)


@functools.cache
def trained(kind, optimizer_name, algorithm):
    model = cstor.compile(make_model(), kind)
    loss_fn = nn.NLLLoss()
    optimizer = getattr(cstor.optim, optimizer_name)(model.parameters(), lr=0.05, fused=True)
    sparsity_optimizer = getattr(cstor.sparse, f"{algorithm}SparsityOptimizer")(
        model.named_parameters(), sparsity=0.75, schedule=3
    )

    @cstor.trace
    def training_step(inputs, targets):
        optimizer.zero_grad()
        sparsity_optimizer.apply_sparsity()
        outputs = model(inputs)
        loss = loss_fn(outputs, targets)
        loss.backward()
        optimizer.step()
        sparsity_optimizer.step()
        return loss

    @cstor.step_closure
    def note(loss):
        losses.append(loss.item())

    losses, zeros = [], []
    for inputs, targets in batches():
        note(training_step(inputs, targets))
        zeros.append(
            [(value == 0).sum().item() for name, value in model.state_dict().items() if "weight" in name]
        )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, zeros, weights, sparsity_optimizer


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("algorithm", ["Static", "SET", "RigL"])
def test_sparse_streamed_training_equals_plain(optimizer, algorithm):
    losses, zeros, weights, _ = trained("CSX", optimizer, algorithm)
    plain_losses, plain_zeros, plain_weights, _ = trained("CPU", optimizer, algorithm)
    assert losses == plain_losses
    assert zeros == plain_zeros
    assert all(torch.equal(weights[name], value) for name, value in plain_weights.items())
    # A new weight has no gradient if all weights that read its output are masked.
    masked = [180, 300, 45]
    assert all(have >= least for step in zeros for have, least in zip(step, masked, strict=True))
    assert zeros[-1] == masked or algorithm == "SET"


def test_masks_change_only_on_the_schedule():
    static, changing = (trained("CPU", "AdamW", algorithm) for algorithm in ("Static", "RigL"))
    assert static[0][:3] == changing[0][:3]  # the loss of the third step is computed before the mask changes
    assert static[0][3:] != changing[0][3:]


def test_masks_are_saved_and_loaded():
    *_, before = trained("CPU", "AdamW", "RigL")
    model = make_model()
    after = cstor.sparse.RigLSparsityOptimizer(model.named_parameters(), sparsity=0.75, schedule=3)
    after.load_state_dict(before.state_dict())
    assert after.sparsity_of("0.weight") == pytest.approx(0.75)
    assert after.state_dict()["step"] == STEPS
    other = cstor.sparse.StaticSparsityOptimizer(model.named_parameters(), 0.5, param_filter="2.weight")
    with pytest.raises(CheckpointError, match="not those of the parameters"):
        other.load_state_dict(before.state_dict())


def test_invalid_sparsity_options_are_refused():
    parameters = list(make_model().named_parameters())
    with pytest.raises(ConfigError, match="schedule"):
        cstor.sparse.RigLSparsityOptimizer(parameters, sparsity=0.9)
    with pytest.raises(ConfigError, match=r"no trainable parameter matches layers\.\*"):
        cstor.sparse.StaticSparsityOptimizer(parameters, 0.9, param_filter="layers.*")


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_a_step_that_fails_leaves_masks_and_weights_as_they_were(kind):
    model = cstor.compile(make_model(), kind)
    optimizer = cstor.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    sparsity_optimizer = cstor.sparse.RigLSparsityOptimizer(
        model.named_parameters(), sparsity=0.75, schedule=2
    )

    @cstor.trace
    def training_step(inputs, targets, fail):
        optimizer.zero_grad()
        sparsity_optimizer.apply_sparsity()
        nn.functional.nll_loss(model(inputs), targets).backward()
        optimizer.step()
        sparsity_optimizer.step()
        if fail:
            raise RuntimeError("something else")

    first, second = list(batches())[:2]
    training_step(*first, False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = sparsity_optimizer.state_dict()
    with pytest.raises(RuntimeError, match="something else"):
        training_step(*second, True)
    after = sparsity_optimizer.state_dict()
    assert after["step"] == masks["step"]
    assert all(torch.equal(after["masks"][name], bits) for name, bits in masks["masks"].items())
    if kind == "CSX":  # plain PyTorch does not undo a step
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
def test_masked_weights_stay_zero_after_dense_training(kind):
    model = cstor.compile(make_model(), kind)
    optimizer = cstor.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for number, (inputs, targets) in enumerate(batches()):
        if number == 3:
            # Only the parameters hold a reference to the sparsity optimizer.
            cstor.sparse.StaticSparsityOptimizer(model.named_parameters(), 0.75).apply_sparsity()
        optimizer.zero_grad()
        nn.functional.nll_loss(model(inputs), targets).backward()
        optimizer.step()
    assert int((model.state_dict()["2.weight"] == 0).sum()) >= 300


def test_an_optimizer_that_mixes_elements_is_refused():
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters())
    sparsity_optimizer = cstor.sparse.StaticSparsityOptimizer(model.named_parameters(), 0.75)
    sparsity_optimizer.apply_sparsity()
    model(torch.randn(2, 12)).sum().backward()
    with pytest.raises(ConfigError, match="does not update each weight by itself"):
        optimizer.step()
