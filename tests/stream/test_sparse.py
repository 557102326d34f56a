"""Sparse training of streamed weights against torch's pruning and against plain loops."""

import math

import pytest
import torch
from harness import ADAMW, SEED, Job, Setting, make_engine
from torch import nn
from torch.nn.utils import prune

from headwater.core.seeding import derive_seed
from headwater.optim.spec import OptimizerSpec
from headwater.sparsity.schedules import Cadence, Constant, Cosine, Cubic
from headwater.sparsity.sparsifier import Part, Sparsifier, Sparsity
from headwater.store.named import keys_by_name
from headwater.trainer.sparse import SparseTraining

STEPS = 6
MOMENTUM = OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})


def _batch(step, index):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + index))


def make_job(optimizer=ADAMW):
    def make():
        layers = (nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
        return nn.Sequential(*layers)

    return Job(make, _batch, lambda model, x: model(x).square().mean(), optimizer, micro_batches=2)


def weights_of(engine):
    return {name: value.clone() for name, value in engine.named_masters()}


def train_streamed(job, setting, folder, groups, parts=None):
    """Return losses, norms, weights, masks and the sparsifier of a streamed run."""
    losses, norms = [], []
    with make_engine(job, setting, folder) as engine:
        shapes = {name: value.shape for name, value in engine.named_masters()}
        sparsifier = Sparsifier(groups, shapes, parts=parts, seed=SEED)
        sparse = SparseTraining(sparsifier, engine.store)
        sparse.begin()
        first = {name: sparsifier.mask_of(name) for name in sparsifier.names}
        assert all(torch.equal(weights_of(engine)[name] != 0, mask) for name, mask in first.items())
        for step in range(STEPS):
            update = job.update(step)
            report = engine.train_step(job.batches(step), update, lambda u: sparse.before_update(u.step + 1))
            losses.append(report.loss)
            norms.append(report.gradient_norm)
        weights = weights_of(engine)
    return losses, norms, weights, first


def train_plain(job, model, amend):
    """Return the same for plain PyTorch; `amend` is called before each step of the optimizer."""
    optimizer = job.optimizer.build(job.optimizer.groups(model.named_parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for index, batch in enumerate(job.batches(step)):
            torch.manual_seed(derive_seed(SEED, "micro_batch", step, index))
            loss = job.loss(model, batch)
            total += loss.item()
            (loss / 2).backward()
        amend(step + 1, optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)))
        for group in optimizer.param_groups:
            group["lr"] = job.optimizer.kwargs["lr"] / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / 2)
    return losses, norms


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["AdamW", "momentum"])
def test_a_static_mask_equals_the_pruning_of_torch(setting, optimizer, tmp_path):
    job = make_job(optimizer)
    group = Sparsity(Constant(0.75), param_filter=("*.weight",))
    losses, norms, weights, masks = train_streamed(job, setting, tmp_path, [group])
    model = job.model()
    for name, mask in masks.items():
        assert 1 - mask.double().mean() == pytest.approx(0.75)
        prune.custom_from_mask(model.get_submodule(name.rpartition(".")[0]), "weight", mask)
    expected_losses, expected_norms = train_plain(job, model, lambda step, optimizer: None)
    assert losses == expected_losses
    assert norms == pytest.approx(expected_norms, rel=1e-6)  # torch lists the parameters in another order
    for name in masks:
        ours, layer = weights[name], model.get_submodule(name.rpartition(".")[0])
        torch.testing.assert_close(ours, layer.weight_orig * layer.weight_mask, rtol=1e-5, atol=1e-7)
        assert torch.equal(ours == 0, ~masks[name])


def rigl(model, masks, freq, fraction):
    """Apply RigL as in its paper (arXiv:1911.11134) to the flattened weights of a plain model."""

    def amend(step, optimizer):
        for name, parameter in model.named_parameters():
            if name not in masks:
                continue
            mask = masks[name].view(-1)
            weight, gradient = parameter.data.view(-1), parameter.grad.view(-1)
            if step % freq == 0:
                active = int(mask.sum())
                count = min(round(fraction(step) * active), len(mask) - active)
                present = mask.nonzero().view(-1)
                order = weight[present].abs().argsort()
                kept = torch.zeros_like(mask)
                kept[present[order[count:]]] = True
                absent = (~kept).nonzero().view(-1)
                grown = absent[gradient[absent].abs().argsort(descending=True)[:count]]
                before = mask.clone()
                mask.copy_(kept)
                mask[grown] = True
                weight[~mask] = 0
                for value in optimizer.state.get(parameter, {}).values():
                    if value.dim():
                        value.view(-1)[~(before & mask)] = 0
            gradient[~mask] = 0

    return amend


@pytest.mark.parametrize("setting", [Setting("memory", 2), Setting("disk", 2, "recompute")], ids=str)
@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM], ids=["AdamW", "momentum"])
def test_rigl_equals_a_plain_loop_written_from_the_paper(setting, optimizer, tmp_path):
    job = make_job(optimizer)
    fraction = Cosine(0.4, 5)
    group = Sparsity(Constant(0.8), "rigl", "random", fraction, Cadence(2), ("*.weight",))
    losses, norms, weights, masks = train_streamed(job, setting, tmp_path, [group])
    model = job.model()
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    first = {name: mask.clone() for name, mask in masks.items()}
    assert (losses, norms) == train_plain(job, model, rigl(model, masks, 2, fraction))
    for name, value in model.named_parameters():
        assert torch.equal(weights[name], value.detach())
    assert any(not torch.equal(masks[name], first[name]) for name in masks), "no weight was exchanged"


def test_set_replaces_random_weights_and_keeps_the_sparsity(tmp_path):
    group = Sparsity(Constant(0.8), "set", "random", Constant(0.3), Cadence(2), ("*.weight",))
    _, _, weights, masks = train_streamed(make_job(), Setting(), tmp_path / "a", [group])
    for name, before in masks.items():
        assert int((weights[name] != 0).sum()) <= int(before.sum())
        assert not torch.equal(weights[name] != 0, before)
    _, _, again, _ = train_streamed(make_job(), Setting("disk", 3), tmp_path / "b", [group])
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_gradual_pruning_follows_its_schedule(tmp_path):
    group = Sparsity(Cubic(0.0, 0.9, 0, 4), "gmp", "topk", None, Cadence(1), ("2.weight",))
    _, _, weights, _ = train_streamed(make_job(), Setting(), tmp_path, [group])
    assert int((weights["2.weight"] != 0).sum()) == 576 - round(0.9 * 576)


def test_sparsity_may_apply_to_some_rows_of_a_parameter(tmp_path):
    parts = {"2.weight": [Part("query", slice(0, 8)), Part("rest", slice(8, None))]}
    group = Sparsity(Constant(0.5), param_filter=("query",))
    _, _, weights, masks = train_streamed(make_job(), Setting(), tmp_path, [group], parts)
    assert list(masks) == ["2.weight"]
    assert int((weights["2.weight"][:8] == 0).sum()) == 8 * 24 // 2
    assert int((weights["2.weight"][8:] == 0).sum()) == 0
    assert math.isfinite(float(weights["2.weight"].sum()))


def test_a_skipped_step_changes_no_mask(tmp_path):
    group = Sparsity(Constant(0.8), "rigl", "random", Constant(0.3), Cadence(1), ("*.weight",))
    job = make_job()
    with make_engine(job, Setting(), tmp_path) as engine:
        shapes = {name: value.shape for name, value in engine.named_masters()}
        sparsifier = Sparsifier([group], shapes, seed=SEED)
        sparse = SparseTraining(sparsifier, engine.store)
        sparse.begin()
        start = weights_of(engine)
        before = {name: (start[name], sparsifier.mask_of(name)) for name in sparsifier.names}

        def spoil(update):
            engine.store.gradients.borrow(keys_by_name(engine.store.stages)["0.weight"]).fill_(torch.nan)
            sparse.before_update(update.step + 1)

        report = engine.train_step(job.batches(0), job.update(0, skip_non_finite=True), spoil)
        assert not report.applied
        for name, (weight, mask) in before.items():
            assert torch.equal(weights_of(engine)[name], weight)
            assert torch.equal(sparsifier.mask_of(name), mask)


def test_a_dense_model_becomes_sparse_and_stays_sparse(tmp_path):
    job = make_job()
    with make_engine(job, Setting(), tmp_path) as engine:
        engine.train_step(job.batches(0), job.update(0))
        shapes = {name: value.shape for name, value in engine.named_masters()}
        sparsifier = Sparsifier([Sparsity(Constant(0.8), param_filter=("*.weight",))], shapes, seed=SEED)
        sparse = SparseTraining(sparsifier, engine.store)
        sparse.begin()
        for step in (1, 2):
            engine.train_step(job.batches(step), job.update(step), lambda u: sparse.before_update(u.step))
        for name in sparsifier.names:
            assert torch.equal(weights_of(engine)[name] == 0, ~sparsifier.mask_of(name))
