"""Masked parameters whose masked elements the store leaves out: places, runs, and the bytes of layouts."""

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.sparsity.masks import PackedMask
from headwater.store import kept
from headwater.store.build import build_store
from headwater.store.kept import CommonValues, KeptElements, runs
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule, stage_layout

ADAMW = OptimizerSpec("AdamW", {"lr": 0.1})
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kept, "_BLOCK", 24)


def random_mask(numel, count, seed=0):
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[order[:count]] = True
    return mask


def layout_of(shape, count, wire=BF16, spec=ADAMW, **options):
    param = ParamSpec("w", shape, FP32, wire, **options)
    return stage_layout(StageSpec(0, "s", (param.keeping(count),)), UpdateRule(spec), piece_elements=64)


@pytest.mark.parametrize("count", [0, 1, 37, 199, 200])
def test_places_are_those_of_the_mask(count):
    mask = random_mask(200, count)
    found = KeptElements(PackedMask(mask))
    assert found.count == count
    for start, stop in [(0, 200), (3, 9), (8, 8), (5, 130), (24, 48), (199, 200)]:
        assert torch.equal(found.places(start, stop), mask[start:stop].nonzero().view(-1))
    ranks = [found.element(rank) for rank in range(count + 2)]
    assert ranks == [*mask.nonzero().view(-1).tolist(), 200, 200]


@pytest.mark.parametrize("kept_elements", [0, 3, 64, 100, 128])
def test_runs_cover_a_parameter_and_its_fields_once(kept_elements):
    mask = random_mask(512, kept_elements)
    layout = layout_of((16, 32), 128)
    pieces = [piece for group in layout.groups for piece in group.pieces]
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 64), (64, 128)]
    rest = torch.zeros(layout.rest_bytes, dtype=torch.uint8)
    numbers, covered, ordered = torch.arange(512.0), [], []
    for group in layout.groups:
        for piece in group.pieces:
            for run in runs(piece, KeptElements(PackedMask(mask)), 50):
                assert run.stop - run.start <= 50
                covered += range(run.start, run.stop)
                field = run.fields(rest[group.offset :])["exp_avg"]
                field.copy_(run.chosen(numbers[run.start : run.stop]))
                dense = run.expanded(field)
                assert torch.equal(dense, (numbers * mask)[run.start : run.stop])
            ordered += piece.views(rest[group.offset :])["exp_avg"].tolist()
    assert covered == list(range(512))
    assert ordered[:kept_elements] == mask.nonzero().view(-1).tolist()


@pytest.mark.parametrize(("old", "new"), [(50, 50), (50, 0), (0, 50), (200, 20), (20, 200)])
def test_elements_that_two_masks_keep_are_moved_and_others_are_zero(old, new):
    before, after = random_mask(512, old, 1), random_mask(512, new, 2)
    layout, values = layout_of((16, 32), 200), torch.arange(1.0, 513.0)
    rests = {group.offset: torch.zeros(group.num_bytes, dtype=torch.uint8) for group in layout.groups}
    pieces = [(piece, rests[group.offset]) for group in layout.groups for piece in group.pieces]
    for piece, rest in pieces:
        for field in piece.views(rest).values():
            own = values[before][piece.start : piece.stop]
            field[: len(own)] = own
    common = CommonValues(KeptElements(PackedMask(before)), KeptElements(PackedMask(after)), 256)
    for act in (common.take, common.give):
        for piece, rest in pieces:
            act(piece, rest)
    for name in ("master.low", "exp_avg", "exp_avg_sq"):
        found = torch.cat([piece.views(rest)[name] for piece, rest in pieces])
        assert torch.equal(found[:new].float(), (values * before)[after])
        assert not found[new:].any()


@pytest.mark.parametrize(("wire", "expected"), [(FP32, 8), (BF16, 10), (FP16, 12)])
def test_the_store_has_bytes_for_kept_elements_alone(wire, expected):
    dense = stage_layout(StageSpec(0, "s", (ParamSpec("w", (4096, 512), FP32, wire),)), UpdateRule(ADAMW))
    sparse = ParamSpec("w", (4096, 512), FP32, wire).keeping(4096 * 512 // 10)
    layout = stage_layout(StageSpec(0, "s", (sparse,)), UpdateRule(ADAMW))
    assert layout.wire_bytes == dense.wire_bytes, "slabs stay dense"
    assert layout.rest_bytes / sparse.numel == pytest.approx(expected / 10, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "count", "options"),
    [
        ((8, 9), 7, {}),  # kernels compute the last elements of such a tensor in another way
        ((8, 8), 7, {}),  # nothing would be saved
        ((16, 16), 250, {}),
        ((16, 16), 20, {"bf16_state": True}),
        ((16, 16), 20, {"sparse_gradient": True}),
        ((16, 16), 20, {"strides": (1, 16)}),
        ((16, 16), 20, {"requires_grad": False}),
    ],
)
def test_other_parameters_have_all_elements(shape, count, options):
    param = ParamSpec("w", shape, FP32, BF16, **options)
    assert param.keeping(count) is param
    assert param.stored_numel == param.numel


@pytest.mark.parametrize("count", [0, 1, 64, 65, 128])
def test_room_is_in_whole_vectors(count):
    param = ParamSpec("w", (32, 32), FP32, BF16).keeping(count)
    assert param.stored_numel == {0: 64, 1: 64, 64: 64, 65: 128, 128: 128}[count]


@pytest.mark.parametrize("wire", [FP32, BF16, FP16])
def test_values_and_state_are_read_as_they_were_written_with_zeros_for_masked_elements(wire):
    mask = random_mask(1024, 300).view(32, 32)
    spec = ParamSpec("w", (32, 32), FP32, wire).keeping(300)
    store = build_store([StageSpec(0, "s", (spec,))], UpdateRule(ADAMW), lambda own: MemoryTier(own.layouts))
    store.parameters.masks.first = lambda name, values: PackedMask(mask)
    store.parameters.masks.begin((0, 0), spec, lambda: pytest.fail("this mask does not depend on the values"))
    for state in (None, "exp_avg", "exp_avg_sq"):
        values = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
        store.parameters.write_param((0, 0), values, state)
        assert torch.equal(store.parameters.read_param((0, 0), state), values * mask)
    image = store.tier.resident_wire(0)
    assert torch.equal(spec.arranged(store.stages[0].flat_views(image)[0]), (values * mask).to(wire))
    store.close()
