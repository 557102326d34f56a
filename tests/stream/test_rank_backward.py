"""Several ranks that update stages during the backward compute the bits of updates on fetch."""

import dataclasses
import functools
import time

import pytest
import torch
from harness import FP32, SEED, Job
from rank_training import VOCABULARY, WIDTH, Block, Net, loss_of, plan_of, tokens, train, wire
from test_rank_devices import stand_ins as stand_ins
from test_rank_devices import trained
from test_several_hosts import Choosing
from test_shared_disk import fetched
from test_snapshot_ranks import train as save_slowly
from tests.rank_processes import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwater.core.errors import NonFiniteError, StoreError, StreamError
from headwater.core.precision import Precision
from headwater.plan.footprint import Footprint
from headwater.plan.types import Activations
from headwater.store.gradients.ranks import RankGradients
from headwater.store.gradients.storage import PooledStorage
from headwater.stream.engine import Engine
from headwater.trainer.pretrained import checkpoint_weights

BF16 = Precision("bf16")


class Tied(Net):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Unused(Net):
    """Some ranks use a parameter in some steps only. No rank uses another parameter."""

    def __init__(self):
        super().__init__()
        self.never, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.blocks[0](x)
        if int(tokens.sum()) % 2:
            x = self.sometimes(x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class Twice(Net):
    """Each weight of a block gets two gradients in a backward."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            call = functools.partial(checkpoint, block, use_reentrant=True) if x.requires_grad else block
            x = call(x) + call(2 * x)
        return self.head(x)


@pytest.fixture
def small_pieces(monkeypatch):
    """Make pieces so small that each rank updates some of nearly every stage."""
    monkeypatch.setattr("headwater.store.layout.PIECE_ELEMENTS", 64)


def assert_same(found, wanted):
    for (told, weights), (other_told, other_weights) in zip(found, wanted, strict=True):
        assert told == other_told
        assert set(weights) <= set(other_weights)
        for name, value in weights.items():
            assert (value == other_weights[name]).all(), name
    assert found[0][1]


@pytest.mark.parametrize(
    ("ranks", "precision", "micro_batches", "net", "place", "policy"),
    [
        (2, FP32, 1, Net, "memory", Activations.KEEP),
        (2, BF16, 1, Net, "memory", Activations.RECOMPUTE),
        (4, BF16, 2, Choosing, "memory", Activations.KEEP),
        (2, FP32, 1, Choosing, "memory", Activations.RECOMPUTE),
        (2, FP32, 1, Tied, "memory", Activations.KEEP),
        (4, FP32, 1, Unused, "memory", Activations.KEEP),
        (2, BF16, 2, Unused, "memory", Activations.RECOMPUTE),
        (2, FP32, 1, Twice, "memory", Activations.KEEP),
        (4, BF16, 1, Net, "disk", Activations.KEEP),
        (2, FP32, 1, Unused, "disk", Activations.KEEP),
        (2, FP32, 2, Choosing, "weights and gradients on disk", Activations.RECOMPUTE),
        (2, FP32, 1, Net, "gradients on disk", Activations.KEEP),
        (2, BF16, 1, Tied, "device", Activations.RECOMPUTE),
        (4, FP32, 2, Choosing, "device", Activations.KEEP),
    ],
)
def test_updates_in_the_backward_of_ranks_have_the_bits_of_updates_on_fetch(
    ranks, precision, micro_batches, net, place, policy, small_pieces, stand_ins, tmp_path
):
    plan = plan_of(precision, micro_batches, net)
    policies = tuple(
        policy if stage.name.startswith("blocks") else Activations.KEEP for stage in plan.trace.stages
    )
    plan = dataclasses.replace(plan, activations=policies)
    slabs = {"in_place": False, "slabs": 4 * ranks}
    where, read = {
        "memory": ({}, wire),
        "disk": ({"tier": "disk", "disk": tmp_path} | slabs, fetched),
        "weights and gradients on disk": (
            {"tier": "disk", "gradient_tier": "disk", "disk": tmp_path} | slabs,
            fetched,
        ),
        "gradients on disk": ({"gradient_tier": "disk", "disk": tmp_path}, wire),
        "device": ({"device": "cuda", "in_place": False, "slabs": 4}, trained),
    }[place]
    ahead = dataclasses.replace(plan, updates="in_backward", **where)
    work = functools.partial(train, micro_batches=micro_batches, net=net, max_norm=None)
    wanted = run_ranks(functools.partial(work, plan=plan, read=wire), ranks)
    assert_same(run_ranks(functools.partial(work, plan=ahead, read=read), ranks), wanted)


class Skipping(Net):
    """Each rank always skips the same stages."""

    skipped = ()

    def __init__(self):
        super().__init__()
        self.tail = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index in self.skipped else block(x)
        x = self.head(x)
        return x if "tail" in self.skipped else self.tail(x)


def train_skipping(fabric, plan, skipped):
    """Train without evaluations, which would use all stages. Return the reports and the final weights."""
    work = Job(
        Skipping, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None
    )
    model = work.model()
    model.skipped = skipped[fabric.rank]
    told = []
    with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
        for step in range(3):
            report = engine.train_step(work.batches(step), work.update(step))
            told.append((report.loss, report.gradient_norm))
        weights = {name: value.numpy() for name, value in wire(engine)}
        fabric.barrier("the weights to be read")
    return told, weights


@pytest.mark.parametrize("skipped", [((), (2,)), ((0, 4, 5), (1, 3, 5)), ((), ("tail",))])
def test_ranks_that_skip_stages_in_every_step_do_not_wait_for_each_other_forever(skipped):
    """A rank that skips a stage has not applied its update yet when another rank needs the stage."""
    plan = plan_of(FP32, 1, Skipping)
    found, wanted = (
        run_ranks(
            functools.partial(
                train_skipping, plan=dataclasses.replace(plan, updates=updates), skipped=skipped
            ),
            timeout_s=20,
        )
        for updates in ("in_backward", "on_fetch")
    )
    assert_same(found, wanted)


class Short(Net):
    """A model so short that the commit takes nearly all of its stages."""

    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:2]


def train_with_slow_commits(fabric, plan):
    """Train while rank 1 is slow in each commit. Return the reports."""
    commit = RankGradients.commit

    def slow(gradients, keys, stages):
        time.sleep(0.1)
        commit(gradients, keys, stages)

    work = Job(Short, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None)
    with pytest.MonkeyPatch.context() as patch:
        if fabric.rank == 1:
            patch.setattr(RankGradients, "commit", slow)
        with Engine(
            work.model(), plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric
        ) as engine:
            reports = [engine.train_step(work.batches(step), work.update(step)) for step in range(4)]
            engine.store.flush()
            fabric.barrier("the last updates")
    return [(report.loss, report.gradient_norm) for report in reports]


def test_a_rank_that_is_slow_in_a_commit_does_not_lose_gradients_of_the_next_step(tmp_path):
    """It updates no stage on disk, so the other rank does not wait for its updates."""
    plan = dataclasses.replace(plan_of(FP32, 1, Short), tier="disk", disk=tmp_path, in_place=False, slabs=8)
    found, wanted = (
        run_ranks(functools.partial(train_with_slow_commits, plan=dataclasses.replace(plan, updates=updates)))
        for updates in ("in_backward", "on_fetch")
    )
    assert found == wanted


class Faulty(Net):
    """In step 1 the gradients of a block are not finite on the second rank, or its backward raises there."""

    fault, scale = None, 1.0

    def forward(self, tokens):
        x = self.scale * self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.at and self.fault is not None and x.requires_grad:
                x.register_hook(self.fault)
        return self.head(x)


def repeat(fabric, plan, fails):
    """Run two steps. If `fails`, the second one is tried with a loss that is not finite first."""
    work = Job(Faulty, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None)
    model = work.model()
    model.at = None
    with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
        engine.train_step(work.batches(0), work.update(0))
        if fails:
            model.scale = float("nan") if fabric.rank == 1 else 1.0
            with pytest.raises(NonFiniteError, match="loss of step 1"):
                engine.train_step(work.batches(1), work.update(1))
            model.scale = 1.0
        engine.train_step(work.batches(1), work.update(1))
        engine.store.flush()
        return [value.clone().numpy() for _, value in wire(engine)]


def test_a_step_with_a_loss_that_is_not_finite_on_one_rank_is_undone_and_can_be_repeated():
    plan = dataclasses.replace(plan_of(FP32, 1, Faulty), updates="in_backward")
    failed, clean = (run_ranks(functools.partial(repeat, plan=plan, fails=fails)) for fails in (True, False))
    for found, wanted in zip(failed, clean, strict=True):
        assert all((ours == theirs).all() for ours, theirs in zip(found, wanted, strict=True))


def fail(fabric, plan, kind, at):
    """Run two steps. The second one fails. Return the error of this rank, and that of a later use."""

    def fault(gradient):
        if kind == "raise":
            raise ZeroDivisionError
        return gradient * float("nan")

    work = Job(Faulty, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None)
    model = work.model()
    model.at = at
    with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
        engine.train_step(work.batches(0), work.update(0))
        engine.store.flush()
        before = {name: value.clone() for name, value in wire(engine)}
        fabric.barrier("the weights to be read")
        if fabric.rank == 1:
            model.fault = fault
        try:
            engine.train_step(work.batches(1), work.update(1))
        except (StreamError, ZeroDivisionError) as error:
            text = str(error) + " ".join(getattr(error, "__notes__", ()))
        else:
            raise AssertionError("the step has not failed")
        later = None
        try:
            engine.master("embed.weight")
            assert all(torch.equal(value, before[name]) for name, value in wire(engine))
        except StoreError as error:
            later = str(error)
    return text, later


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_gradient_that_is_not_finite_on_one_rank_loses_the_step_on_all(at):
    plan = dataclasses.replace(plan_of(FP32, 1, Faulty), updates="in_backward")
    for text, later in run_ranks(functools.partial(fail, plan=plan, kind="nan", at=at)):
        assert "gradient of step 1" in text
        assert "have applied step 1" in text and "resume from the last checkpoint" in text
        assert "step 1 has failed" in later


def test_a_rank_that_fails_in_the_backward_loses_the_step():
    plan = dataclasses.replace(plan_of(FP32, 1, Faulty), updates="in_backward")

    def failing(fabric):
        text, later = fail(fabric, plan, "raise", 1)
        return fabric.rank, text, later

    (_, waiting, _), (_, own, later) = run_ranks(failing)
    assert "have applied step 1" in own and "step 1 has failed" in later
    assert "have applied step 1" in waiting


def test_a_checkpoint_that_is_written_meanwhile_is_of_its_step(tmp_path):
    plan = dataclasses.replace(plan_of(FP32, 1), updates="in_backward")
    for name, slow, steps in (("plain", None, 1), ("slow", 1, 4)):
        folder = tmp_path / name / "checkpoint_1"
        folder.parent.mkdir()
        run_ranks(functools.partial(save_slowly, plan=plan, folder=folder, slow=slow, steps=steps))
    plain, slow = (dict(checkpoint_weights(tmp_path / name / "checkpoint_1")) for name in ("plain", "slow"))
    assert plain.keys() == slow.keys() and plain
    assert all(torch.equal(value, slow[name]) for name, value in plain.items())


class Deep(Net):
    """A model of many equal stages."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(24))


class Checkpointed(Deep):
    """Runs the backward of each block inside the backward, but not of each block on each rank."""

    without = ()

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            is_checkpointed = x.requires_grad and index not in self.without
            x = checkpoint(block, x, use_reentrant=True) if is_checkpointed else block(x)
        return self.head(x)


def train_checkpointed(fabric, plan):
    work = Job(
        Checkpointed, lambda step, index: tokens(step, index).chunk(2)[fabric.rank], loss_of, max_norm=None
    )
    model = work.model()
    model.without = ((3, 9), (4,))[fabric.rank]
    with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
        reports = [engine.train_step(work.batches(step), work.update(step)) for step in range(2)]
        engine.store.flush()
        fabric.barrier("the last updates")
    return [(report.loss, report.gradient_norm) for report in reports]


def test_ranks_may_run_different_backwards_inside_their_backwards():
    plan = plan_of(FP32, 1, Checkpointed)
    found, wanted = (
        run_ranks(
            functools.partial(train_checkpointed, plan=dataclasses.replace(plan, updates=updates)),
            timeout_s=20,
        )
        for updates in ("in_backward", "on_fetch")
    )
    assert found == wanted


def most_slots(fabric, plan, behind, net):
    """Train two steps, in which the rank `behind` is slow. Return the slots that had memory."""
    slots = set()
    open_slot = PooledStorage.open

    def opened(storage, stage):
        open_slot(storage, stage)
        slots.add(storage._slot_of.read(stage))

    def part(step, index):
        return tokens(step, index).chunk(2)[fabric.rank]

    work = Job(net, part, loss_of, max_norm=None)
    model = work.model()
    if fabric.rank == behind:
        for block in model.blocks:
            block.register_full_backward_hook(lambda *_: time.sleep(0.01))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PooledStorage, "open", opened)
        with Engine(model, plan, work.optimizer, seed=SEED, loss_function=loss_of, fabric=fabric) as engine:
            for step in range(2):
                engine.train_step(work.batches(step), work.update(step))
    return slots


@pytest.mark.parametrize(("behind", "net"), [(0, Deep), (1, Deep), (None, Deep), (1, Checkpointed)])
def test_few_stages_have_gradients_at_a_time_whichever_rank_is_slow(behind, net):
    plan = dataclasses.replace(plan_of(FP32, 1, net), updates="in_backward")
    footprint = Footprint(plan.trace, optimizer_state_bytes=8, base_bytes=0, ranks=2)
    counted = footprint.memory(plan).host["gradients"]
    used = len(plan.trace.stages)
    for _ in range(3):
        # On a busy machine a rank may get no time while it waits for its turn, and the other runs ahead.
        first, second = run_ranks(functools.partial(most_slots, plan=plan, behind=behind, net=net))
        used = min(used, len(first | second))
        if used <= 10:
            break
    block = plan.trace.stages[1]
    bytes_of = sum(param.numel * 4 for param in block.params)
    assert 2 <= used <= 10 < len(plan.trace.stages)
    assert used * bytes_of <= counted
