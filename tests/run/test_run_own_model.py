"""A user's model through `run`: equal to plain PyTorch, resumed bit-identically, evaluated with metrics."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from own_models import (
    MNIST,
    PARAMS,
    STREAMED,
    Classifier,
    assert_equal_checkpoints,
    clusters,
    get_eval_dataloader,
    get_train_dataloader,
    history,
    read_mnist,
    write_params,
)
from torch.utils.data import DataLoader, TensorDataset

from headwater.core.seeding import derive_seed
from headwater.run import PyTorchBaseModel, run
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.pretrained import checkpoint_weights


def train(params, *options, model=Classifier, data=get_train_dataloader, evaluation=get_eval_dataloader):
    words = ["--params", str(params), "--mode", "train_and_eval", *map(str, options)]
    run(model, data, evaluation, argv=words)


def fixed_order(params):
    """Return a loader with its own generator, which yields the same batches in plain PyTorch and here."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*clusters(64, 1)), batch_size=8, shuffle=True, generator=generator)


def plain_losses(base, batches, steps, optimizer, max_norm):
    """Losses and gradient norms of plain PyTorch steps of the model of `base`."""
    found = []
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        torch.manual_seed(derive_seed(5, "micro_batch", step, 0))
        optimizer.zero_grad()
        loss = base(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(base.model.parameters(), max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("options", [(), STREAMED], ids=["in memory", "streamed"])
def test_steps_equal_those_of_plain_pytorch(tmp_path, options):
    params = write_params(tmp_path)
    train(params, *options, data=fixed_order)
    found = history(tmp_path / "run")
    torch.manual_seed(5)
    base = Classifier(yaml.safe_load(PARAMS))
    decayed = [p for p in base.model.parameters() if p.dim() > 1]
    others = [p for p in base.model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    expected = plain_losses(base, fixed_order({}), 6, optimizer, 1.0)
    assert [(r["loss"], r["gradient_norm"]) for r in found if r["kind"] == "train"] == expected
    weights = dict(checkpoint_weights(tmp_path / "run" / "checkpoint_6"))
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name

    base.model.eval()
    points, labels = clusters(20, 2)
    right = (base.model(points).argmax(1) == labels).float().mean()
    assert found[-1]["metrics"]["accuracy"] == pytest.approx(right.item())
    assert found[-1]["loss"] == pytest.approx(base.loss_fn(base.model(points), labels).item(), rel=1e-5)


def test_a_run_leaves_its_params_and_evaluates_with_metrics(tmp_path, capsys):
    train(write_params(tmp_path), *STREAMED)
    out, err = capsys.readouterr()
    assert err == ""
    assert "step 6/6" in out and "samples/s" in out and "accuracy" in out and "done: step 6" in out
    records = history(tmp_path / "run")
    assert [(r["kind"], r["step"]) for r in records] == [
        *(("train", step) for step in (1, 2, 3)), ("validate", 3),
        *(("train", step) for step in (4, 5, 6)), ("validate", 6),
    ]  # fmt: skip
    found = records[-1]
    assert found["metrics"].keys() == {"accuracy", "mean_loss"}
    assert found["metrics"]["mean_loss"] == pytest.approx(found["loss"], rel=1e-6), "20 samples, 8 at a time"
    kept = yaml.safe_load((tmp_path / "run" / "params.yaml").read_text())
    assert kept["model"] == {"widths": [24, 24, 24], "dropout": 0.1}
    assert kept["runconfig"]["model_dir"] == str(tmp_path / "run")

    words = ["--params", str(tmp_path / "run"), "--mode", "eval"]
    run(Classifier, get_train_dataloader, get_eval_dataloader, argv=words)
    loss, *metrics = capsys.readouterr().out.splitlines()
    assert float(loss.split()[2]) == pytest.approx(found["loss"], abs=1e-6)
    assert {line.split()[0]: float(line.split()[1]) for line in metrics} == pytest.approx(
        found["metrics"], abs=1e-6
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_in_two_parts_equals_an_uninterrupted_run(tmp_path, workers):
    """Noise of the data set, order, dropout, BatchNorm, evaluations: all as if it had never stopped."""
    whole, parts = write_params(tmp_path, "whole"), write_params(tmp_path, "parts")
    options = ("--train_input.num_workers", workers, *STREAMED)
    train(whole, *options, "--max_steps", 18, "--eval_frequency", 6)
    train(parts, *options, "--max_steps", 11, "--eval_frequency", 6)  # into the second pass of 8 batches
    train(parts, *options, "--max_steps", 18, "--eval_frequency", 6)
    first = [r for r in history(tmp_path / "whole") if (r["kind"], r["step"]) != ("validate", 11)]
    second = [r for r in history(tmp_path / "parts") if (r["kind"], r["step"]) != ("validate", 11)]
    assert first == second
    assert_equal_checkpoints(tmp_path / "whole" / "checkpoint_18", tmp_path / "parts" / "checkpoint_18")


def test_a_killed_run_resumes_bit_identically(tmp_path, capsys):
    params, folder = write_params(tmp_path), tmp_path / "run"
    script = Path(__file__).with_name("own_models.py")
    words = ["--params", str(params), "--mode", "train", *STREAMED, "--max_steps", "1000000"]
    process = subprocess.Popen([sys.executable, str(script), *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(complete_checkpoints(folder)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = max(int(path.name.split("_")[1]) for path in complete_checkpoints(folder)) + 4
    train(params, *STREAMED, "--max_steps", end, "--eval_frequency", 0)
    out = capsys.readouterr().out
    assert "continuing from step" in out and "batches that the run has already used" in out
    train(write_params(tmp_path, "undisturbed"), *STREAMED, "--max_steps", end, "--eval_frequency", 0)
    assert history(folder) == history(tmp_path / "undisturbed")
    name = f"checkpoint_{end}"
    assert_equal_checkpoints(folder / name, tmp_path / "undisturbed" / name)


class SeekableLoader:
    """Begins anywhere, and counts what it has read."""

    def __init__(self):
        self.position, self.read = 0, 0

    def __iter__(self):
        points, labels = clusters(64, 1)
        for start in range(self.position, 8):
            self.read += 1
            self.position = start + 1
            yield points[8 * start :][:8], labels[8 * start :][:8]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]


def test_a_loader_that_can_seek_is_not_read_from_the_start(tmp_path):
    loaders = []

    def make(params):
        loaders.append(SeekableLoader())
        return loaders[-1]

    whole, parts = write_params(tmp_path, "whole"), write_params(tmp_path, "parts")
    train(whole, "--max_steps", 10, "--eval_frequency", 0, data=make)
    train(parts, "--max_steps", 6, "--eval_frequency", 0, data=make)
    train(parts, "--max_steps", 10, "--eval_frequency", 0, data=make)
    assert history(tmp_path / "whole") == history(tmp_path / "parts")
    assert loaders[2].read <= 1 + 4, "one batch for the shapes, and those of four steps"


@pytest.mark.parametrize(
    ("state", "place", "found"),
    [
        ({"position": (1, 2)}, "state/data/loader/position", "a tuple"),
        ({"read": {3: True}}, "state/data/loader/read", "the key 3"),
    ],
)
def test_a_position_that_no_checkpoint_can_hold_is_an_error_of_the_first_step(
    tmp_path, capsys, state, place, found
):
    class Loader(SeekableLoader):
        def state_dict(self):
            return state

    with pytest.raises(SystemExit):
        train(write_params(tmp_path), "--eval_frequency", 0, data=lambda params: Loader())
    printed = capsys.readouterr().err
    assert place in printed and found in printed and "state_dict()" in printed
    assert not history(tmp_path / "run")


def test_micro_batches_are_those_that_the_params_ask_for(tmp_path):
    train(write_params(tmp_path), "--micro_batch_size", 4, "--eval_frequency", 0)
    assert "2 × 4 samples" in (tmp_path / "run" / "plan.txt").read_text()


def test_epochs_are_as_long_as_the_loader_says(tmp_path):
    text = PARAMS.replace("max_steps: 6", "num_epochs: 2").replace("batch_size: 8", "batch_size: 16")
    train(write_params(tmp_path, text=text), "--eval_frequency", 0)
    assert history(tmp_path / "run")[-1]["step"] == 8


def test_mixed_precision_is_asked_for_in_the_model_section(tmp_path):
    text = PARAMS.replace("dropout: 0.1", "dropout: 0.1\n  mixed_precision: true\n  fp16_type: bfloat16")
    seen = []

    class Watching(Classifier):
        def __init__(self, params, device=None):
            seen.append(params["model"]["mixed_precision"])
            super().__init__(params, device)

        def __call__(self, data):
            seen.append(self.model.head(torch.zeros(1, 24)).dtype)
            return super().__call__(data)

    train(write_params(tmp_path, text=text), model=Watching)
    assert set(seen) == {True, torch.bfloat16}


@pytest.mark.skipif(not MNIST.is_dir(), reason="the MNIST files are not here")
def test_digits_are_learned(tmp_path):
    def loader(name, count, *, shuffle):
        return DataLoader(TensorDataset(*read_mnist(name, count)), batch_size=50, shuffle=shuffle)

    text = PARAMS.replace("[24, 24, 24]", "[64, 64]\n  inputs: 784\n  classes: 10")
    train(
        write_params(tmp_path, text=text.replace("max_steps: 6", "max_steps: 60")),
        *STREAMED,
        "--eval_frequency", 60,
        data=lambda params: loader("train", 2000, shuffle=True),
        evaluation=lambda params: loader("t10k-first5000", 1000, shuffle=False),
    )  # fmt: skip
    found = history(tmp_path / "run")[-1]
    assert found["metrics"]["accuracy"] > 0.8


def test_a_transformers_model_of_dictionaries(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Bert(PyTorchBaseModel):
        def __init__(self, params, device=None):
            config = transformers.BertConfig(**params["model"])
            self.model = transformers.BertForSequenceClassification(config)
            super().__init__(params, self.model, device)

        def __call__(self, data):
            return self.model(**data).loss

    def sentences(params):
        generator = torch.Generator().manual_seed(0)
        return [
            transformers.BatchEncoding(
                {
                    "input_ids": torch.randint(0, 50, (4, 6), generator=generator),
                    "attention_mask": torch.ones(4, 6, dtype=torch.int64),
                    "labels": torch.randint(0, 2, (4,), generator=generator),
                }
            )
            for _ in range(5)
        ]

    keys = yaml.safe_load(PARAMS)
    keys["model"] = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 8,
    }  # fmt: skip
    del keys["train_input"], keys["eval_input"]
    keys["optimizer"]["weight_decay"] = 0.0
    keys["runconfig"].update(max_steps=5, model_dir=str(tmp_path / "run"))
    params = tmp_path / "bert.yaml"
    params.write_text(yaml.safe_dump(keys))
    train(params, *STREAMED, model=Bert, data=sentences, evaluation=sentences)
    torch.manual_seed(5)
    base = Bert(keys)
    base.model.train()
    optimizer = torch.optim.AdamW(base.model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    expected = plain_losses(base, map(dict, sentences({})), 5, optimizer, 1.0)
    trained = [r for r in history(tmp_path / "run") if r["kind"] == "train"]
    assert [(r["loss"], r["gradient_norm"]) for r in trained] == expected
