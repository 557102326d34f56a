"""Sparse training with a store that leaves out masked elements, against the same run with all elements."""

import dataclasses

import pytest
import torch
from harness import ADAMW, SEED, Job, Setting, make_plan
from safetensors.torch import load_file
from torch import nn

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.sparsity.schedules import Cadence, Constant, Cosine, Cubic
from headwater.sparsity.sparsifier import Part, Sparsifier, Sparsity
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint, load_weights
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions
from headwater.trainer.sparse import SparseTraining

STEPS = 6
MOMENTUM = OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
LION = OptimizerSpec("Lion", {"lr": 1e-3, "weight_decay": 0.1})
PLAIN_ADAMW = OptimizerSpec("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "fused": False})
ADAMAX = OptimizerSpec("Adamax", {"lr": 1e-2})  # its state is not zero where gradients are
BF16, FP16 = Precision("bf16"), Precision("fp16", 2.0**4)

STATIC = Sparsity(Constant(0.9), param_filter=("*.weight",))
SET = Sparsity(Constant(0.8), "set", "random", Constant(0.3), Cadence(2), ("*.weight",))
RIGL = Sparsity(Constant(0.8), "rigl", "topk", Cosine(0.4, 5), Cadence(2), ("*.weight",))
GMP = Sparsity(Cubic(0.5, 0.9, 0, 4), "gmp", "topk", None, Cadence(1), ("*.weight",))
GROUPS = {"static": STATIC, "set": SET, "rigl": RIGL, "gmp": GMP}
TIERS = [Setting(), Setting(in_place=True), Setting("disk", 2, "recompute")]
MIXED = Setting("disk", 2, "recompute", in_memory=(1,))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("headwater.store.build.PIECE_ELEMENTS", 128)
    monkeypatch.setattr("headwater.store.layout.GROUP_BYTES", 4096)
    monkeypatch.setattr("headwater.store.kept._BLOCK", 512)


def make_job(optimizer=ADAMW, micro_batches=2, **options):
    def make():
        layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 3))
        return nn.Sequential(*layers)

    def batch(step, index):
        return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + index))

    def loss(model, x):
        return (model(x) - 1).square().mean()

    return Job(make, batch, loss, optimizer, micro_batches=micro_batches, **options)


@dataclasses.dataclass
class Trained:
    """The numbers of a run, its masks, and its checkpoint."""

    losses: list[float]
    norms: list[float]
    masks: dict[str, torch.Tensor]
    folder: object
    stored_bytes: int


def train(job, setting, folder, group, *, compact, until=STEPS, start=None, weights=None, parts=None):
    """Train from the initial values, from `start`, or from the weights of `weights`; save at the end."""
    model = job.model()
    plan = make_plan(job, model, setting, folder / "disk")
    shapes = {name: param.shape for name, param in model.named_parameters()}
    sparsifier = Sparsifier([group], shapes, parts=parts, seed=SEED)
    first = 0
    if start is not None:
        sparsifier.load_state_dict(start.masks)
        first = SavedCheckpoint(start.folder).manifest.step
    if compact:
        counts = {name: sparsifier.capacity(name) for name in sparsifier.names}
        plan = dataclasses.replace(plan, trace=plan.trace.keeping(counts))
        assert sum(spec.kept is not None for stage in plan.trace.stages for spec in stage.params) == 2
    options = EngineOptions(first_mask=sparsifier.first)
    trained = Trained([], [], {}, None, 0)
    with Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss, options=options) as engine:
        if start is not None:
            SavedCheckpoint(start.folder).restore(engine.store)
        if weights is not None:
            load_weights(engine.store, weights)
        sparse = SparseTraining(sparsifier, engine.store)
        sparse.begin()
        for step in range(first, until):
            update = job.update(step, loss_scale=setting.precision.loss_scale)
            report = engine.train_step(job.batches(step), update, lambda u: sparse.before_update(u.step + 1))
            trained.losses.append(report.loss)
            trained.norms.append(report.gradient_norm)
        trained.folder = Snapshot(engine.store, folder / f"checkpoint_{until}", until).run()
        trained.masks = {name: bits.clone() for name, bits in sparsifier.state_dict().items()}
        trained.stored_bytes = sum(layout.rest_bytes for layout in engine.store.tier.layouts)
    return trained


def tensors(trained):
    files = sorted(trained.folder.glob("*.safetensors"))
    return {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(compact, dense, *, state=True):
    assert compact.losses == dense.losses
    assert compact.norms == dense.norms
    assert all(torch.equal(compact.masks[name], bits) for name, bits in dense.masks.items())
    ours, theirs = tensors(compact), tensors(dense)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if state or not name.startswith("optimizer"):
            assert torch.equal(ours[name], value), name
        if name.startswith("weights"):
            assert torch.equal(_bits(ours[name]), _bits(value)), f"{name}: zeros with other signs"
    before = SavedCheckpoint(dense.folder).manifest.stages
    assert SavedCheckpoint(compact.folder).manifest.stages == before


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "setting", [Setting(), Setting(in_place=True), Setting("disk", 2, "recompute")], ids=str
)
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
def test_the_bits_are_those_of_a_store_with_all_elements(group, setting, precision, tmp_path):
    job, setting = make_job(), dataclasses.replace(setting, precision=precision)
    compact = train(job, setting, tmp_path / "a", GROUPS[group], compact=True)
    dense = train(job, setting, tmp_path / "b", GROUPS[group], compact=False)
    assert compact.stored_bytes < dense.stored_bytes
    assert_same(compact, dense)
    if group != "static":
        first = train(job, setting, tmp_path / "c", GROUPS[group], compact=True, until=1)
        assert any(not torch.equal(first.masks[name], bits) for name, bits in compact.masks.items())


@pytest.mark.parametrize("optimizer", [PLAIN_ADAMW, MOMENTUM, LION, ADAMAX], ids=lambda spec: spec.name)
@pytest.mark.parametrize("group", ["static", "rigl"])
@pytest.mark.parametrize("precision", [Precision(), BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_other_optimizers_and_encodings_of_masters(optimizer, group, precision, tmp_path):
    job, setting = make_job(optimizer, micro_batches=1), dataclasses.replace(MIXED, precision=precision)
    compact = train(job, setting, tmp_path / "a", GROUPS[group], compact=True)
    dense = train(job, setting, tmp_path / "b", GROUPS[group], compact=False)
    # Elsewhere, zeros of masked elements are read; the state of Adamax is eps there.
    assert_same(compact, dense, state=optimizer is not ADAMAX)


@pytest.mark.parametrize("options", [{"max_norm": None}, {"max_norm": None, "max_value": 1e-3}], ids=str)
def test_without_clipping_and_with_clipping_by_value(options, tmp_path):
    job, setting = make_job(micro_batches=1, **options), Setting("disk", 2, gradient_tier="disk")
    compact = train(job, setting, tmp_path / "a", RIGL, compact=True)
    assert_same(compact, train(job, setting, tmp_path / "b", RIGL, compact=False))


@pytest.mark.parametrize("group", ["static", "rigl", "gmp"])
@pytest.mark.parametrize("from_compact", [False, True])
@pytest.mark.parametrize("into_compact", [False, True])
def test_a_run_resumes_in_another_tier_and_from_either_store(group, from_compact, into_compact, tmp_path):
    memory, disk = Setting(in_place=True, precision=BF16), dataclasses.replace(MIXED, precision=BF16)
    job, group = make_job(), GROUPS[group]
    whole = train(job, memory, tmp_path / "whole", group, compact=False)
    early = train(job, memory, tmp_path / "early", group, compact=from_compact, until=3)
    late = train(job, disk, tmp_path / "late", group, compact=into_compact, start=early)
    assert whole.losses == early.losses + late.losses
    whole.losses, whole.norms = late.losses, late.norms
    assert_same(late, whole)


def test_weights_without_masks_get_masks_that_depend_on_them(tmp_path):
    job, topk = make_job(), dataclasses.replace(STATIC, init_method="topk")
    dense = dataclasses.replace(STATIC, sparsity=Constant(0.0))
    trained = train(job, Setting(), tmp_path / "dense", dense, compact=False).folder
    runs = [
        train(job, Setting(precision=BF16), tmp_path / str(compact), topk, compact=compact, weights=trained)
        for compact in (True, False)
    ]
    assert_same(*runs)


def test_a_parameter_of_several_matrices_with_one_mask_each(tmp_path):
    parts = {"2.weight": [Part("query", slice(0, 16)), Part("rest", slice(16, None))]}
    group = dataclasses.replace(RIGL, param_filter=("query", "0.weight"))
    found = [
        train(make_job(), Setting("disk", 2), tmp_path / str(compact), group, compact=compact, parts=parts)
        for compact in (True, False)
    ]
    assert_same(*found)


def test_a_snapshot_that_is_written_while_masks_change_has_the_old_masks(tmp_path):
    job, setting = make_job(), Setting("disk", 2, precision=BF16)
    expected = train(job, setting, tmp_path / "expected", RIGL, compact=False, until=1)
    model = job.model()
    plan = make_plan(job, model, setting, tmp_path / "disk")
    sparsifier = Sparsifier([RIGL], {name: p.shape for name, p in model.named_parameters()}, seed=SEED)
    counts = {name: sparsifier.capacity(name) for name in sparsifier.names}
    plan = dataclasses.replace(plan, trace=plan.trace.keeping(counts))
    options = EngineOptions(first_mask=sparsifier.first)
    with Engine(model, plan, job.optimizer, seed=SEED, loss_function=job.loss, options=options) as engine:
        sparse = SparseTraining(sparsifier, engine.store)
        sparse.begin()

        def step(number):
            update = job.update(number)
            engine.train_step(job.batches(number), update, lambda u: sparse.before_update(u.step + 1))

        step(0)
        masks = {name: bits.clone() for name, bits in sparsifier.state_dict().items()}
        snapshot = Snapshot(engine.store, tmp_path / "checkpoint_1", 1)
        step(1)  # the mask changes here
        assert any(not torch.equal(masks[name], bits) for name, bits in sparsifier.state_dict().items())
        found = Trained(expected.losses, expected.norms, masks, snapshot.run(), 0)
    assert_same(found, expected)
