"""The weight store equals `torch.optim` bit for bit: masters, optimizer state and norms."""

import pytest
import torch
from tests.on_device import device_tier

from headwater.core.buffers import aligned_empty
from headwater.core.errors import NonFiniteError
from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.build import GradientOptions, build_store
from headwater.store.disk import DiskTier
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule
from headwater.store.update import Update

# The third parameter is larger than a piece, which is updated at once, and not a multiple of it.
SHAPES = (((300, 100), (7,)), ((1100, 1003), (8, 8)))
PLACES = [(stage, param) for stage, shapes in enumerate(SHAPES) for param in range(len(shapes))]
ADAMW = OptimizerSpec("AdamW", {"lr": 0.01, "weight_decay": 0.1})


def make_stages(wire=torch.float32, dtype=torch.float32, frozen=()):
    return [
        StageSpec(
            index,
            f"stage_{index}",
            tuple(
                ParamSpec(f"{index}.{p}", shape, dtype, wire, requires_grad=(index, p) not in frozen)
                for p, shape in enumerate(shapes)
            ),
        )
        for index, shapes in enumerate(SHAPES)
    ]


class Pair:
    """A store and plain parameters with the same initial values."""

    def __init__(self, tier, folder, spec, wire=torch.float32, gradient_tier="memory"):
        generator = torch.Generator().manual_seed(0)
        stages = make_stages(wire)
        gradients = GradientOptions(folder=None if gradient_tier == "memory" else folder)

        def make_tier(own):
            if tier == "device":
                return device_tier(own.layouts)
            return MemoryTier(own.layouts) if tier == "memory" else DiskTier(own.layouts, folder)

        self.params = [torch.nn.Parameter(torch.randn(SHAPES[s][p], generator=generator)) for s, p in PLACES]
        self.spec = spec
        on_device = range(len(stages)) if tier == "device" else ()
        self.store = build_store(
            stages, UpdateRule(spec), make_tier, on_device=on_device, gradients=gradients
        )
        for stage in range(len(SHAPES)):
            self.store.parameters.write(stage, lambda piece, stage=stage: self._fill(stage, piece))
        self.optimizer = spec.build(self.params)
        self.gradients = torch.Generator().manual_seed(1)

    def _flat(self, stage, piece):
        values = self.params[PLACES.index((stage, piece.param))].detach().view(-1)
        return values[piece.start : piece.start + piece.master.numel()]

    def _fill(self, stage, piece):
        piece.master.copy_(self._flat(stage, piece))

    def backward(self, skip=()):
        for place, param in zip(PLACES, self.params, strict=True):
            param.grad = None
            if place not in skip:
                param.grad = torch.randn(param.shape, generator=self.gradients)
                self.store.add_gradient(place, param.grad.clone(), last=True)
        self.store.end_micro_batch()

    def step(self, number, *, max_norm=None, skip=()):
        rate = self.spec.kwargs["lr"] / (number + 1)
        self.store.begin_step()
        self.backward(skip)
        committed = self.store.commit(Update(number, {"lr": rate}, max_norm=max_norm))
        norm = torch.nn.utils.clip_grad_norm_(self.params, float("inf") if max_norm is None else max_norm)
        assert committed.gradient_norm == float(norm)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def fetch(self):
        for stage, layout in enumerate(self.store.tier.layouts):
            self.store.fetch(stage, aligned_empty(layout.wire_bytes))

    def assert_same(self):
        for stage in range(len(SHAPES)):
            for piece in self.store.parameters.read(stage):
                assert torch.equal(piece.master, self._flat(stage, piece))
                self._assert_same_states(stage, piece)

    def _assert_same_states(self, stage, piece):
        param = self.params[PLACES.index((stage, piece.param))]
        for name, value in piece.states.items():
            expected = self.optimizer.state[param][name]
            if value.shape != expected.shape or self.store.rule.elementwise:
                expected = expected.view(-1)[piece.start : piece.start + piece.master.numel()]
            assert torch.equal(value.view(expected.shape), expected), name


@pytest.mark.parametrize(
    "spec",
    [
        ADAMW,
        OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9}),
        OptimizerSpec("SGD", {"lr": 0.1}),
        OptimizerSpec("Adagrad", {"lr": 0.1}),
        OptimizerSpec("Adafactor", {"lr": 0.1}),
    ],
    ids=lambda spec: f"{spec.name}-{'-'.join(spec.kwargs)}",
)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tier", ["memory", "disk", "device"])
def test_updates_on_fetch(tier, wire, spec, tmp_path):
    pair = Pair(tier, tmp_path, spec, wire)
    for number in range(3):
        pair.step(number, max_norm=1.0)
        pair.fetch()
    pair.assert_same()
    pair.store.close()


@pytest.mark.parametrize("gradient_tier", ["memory", "disk"])
@pytest.mark.parametrize("tier", ["memory", "disk", "device"])
def test_stages_that_were_not_fetched_are_up_to_date_when_read(tier, gradient_tier, tmp_path):
    pair = Pair(tier, tmp_path, ADAMW, gradient_tier=gradient_tier)
    for number in range(3):
        pair.step(number)
    pair.assert_same()
    pair.store.close()


def test_parameters_without_a_gradient_do_not_change(tmp_path):
    pair = Pair("disk", tmp_path, ADAMW)
    pair.step(0, skip=[(0, 1), (1, 0), (1, 1)])
    pair.step(1, skip=[(0, 0)])
    pair.assert_same()
    pair.store.close()


def test_wire_image_is_the_master_rounded(tmp_path):
    pair = Pair("disk", tmp_path, ADAMW, torch.bfloat16)
    pair.step(0)
    slab = aligned_empty(pair.store.tier.layouts[0].wire_bytes)
    pair.store.fetch(0, slab)
    wire = pair.store.stages[0].views(slab)[0]
    exact = pair.params[0].detach()
    assert wire.dtype == torch.bfloat16
    assert torch.equal(wire, exact.to(torch.bfloat16))
    pair.store.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_leaves_no_trace(value, tmp_path):
    pair = Pair("memory", tmp_path, ADAMW)
    pair.step(0)
    before = [piece.master.clone() for piece in pair.store.parameters.read(1)]
    for skip in (False, True):
        pair.store.begin_step()
        pair.store.add_gradient((1, 1), torch.full((8, 8), value), last=True)
        pair.store.end_micro_batch()
        update = Update(7, {"lr": 0.1}, skip_non_finite=skip)
        if skip:
            assert not pair.store.commit(update).applied
        else:
            with pytest.raises(NonFiniteError, match=r"step 7(.|\n)*'stage_1', the first"):
                pair.store.commit(update)
    after = [piece.master for piece in pair.store.parameters.read(1)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pair.step(1)
    pair.assert_same()


def test_an_interrupted_step_leaves_no_gradients(tmp_path):
    pair = Pair("disk", tmp_path, ADAMW, gradient_tier="disk")
    pair.step(0)
    pair.store.begin_step()
    pair.store.add_gradient((0, 0), torch.ones(300, 100), last=False)
    pair.store.end_micro_batch()
    pair.store.add_gradient((0, 1), torch.ones(7), last=True)
    pair.step(1)
    pair.assert_same()
    pair.store.close()


def test_micro_batches_are_summed_and_may_skip_stages(tmp_path):
    pair = Pair("memory", tmp_path, OptimizerSpec("SGD", {"lr": 1.0}))
    expected = [param.detach().clone() for param in pair.params]
    pair.store.begin_step()
    pair.store.add_gradient((0, 0), torch.full((300, 100), 3.0), last=False)
    pair.store.end_micro_batch()
    pair.store.add_gradient((1, 1), torch.full((8, 8), 4.0), last=True)
    pair.store.end_micro_batch()
    committed = pair.store.commit(Update(0, {"lr": 1.0}))
    assert committed.gradient_norm == pytest.approx((30000 * 9 + 64 * 16) ** 0.5, rel=1e-6)
    masters = {
        (s, piece.param): piece.master.clone() for s in (0, 1) for piece in pair.store.parameters.read(s)
    }
    assert torch.equal(masters[0, 0], expected[0].view(-1) - 3)
    assert torch.equal(masters[1, 1], expected[3].view(-1) - 4)


def test_the_loss_scale_is_divided_out(tmp_path):
    scaled, plain = (Pair("memory", tmp_path, OptimizerSpec("SGD", {"lr": 0.5})) for _ in range(2))
    for pair, scale in ((scaled, 1024.0), (plain, 1.0)):
        pair.store.begin_step()
        pair.store.add_gradient((0, 1), torch.arange(7.0) * scale, last=True)
        pair.store.end_micro_batch()
        norm = pair.store.commit(Update(0, {"lr": 0.5}, max_norm=1.0, loss_scale=scale)).gradient_norm
        assert norm == pytest.approx(91**0.5)
    values = [[piece.master.clone() for piece in pair.store.parameters.read(0)] for pair in (scaled, plain)]
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)


def test_clip_by_value(tmp_path):
    pair = Pair("memory", tmp_path, OptimizerSpec("SGD", {"lr": 1.0}))
    before = pair.params[1].detach().clone()
    pair.store.begin_step()
    pair.store.add_gradient((0, 1), torch.tensor([-9.0, -0.5, -0.1, 0.0, 0.1, 0.5, 9.0]), last=True)
    pair.store.end_micro_batch()
    pair.store.commit(Update(0, {"lr": 1.0}, max_value=0.5))
    after = next(piece.master for piece in pair.store.parameters.read(0) if piece.param == 1)
    assert torch.equal(after, before - torch.tensor([-0.5, -0.5, -0.1, 0.0, 0.1, 0.5, 0.5]))


def test_masters_may_be_written_at_any_time(tmp_path):
    pair = Pair("disk", tmp_path, ADAMW)
    pair.step(0)
    pair.store.parameters.write(0, lambda piece: piece.master.fill_(2.0))
    assert all(bool((piece.master == 2).all()) for piece in pair.store.parameters.read(0))
    pair.store.close()
