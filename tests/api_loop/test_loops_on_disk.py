"""User loops on several ranks with the disk tier compute the same bits as with the memory tier."""

import functools

import pytest
import torch
import torch._dynamo  # once, and not by each rank
from tests.rank_processes import run_ranks, traces_of_ranks
from torch import nn
from torch.testing import assert_close

import headwater as hw
import headwater.api.amp
import headwater.api.compile
from headwater.core.buffers import PAGE_BYTES
from headwater.fabric import membership

STEPS, BATCH, WIDTH = 4, 12, 8


class Model(nn.Module):
    """A model of blocks that share slabs, a buffer, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(5)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.embed.weight)


class Loop:
    """A model in training, and the values that the loop has seen."""

    def __init__(self, folder, *, precision=None, **options):
        self.folder, self.precision = folder, precision
        torch.manual_seed(0)
        self.model = hw.compile(Model(), hw.backend("CSX", **options))
        self.params = dict(self.model.named_parameters())
        self.seen = []

    def see(self, *values):
        self.seen += [torch.as_tensor(value).detach().float().clone().numpy() for value in values]

    def tokens(self, step, size=BATCH):
        generator = torch.Generator().manual_seed(step)
        return hw.distributed.take_part(torch.randint(0, 11, (size, 5), generator=generator))

    def loss(self, step, size=BATCH):
        tokens = self.tokens(step, size)
        with self.autocast():
            logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        self.see(hw.distributed.whole(loss.detach()))
        return loss

    def autocast(self):
        return torch.autocast("cpu", self.precision or torch.bfloat16, enabled=self.precision is not None)

    def adamw(self, params=None, **options):
        return torch.optim.AdamW(params or self.model.parameters(), lr=0.01, fused=True, **options)

    def step(self, optimizer, step, size=BATCH):
        optimizer.zero_grad()
        self.loss(step, size).backward()
        optimizer.step()


def looks_and_changes(loop):
    """Read, change and clip weights and gradients between and within steps."""
    optimizer = loop.adamw()
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.loss(step).backward()
        loop.see(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5))
        loop.params["embed.weight"].grad.mul_(2)
        optimizer.step()
        loop.see(loop.params["blocks.2.0.weight"].data, loop.params["embed.weight"][3])
        with torch.no_grad():
            loop.params["blocks.1.0.weight"].mul_(0.9)
            loop.params["blocks.3.0.bias"].copy_(torch.full((WIDTH,), float(step)))
            loop.params["embed.weight"][step] = 0.5
            loop.loss(100 + step)


def fails(loop):
    """Run steps that fail at different places; they are undone, except updates that a forward has used."""
    optimizer = loop.adamw()

    @hw.trace
    def training_step(step, place):
        loop.step(optimizer, step)
        if place == "looks":
            loop.see(loop.params["blocks.2.0.weight"])
        if place == "forward":
            loop.loss(step + 1)
        if place == "backward":
            loop.loss(step + 1).backward()
        if place is not None:
            raise ValueError(place)

    for step, place in enumerate(["update", None, "looks", "forward", None, "update", "backward", None]):
        try:
            training_step(step, place)
        except ValueError:
            loop.see(*loop.params.values())
        loop.see(loop.params["blocks.4.2.weight"], loop.params["embed.weight"])


def two_optimizers(loop):
    """Train each half of the model with its optimizer, in shared stages; one half is frozen for a step."""
    weights = [param for name, param in loop.params.items() if name.endswith("weight")]
    biases = [param for name, param in loop.params.items() if name.endswith("bias")]
    first, second = loop.adamw(weights, weight_decay=0.1), torch.optim.SGD(biases, lr=0.1, momentum=0.9)

    @hw.trace
    def training_step(step):
        first.zero_grad()
        loop.loss(step).backward()
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()
        return step

    for step in range(STEPS):
        for bias in biases:
            bias.requires_grad_(step != 2)
        training_step(step)
        first.param_groups[0]["lr"] *= 0.5


def plans_anew(loop):
    """Enlarge the batch, unfreeze a parameter, and load the state into the model and a new optimizer."""
    frozen = loop.params["blocks.0.0.weight"].requires_grad_(False)
    optimizer = loop.adamw()
    loop.step(optimizer, 0)
    loop.step(optimizer, 1, 2 * BATCH)
    frozen.requires_grad_(True)
    loop.step(optimizer, 2)
    path = loop.folder / "state.mdl"
    hw.save({"model": loop.model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loop.step(optimizer, 3)
    state = hw.load(path)
    loop.see(*(value for value in state["model"].values()))
    optimizer = loop.adamw()
    loop.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loop.step(optimizer, 3)
    loop.step(torch.optim.SGD(loop.model.parameters(), lr=0.1), 4)


def scales(loop):
    """Skip steps that are not finite with a dynamic loss scale; generate and evaluate between steps."""
    optimizer, scaler = loop.adamw(), hw.amp.GradScaler("dynamic", init_scale=16.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loop.loss(step) * (torch.inf if step == 1 else 1)).backward()
        loop.see(scaler.step(optimizer, max_gradient_norm=0.5))
        scaler.update()
        loop.model.eval()
        with torch.inference_mode(), loop.autocast():
            tokens = loop.tokens(50)[:1]
            for _ in range(3):
                tokens = torch.cat([tokens, loop.model(tokens)[:, -1:].argmax(-1)], 1)
        loop.model.train()


def accumulates(loop):
    """Accumulate gradients over several traced steps; one of these steps is undone."""
    optimizer = loop.adamw()

    @hw.trace
    def add(step, *, fails=False):
        (loop.loss(step) / 2).backward()
        if fails:
            raise ValueError

    @hw.trace
    def update(step):
        optimizer.step()
        loop.loss(step + 20)  # a forward uses the update, so that it cannot be undone
        raise ValueError

    for step in range(STEPS):
        add(step)
        with pytest.raises(ValueError):
            add(step + 10, fails=True)
        loop.see(loop.params["blocks.1.0.weight"].grad)
        if step % 2:
            with pytest.raises(ValueError):
                update(step)
            loop.see(loop.params["blocks.1.0.weight"].grad is None)
            optimizer.zero_grad()


ON_DISK = {
    "weights": {"tier": "disk", "gradient_tier": "memory"},
    "gradients": {"tier": "memory", "gradient_tier": "disk"},
    "both": {"tier": "disk", "gradient_tier": "disk"},
}


def run(fabric, work, folder, options):
    """Return the values that a loop sees on this rank, and its final weights."""
    if fabric.size > 1:
        membership.joined.value = fabric
    folder.mkdir(exist_ok=True)
    disk = {} if "tier" not in options else {"disk": str(folder / "disk")}
    with traces_of_ranks(folder.parent / "traces"):
        loop = Loop(folder, **disk, **options)
        work(loop)
    loop.see(*loop.params.values(), *loop.model.buffers())
    return loop.seen


@pytest.fixture
def small_blocks(monkeypatch):
    """Make pieces, groups and blocks so small that a stage has many."""
    monkeypatch.setattr("headwater.store.layout.PIECE_ELEMENTS", 60)
    monkeypatch.setattr("headwater.store.layout.GROUP_BYTES", PAGE_BYTES)
    monkeypatch.setattr("headwater.store.disk._WIRE_BLOCK_BYTES", PAGE_BYTES)


@pytest.mark.parametrize(
    ("work", "ranks", "hosts", "precision", "on_disk"),
    [
        (looks_and_changes, 2, 2, torch.bfloat16, "weights"),
        (fails, 4, 2, None, "both"),
        (two_optimizers, 3, 1, torch.bfloat16, "both"),
        (plans_anew, 2, 1, None, "weights"),
        (scales, 2, 1, torch.float16, "gradients"),
        (accumulates, 2, 1, None, "both"),
    ],
)
def test_loops_on_disk_equal_loops_in_memory(work, ranks, hosts, precision, on_disk, small_blocks, tmp_path):
    given = {"precision": precision, "num_slabs": 5 if ranks // hosts > 2 else 4}
    start = functools.partial(run, work=work)
    here = ON_DISK[on_disk] | {"verify_disk": True}
    wanted = run_ranks(functools.partial(start, folder=tmp_path / "memory", options=given), ranks, hosts)
    found = run_ranks(functools.partial(start, folder=tmp_path / "disk", options=here | given), ranks, hosts)
    for mine, theirs in zip(found, wanted, strict=True):
        assert len(mine) == len(theirs)
        assert all((value == other).all() for value, other in zip(mine, theirs, strict=True))
    if precision is None:  # otherwise rounding differs, and AdamW amplifies the difference
        (one,) = run_ranks(functools.partial(start, folder=tmp_path / "one", options=given), 1)
        for value, expected in zip(found[0], one, strict=True):
            assert_close(torch.tensor(value), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert not list((tmp_path / "disk" / "disk").rglob("*.bin")), "files of the disk tier have no names"


def fails_alone(loop, *, after_update):
    """Raise an error on the second rank only, in its second step, which is undone there."""
    optimizer = loop.adamw()

    @hw.trace
    def training_step(step):
        optimizer.zero_grad()
        loss = loop.loss(step)
        if not after_update and step and hw.distributed.task_id():
            raise ValueError("alone")
        loss.backward()
        optimizer.step()
        if after_update and step and hw.distributed.task_id():
            raise ValueError("alone")

    for step in range(STEPS):
        training_step(step)


@pytest.mark.parametrize("after_update", [False, True])
def test_an_error_on_one_rank_ends_all_ranks(after_update, tmp_path):
    work = functools.partial(fails_alone, after_update=after_update)
    options = ON_DISK["both"] | {"num_slabs": 4}
    with pytest.raises(AssertionError) as failed:
        run_ranks(functools.partial(run, work=work, folder=tmp_path / "alone", options=options))
    assert "ValueError: alone" in str(failed.value) and "is gone" in str(failed.value)
