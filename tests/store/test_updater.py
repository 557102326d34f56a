"""The update of the pieces of a stage equals that of whole parameters in plain PyTorch."""

import dataclasses

import pytest
import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.optim.spec import OptimizerSpec
from headwater.store.layout import PIECE_ELEMENTS
from headwater.store.masters import Workspaces
from headwater.store.memory import MemoryTier
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.update import Part, Pending, Progress, Update
from headwater.store.updater import Updater

SHAPES = {"a": (5,), "b": (4, 3), "c": (2,)}
ADAM = OptimizerSpec("AdamW", {"lr": 0.1, "weight_decay": 0.1})


class Stage:
    """One stage in memory, filled with ones."""

    def __init__(self, spec=ADAM, shapes=SHAPES, **options):
        self.rule = UpdateRule(spec)
        params = tuple(ParamSpec(n, shape, torch.float32, torch.float32) for n, shape in shapes.items())
        self.spec = StageSpec(0, "s", params)
        self.layout = stage_layout(self.spec, self.rule)
        self.tier = MemoryTier([self.layout])
        self.image = self.tier.resident_wire(0)
        for view in self.spec.views(self.image):
            view.fill_(1)
        self.scalars = [None] * len(params)
        self.updater = Updater(self.rule, **options)

    def step(self, gradients, pending=None, groups=None):
        """Update the stage, or some groups of it; `gradients` has one entry for each parameter."""
        update = Update(1, {"lr": 0.1})
        parts = {i: Part(1, update, None) for i, gradient in enumerate(gradients) if gradient is not None}
        groups = self.tier.groups(0, groups or self.layout.groups, write=True)
        pending = Pending(1, parts if pending is None else pending)
        progress = Progress.of(self.scalars)
        self.updater.apply(self.layout, self.image, groups, gradients, self.scalars, pending, progress)
        self.scalars = progress.after

    def values(self):
        return [view.clone() for view in self.spec.views(self.image)]


def gradients_of(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes.values()]


def plain(steps, shapes=SHAPES):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes.values()]
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=True)
    for step in range(steps):
        for param, gradient in zip(params, gradients_of(step, shapes), strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in params]


def test_updates_equal_plain_pytorch():
    stage = Stage()
    for step in range(3):
        gradients = gradients_of(step)
        stage.step(gradients)
        assert gradients == [None] * 3, "an update leaves no gradient that it has used"
    assert all(map(torch.equal, stage.values(), plain(3)))
    assert [float(scalars["step"]) for scalars in stage.scalars] == [3.0] * 3


def test_a_parameter_that_the_update_does_not_name_keeps_its_value_and_its_gradient():
    stage = Stage()
    gradients = gradients_of(0)
    kept = gradients[1]
    stage.step(gradients, {index: Part(1, Update(1, {"lr": 0.1}), None) for index in (0, 2)})
    assert gradients[0] is None and gradients[1] is kept
    assert torch.equal(stage.values()[1], torch.ones(4, 3)) and stage.scalars[1] is None
    assert torch.equal(stage.values()[0], plain(1)[0])


def test_only_the_pieces_of_this_rank_are_updated():
    stage = Stage()
    (group,) = stage.layout.groups
    stage.step(gradients_of(0), groups=[dataclasses.replace(group, pieces=group.pieces[2:])])
    ones, changed = stage.values()[:2], stage.values()[2]
    assert all(bool((value == 1).all()) for value in ones) and torch.equal(changed, plain(1)[2])
    assert stage.scalars[0] is None and stage.scalars[2] is not None


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_parameter_of_several_pieces_is_updated_as_a_whole(pieces):
    shapes = {"w": (pieces * PIECE_ELEMENTS // 2 + 7,)}
    stage = Stage(shapes=shapes)
    for step in range(2):
        stage.step(gradients_of(step, shapes))
    assert torch.equal(stage.values()[0], plain(2, shapes)[0])
    assert float(stage.scalars[0]["step"]) == 2.0


def test_small_parameters_with_equal_options_share_one_call_of_the_optimizer(monkeypatch):
    stage, calls = Stage(kernel=lambda: None), []
    apply = UpdateRule.apply
    monkeypatch.setattr(
        UpdateRule, "apply", lambda self, *args, **options: calls.append(len(args[0])) or apply(self, *args)
    )
    stage.step(gradients_of(0))
    other = Part(1, Update(1, {"lr": 0.5}), None)
    stage.step(gradients_of(1), {0: other, 1: Part(1, Update(1, {"lr": 0.1}), None), 2: other})
    assert calls == [3, 2, 1]


def test_scratch_memory_is_used_again():
    space = Workspaces()
    assert space.get("a", 10).data_ptr() == space.get("a", 4).data_ptr()
    assert space.get("a", 4).data_ptr() != space.get("b", 4).data_ptr()
    assert space.get("a", 20).numel() == 20
