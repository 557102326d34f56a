"""Optimizer state that is stored in bf16: its rounding, its bytes, and the bits of runs with it."""

import dataclasses

import pytest
import torch
from tests.on_device import device_tier

from headwater.core.buffers import aligned_empty
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.plan.options import optimizer_state_bytes
from headwater.store.build import GradientOptions, build_store
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.rounding import _passes, round_stochastically
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.update import Update

ADAMW = OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.1})
# The second parameter is larger than a piece, the third has another order in memory.
SHAPES = {"a": (7,), "b": (1100, 1003), "c": (6, 4)}
STRIDES = {"c": (1, 6)}
ALL = [
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05}),
    ("Adadelta", {"lr": 1.0}),
    ("Adafactor", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
    ("Muon", {"lr": 0.01}),
    ("Lamb", {"lr": 0.01}),
    ("Lion", {"lr": 0.01}),
]


# rounding


def rounded(values, **place):
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values.clone(), out, **{"stream": "x", **place})
    return out


def test_passes_of_several_rows_are_the_same_values_in_order():
    values = torch.arange(5 * 2**18 + 7)
    passes = [list(_passes(values, rows)) for rows in (1, 2, 64)]
    assert [[len(each) for each in some] for some in passes] == [[1] * 5 + [7], [2, 2, 1, 7], [5, 7]]
    assert all(torch.equal(torch.cat([each.view(-1) for each in some]), values) for some in passes)


def test_rounding_gives_a_neighbour_and_the_mean_is_the_value():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = torch.stack([rounded(values, stream=str(n)) for n in range(4000)]).double()
    below = (values.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    above = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert torch.all((found == below) | (found == above))
    error = (found.mean(0) - values.double()) / (above - below)
    assert error.abs().max() < 0.04, "four standard deviations of 4,000 draws"


def test_values_that_bf16_has_keep_their_bits():
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, float("inf"), float("-inf"), float("nan")])
    found = rounded(values).float()
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def test_a_tensor_rounded_in_parts_has_the_bits_of_the_whole():
    values = torch.randn(600_001, generator=torch.Generator().manual_seed(0))
    whole = rounded(values)
    parts = [rounded(values[start : start + 99_991], start=start) for start in range(0, len(values), 99_991)]
    assert torch.equal(torch.cat(parts), whole)


def test_many_small_changes_add_up():
    second_moment = torch.ones(1000, dtype=torch.bfloat16)
    for step in range(2000):
        second_moment = rounded(second_moment.float() * 0.999, stream=str(step))
    assert second_moment.float().mean().item() == pytest.approx(0.999**2000, rel=0.05)


# a store


def make_stage(wire=torch.bfloat16):
    params = (
        ParamSpec(name, shape, torch.float32, wire, bf16_state=True, strides=STRIDES.get(name))
        for name, shape in SHAPES.items()
    )
    return StageSpec(0, "stage", tuple(params))


def values_of(name, seed):
    """Return random values for a parameter, with the parameter's strides."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return values.t().contiguous().t() if name in STRIDES else values


def initial(name):
    return values_of(name, 0)


def gradient(name, step):
    return values_of(name, step)


class Run:
    """A store with one stage that is trained on fixed gradients."""

    def __init__(self, folder, tier="memory", spec=ADAMW, *, exact=False):
        stage = make_stage()
        if exact:
            exact_params = tuple(dataclasses.replace(param, bf16_state=False) for param in stage.params)
            stage = dataclasses.replace(stage, params=exact_params)

        def make_tier(own):
            if tier == "device":
                return device_tier(own.layouts)
            return MemoryTier(own.layouts) if tier == "memory" else DiskTier(own.layouts, folder)

        on_device = (0,) if tier == "device" else ()
        self.store = build_store(
            [stage], UpdateRule(spec), make_tier, on_device=on_device, gradients=GradientOptions()
        )
        for param, name in enumerate(SHAPES):
            self.store.parameters.write_param((0, param), initial(name))

    def train(self, steps):
        for step in steps:
            self.store.begin_step()
            for param, name in enumerate(SHAPES):
                self.store.add_gradient((0, param), gradient(name, step), last=True)
            self.store.end_micro_batch()
            self.store.commit(Update(step, {}))
            self.store.fetch(0, aligned_empty(self.store.tier.layouts[0].wire_bytes))
        return self

    def read(self, name, state=None):
        return self.store.parameters.read_param((0, list(SHAPES).index(name)), state)

    def contents(self):
        states = [None, *self.store.rule.state_layout(self.store.spec((0, 0)))]
        return {(name, state): self.read(name, state) for name in SHAPES for state in states}

    def save(self, folder):
        return SavedCheckpoint(Snapshot(self.store, folder, 0).run())


def assert_equal(some, others):
    assert some.keys() == others.keys()
    for key, value in some.items():
        assert value.dtype == others[key].dtype == torch.float32, key
        assert torch.equal(value, others[key]), key


@pytest.mark.parametrize("tier", ["memory", "disk", "device"])
def test_an_update_is_torchs_with_state_that_is_rounded_after_each_step(tier, tmp_path):
    run = Run(tmp_path, tier).train(range(1, 4))
    for name in SHAPES:
        weight = torch.nn.Parameter(initial(name))
        optimizer = torch.optim.AdamW([weight], **ADAMW.kwargs, fused=True)
        for step in range(1, 4):
            weight.grad = gradient(name, step)
            optimizer.step()
            for state in ("exp_avg", "exp_avg_sq"):
                value = optimizer.state[weight][state]
                in_memory = value.t() if name in STRIDES else value
                out = rounded(in_memory.reshape(-1), stream=f"{name} {state} {step}").float()
                in_memory.copy_(out.view(in_memory.shape))
        assert torch.equal(run.read(name), weight), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(run.read(name, state), optimizer.state[weight][state]), (name, state)
    run.store.close()


def test_the_bytes_of_a_parameter_are_eight():
    spec = StageSpec(0, "s", (ParamSpec("w", (4096, 512), torch.float32, torch.bfloat16, bf16_state=True),))
    layout = stage_layout(spec, UpdateRule(ADAMW))
    assert (layout.wire_bytes + layout.rest_bytes) / spec.numel == pytest.approx(8, abs=0.01)


def test_a_piece_from_another_host_is_received_in_fp32(tmp_path):
    pieces = Run(tmp_path).store.parameters
    received = [pieces.pieces.empty(0, piece) for piece in pieces.own_pieces(0)]
    assert {state.dtype for piece in received for state in piece.states.values()} == {torch.float32}


# checkpoints


def test_a_resumed_run_has_the_same_bits(tmp_path):
    through = Run(tmp_path).train(range(1, 5))
    saved = Run(tmp_path).train(range(1, 3)).save(tmp_path / "saved")
    resumed = Run(tmp_path)
    saved.restore(resumed.store)
    # The numbers of steps begin at 1 again, as in a loop of the user's.
    for step in (3, 4):
        resumed.store.begin_step()
        for param, key in enumerate(SHAPES):
            resumed.store.add_gradient((0, param), gradient(key, step), last=True)
        resumed.store.end_micro_batch()
        resumed.store.commit(Update(step - 2, {}))
    assert_equal(resumed.contents(), through.contents())


def test_a_checkpoint_can_be_loaded_with_the_other_setting(tmp_path):
    bf16, exact = Run(tmp_path).train(range(1, 4)), Run(tmp_path, exact=True).train(range(1, 4))
    into_exact, into_bf16 = Run(tmp_path, exact=True), Run(tmp_path)
    bf16.save(tmp_path / "bf16").restore(into_exact.store)
    exact.save(tmp_path / "exact").restore(into_bf16.store)
    assert_equal(into_exact.contents(), bf16.contents())
    nearest = {
        (name, state): value if state is None else value.bfloat16().float()
        for (name, state), value in exact.contents().items()
    }
    assert_equal(into_bf16.contents(), nearest)


# optimizers


@pytest.mark.parametrize(("name", "options"), ALL, ids=[name for name, _ in ALL])
def test_every_optimizer_trains_close_to_exact_state(name, options, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "b", (8, 30))
    monkeypatch.setitem(SHAPES, "a", (7, 5))  # Muon takes matrices alone
    spec = OptimizerSpec(name, options)
    inexact, exact = Run(tmp_path, spec=spec), Run(tmp_path, spec=spec, exact=True)
    for run in (inexact, exact):
        run.train(range(1, 11))
    for key in SHAPES:
        start, there = initial(key), exact.read(key)
        moved = (there - start).norm()
        assert (inexact.read(key) - there).norm() < 0.1 * moved
        for state, layout in exact.store.rule.state_layout(exact.store.spec((0, 0))).items():
            error = (inexact.read(key, state) - exact.read(key, state)).norm()
            assert error <= 0.02 * exact.read(key, state).norm()
            assert (error > 0) == (layout.shape is None), "only tensors of the parameter's shape are rounded"


def test_only_fp32_tensors_of_the_parameters_shape_are_narrowed():
    param = ParamSpec("w", (8, 6), torch.float32, torch.float32, bf16_state=True)
    factored = OptimizerSpec("Adafactor", {"lr": 0.01})
    fields = stage_layout(StageSpec(0, "s", (param,)), UpdateRule(factored)).groups[0].pieces[0].fields
    assert {field.dtype for field in fields} == {torch.float32}
    assert optimizer_state_bytes(ADAMW) == 8 and optimizer_state_bytes(ADAMW, stored="bf16") == 4
    in_bf16 = dataclasses.replace(param, dtype=torch.float64, wire_dtype=torch.float64)
    fields = stage_layout(StageSpec(0, "s", (in_bf16,)), UpdateRule(ADAMW)).groups[0].pieces[0].fields
    assert {field.dtype for field in fields} == {torch.float64}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_rows_without_a_sparse_gradient_keep_their_state(tmp_path):
    param = ParamSpec("w", (50, 8), torch.float32, torch.float32, bf16_state=True, sparse_gradient=True)
    rule = UpdateRule(OptimizerSpec("SparseAdam", {"lr": 0.01}))
    store = build_store([StageSpec(0, "s", (param,))], rule, lambda own: MemoryTier(own.layouts))
    store.parameters.write_param((0, 0), torch.ones(50, 8))
    for step, row in enumerate((3, 4), 1):
        values = torch.randn(1, 8, generator=torch.Generator().manual_seed(step))
        sparse = torch.sparse_coo_tensor(torch.tensor([[row]]), values, (50, 8), check_invariants=True)
        before = store.parameters.read_param((0, 0), "exp_avg")[3] if step == 2 else None
        store.add_gradient((0, 0), sparse, last=True)
        store.end_micro_batch()
        store.commit(Update(step, {}))
    moment = store.parameters.read_param((0, 0), "exp_avg")
    assert torch.equal(moment[3], before) and moment[4].abs().min() > 0 and moment[5].abs().max() == 0
    store.close()
