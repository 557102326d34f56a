"""`StreamedStrategy` equals plain Lightning: losses, metrics, weights, predictions, checkpoints."""

import copy
import logging
import shutil

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from places import assert_same_tensors, backend, bytes_in_files, every_plan, text_rows
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headwater
from headwater.api.compile import streamed
from headwater.core.errors import ConfigError
from headwater.integrations.lightning import FileCheckpointIO, StreamedStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*have overridden .* in your LightningModule"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]
ROWS = text_rows(110, 20)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def layers(num_inputs, num_outputs):
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Linear(num_inputs, 16), *blocks, nn.Linear(16, num_outputs))


class NextByte(pl.LightningModule):
    """A module that predicts the next byte of a text. Its steps call `self.model`."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(256, 16), layers(16, 256))
        self.losses = []

    def logits(self, rows):
        return self.model(rows)

    def loss(self, rows):
        return functional.cross_entropy(self.logits(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.loss(*batch))

    def predict_step(self, batch, batch_idx):
        return self.logits(*batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Itself(NextByte):
    """A module whose steps call `self(...)`."""

    def forward(self, rows):
        return self.model(rows)

    def logits(self, rows):
        return self(rows)


class InParts(NextByte):
    """A module whose steps call its parts one by one and read a parameter; two parts share a weight."""

    def __init__(self):
        super().__init__()
        self.model = None
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 256)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, rows):
        hidden = self.embedding(rows)
        for block in self.blocks:
            hidden = hidden + self.scale * block(hidden).relu()
        return self.head(hidden)


class Adversaries(pl.LightningModule):
    """Two models and two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = layers(4, 20), layers(20, 1)
        self.losses = []

    def training_step(self, batch, batch_idx):
        real = batch[0] / 255
        fake_optimizer, real_optimizer = self.optimizers()
        noise = torch.randn(len(real), 4)

        self.toggle_optimizer(fake_optimizer)
        loss = self.judged(self.generator(noise), 1.0)
        fake_optimizer.zero_grad()
        self.manual_backward(loss)
        fake_optimizer.step()
        self.untoggle_optimizer(fake_optimizer)
        self.losses.append(loss.item())

        def closure():
            loss = self.judged(real, 1.0) + self.judged(self.generator(noise).detach(), 0.0)
            real_optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(real_optimizer, gradient_clip_val=0.1)
            self.losses.append(loss.item())

        with real_optimizer.toggle_model():
            real_optimizer.step(closure=closure)

    def judged(self, rows, truth):
        logits = self.discriminator(rows)
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))

    def predict_step(self, batch, batch_idx):
        return self.discriminator(batch[0] / 255)

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9),
        ]


class SeedEachStep(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        torch.manual_seed(trainer.global_step)


def trainer_of(place, folder, *, callbacks=(), **options):
    """Return a Trainer that streams if `place` is a backend, or a plain one if it is `None`."""
    if place is not None:
        options["strategy"] = StreamedStrategy(place)
    if "max_epochs" not in options:
        options = {"max_steps": 12, "val_check_interval": 5, "check_val_every_n_epoch": None, **options}
    return pl.Trainer(
        callbacks=[SeedEachStep(), *callbacks],
        default_root_dir=folder,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "devices": 1} | options,
    )


def fit(trainer, module, ckpt_path=None):
    validation = validation_batches() if isinstance(module, NextByte) else None
    trainer.fit(module, DataLoader(TensorDataset(ROWS[:90]), batch_size=8), validation, ckpt_path=ckpt_path)
    return module


def validation_batches():
    return DataLoader(TensorDataset(ROWS[90:]), batch_size=16)


def trained(place, folder, kind=NextByte, **options):
    """Return (trainer, module) after training."""
    torch.manual_seed(0)
    module = kind()
    trainer = trainer_of(place, folder, **options)
    return trainer, fit(trainer, module)


def assert_same_run(one, other):
    """Check that two runs, each (trainer, module), are equal."""
    assert one[1].losses == other[1].losses
    assert one[0].callback_metrics == other[0].callback_metrics
    assert_same_tensors(one[1].state_dict(), other[1].state_dict())
    outputs = (torch.cat(trainer.predict(module, validation_batches())) for trainer, module in (one, other))
    assert torch.equal(*outputs)


def streamed_parts(module):
    return [name for name, part in module.named_modules() if is_streamed(part)]


def is_streamed(module):
    return streamed(module) is not None and streamed(module).engine is not None


@every_plan
@pytest.mark.parametrize(
    ("kind", "parts"), [(NextByte, ["model"]), (Itself, [""]), (Adversaries, ["generator", "discriminator"])]
)
def test_run_equals_plain_lightning(kind, parts, plan, tmp_path):
    ours = trained(backend(plan, tmp_path), tmp_path, kind)
    assert streamed_parts(ours[1]) == parts
    assert_same_run(ours, trained(None, tmp_path, kind))


@every_plan
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ],
)
def test_clipping_and_accumulation_equal_plain_lightning(options, plan, tmp_path):
    ours = trained(backend(plan, tmp_path), tmp_path, **options)
    plain = trained(None, tmp_path, **options)
    assert_same_run(ours, plain)
    assert ours[1].losses != trained(None, tmp_path)[1].losses


def test_parts_with_shared_weights_equal_plain_lightning(tmp_path):
    options = {"inference_mode": False, "gradient_clip_val": 0.5}
    ours = trained(backend("slabs", tmp_path), tmp_path, InParts, **options)
    assert streamed_parts(ours[1]) == ["embedding", "blocks.0", "blocks.1", "blocks.2"]
    assert_same_run(ours, trained(None, tmp_path, InParts, **options))


@pytest.mark.parametrize("plan", ["resident", "disk"])
@pytest.mark.parametrize("kind", [NextByte, Adversaries])
def test_each_strategy_resumes_the_other_s_checkpoints(kind, plan, tmp_path):
    """Lightning resumes at the end of an epoch; `SeedEachStep` makes randomness depend on the step."""
    _, whole = trained(None, tmp_path, kind, max_epochs=2)
    for place in (None, backend(plan, tmp_path)):
        trainer, first = trained(place, tmp_path, kind, max_epochs=1)
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        for goes_on_in in (None, backend(plan, tmp_path)):
            second = fit(trainer_of(goes_on_in, tmp_path, max_epochs=2), kind(), tmp_path / "first.ckpt")
            assert first.losses + second.losses == whole.losses
            assert_same_tensors(second.state_dict(), whole.state_dict())


def test_checkpoints_are_equal_and_complete_or_absent(tmp_path, monkeypatch):
    contents = []
    for place in (None, backend("disk", tmp_path)):
        trainer, _ = trained(place, tmp_path)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        contents.append(torch.load(tmp_path / "a.ckpt"))
    plain, ours = contents
    assert plain.keys() == ours.keys()
    assert_same_tensors(ours["state_dict"], plain["state_dict"])
    moments, expected = (c["optimizer_states"][0]["state"] for c in contents)
    assert moments.keys() == expected.keys()
    for number in expected:
        assert_same_tensors(moments[number], expected[number])

    def broken(checkpoint, path):
        path.write_bytes(b"half")
        raise OSError("no room")

    before = (tmp_path / "a.ckpt").read_bytes()
    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="no room"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "store"]


def test_a_save_removes_what_a_killed_save_has_left(tmp_path, monkeypatch):
    left = []

    def keep_a_copy(_, path):
        path.write_bytes(b"half")
        shutil.copytree(path.parent, tmp_path / f"{path.parent.name}-killed")
        left.extend(tmp_path.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", keep_a_copy)
        FileCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt")
    assert len(left) == 2 and not [path for path in left if path.suffix == ".ckpt"]
    FileCheckpointIO().save_checkpoint({}, tmp_path / "b.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_checkpoints_are_written_without_being_whole_in_memory(tmp_path):
    class Wide(NextByte):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Embedding(256, 2048), nn.Linear(2048, 256))

    trainer, _ = trained(backend("disk", tmp_path), tmp_path, Wide, max_steps=1)
    with bytes_in_files() as sizes:
        trainer.save_checkpoint(tmp_path / "wide.ckpt")
    assert sizes.count(2048 * 256 * 4) >= 6  # two weights and two moments of each


@pytest.mark.parametrize("after", [0, 2])
def test_a_copy_of_a_module_is_a_plain_module(after, tmp_path):
    """`after`: number of steps before the copy. Streaming begins at the first."""

    class Average(Callback):
        """A callback that keeps a running average of the weights and evaluates it."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == after:
                self.average = copy.deepcopy(module.model)
                self.outputs = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step <= after:
                return
            with torch.no_grad():
                for kept, new in zip(self.average.parameters(), module.model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
                self.outputs.append(self.average.eval()(batch[0]).sum().item())

    runs = []
    for place in (None, backend("slabs", tmp_path)):
        average = Average()
        runs.append((average, trained(place, tmp_path, callbacks=[average])))
    (plain_average, plain), (our_average, ours) = runs
    assert_same_run(ours, plain)
    assert our_average.outputs and our_average.outputs == plain_average.outputs
    assert not streamed_parts(our_average.average)


def test_streamed_module_continues_in_another_trainer(tmp_path):
    runs = []
    for place in (None, backend("slabs", tmp_path)):
        _, module = trained(place, tmp_path, NextByte)
        trainer = trainer_of(place, tmp_path)
        runs.append((trainer, fit(trainer, module)))
    assert_same_run(*runs)
    assert len(runs[0][1].losses) == 24


def test_mixed_precision_equals_plain_lightning(tmp_path):
    ours = trained(backend("slabs", tmp_path), tmp_path, precision="bf16-mixed")
    plain = trained(None, tmp_path, precision="bf16-mixed")
    assert streamed(ours[1].model).engine.plan.precision.name == "bf16"
    assert_same_run(ours, plain)


def test_a_model_built_by_the_strategy_starts_from_the_same_values(tmp_path):
    class Late(NextByte):
        def __init__(self):
            super().__init__()
            del self.model

        def configure_model(self):
            torch.manual_seed(3)
            self.model = nn.Sequential(
                nn.Embedding(256, 2048), nn.Linear(2048, 256)
            )  # large, therefore in files

    ours = trained(backend("disk", tmp_path), tmp_path, Late, max_steps=3)
    assert_same_run(ours, trained(None, tmp_path, Late, max_steps=3))


def test_the_plain_backend_is_plain_lightning(tmp_path):
    ours = trained(headwater.backend("CPU"), tmp_path)
    assert streamed_parts(ours[1]) == []
    assert_same_run(ours, trained(None, tmp_path))


def test_options_of_a_backend_may_be_given_directly():
    strategy = StreamedStrategy(num_slabs=3, tier="memory")
    assert strategy.root_device == torch.device("cpu")
    with pytest.raises(ConfigError, match="num_slabs"):
        StreamedStrategy(num_slab=3)
    with pytest.raises(ConfigError, match=r"headwater\.backend"):
        StreamedStrategy(headwater.backend("CSX"), num_slabs=3)


@pytest.mark.parametrize(
    ("option", "found"),
    [({"devices": 2}, "devices=2, but .* 1 rank on"), ({"num_nodes": 2}, "num_nodes=2, but .* 1 host")],
)
def test_devices_and_nodes_that_the_backend_does_not_have_are_refused(option, found, tmp_path):
    trainer = trainer_of(backend("slabs", tmp_path), tmp_path, **option)
    with pytest.raises(ConfigError, match=found):
        fit(trainer, NextByte())
