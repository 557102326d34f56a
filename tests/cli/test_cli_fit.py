"""Training by command line: what it leaves; equal to plain PyTorch, and to itself after a resume."""

import itertools
import os

import pytest
import torch
import yaml
from run_samples import assert_same_checkpoint, history, write_params

from headwater.config import load_params
from headwater.core.seeding import derive_seed
from headwater.models.registry import build_model
from headwater.trainer.datasets import open_data
from headwater.trainer.pretrained import checkpoint_weights


@pytest.mark.pictures
def test_a_run_leaves_everything_in_its_model_dir(headwater, params, tmp_path):
    code, out, err = headwater("fit", params)
    assert (code, err) == (0, "")
    assert "\x1b" not in out, "no escape codes where stdout is not a terminal"
    assert "step 6/6" in out and "validation loss" in out and "tokens/s" in out
    run = tmp_path / "run"
    for name in (
        "params.yaml",
        "plan.txt",
        "history.jsonl",
        "loss_curve.png",
        "tokenizer.json",
        "train",
        "eval",
    ):
        assert (run / name).exists(), name
    assert [path.name for path in sorted(run.glob("checkpoint_*"))] == ["checkpoint_3", "checkpoint_6"]
    records = history(run)
    assert [(r["kind"], r["step"]) for r in records] == [
        *(("train", step) for step in (1, 2, 3)), ("validate", 3),
        *(("train", step) for step in (4, 5, 6)), ("validate", 6),
    ]  # fmt: skip
    assert records[-1]["loss"] < records[0]["loss"]


def test_steps_equal_those_of_plain_pytorch(headwater, params, tmp_path):
    assert headwater("fit", params, "--eval_frequency=0")[0] == 0
    config = load_params(params).init
    batches = open_data(load_params(params).fit.train_dataloader, config.model, seed=3, repeat=True)
    model = build_model(config.model, seed=config.seed)
    optimizer = config.optimizer_spec.build(config.optimizer_spec.groups(model.named_parameters()))
    expected = []
    for step, batch in enumerate(itertools.islice(batches.create_dataloader(), 6), start=1):
        torch.manual_seed(derive_seed(config.seed, "micro_batch", step, 0))
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.schedule.value(step - 1)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    assert [(r["loss"], r["gradient_norm"]) for r in history(tmp_path / "run")] == expected
    weights = dict(checkpoint_weights(tmp_path / "run" / "checkpoint_6"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_run_in_two_parts_equals_an_uninterrupted_run(headwater, data, tmp_path):
    whole, parts = (write_params(tmp_path, data, name) for name in ("whole", "parts"))
    assert headwater("fit", whole)[0] == 0
    # 4 steps: the checkpoint at the end of the first part lies between the evaluations.
    assert headwater("fit", parts, "--max_steps", 4, "trainer.init.loop.eval_frequency=3")[0] == 0
    code, out, _ = headwater("fit", tmp_path / "parts", "--max_steps", 6)
    assert code == 0 and "continuing from step 4" in out
    first = [
        record
        for record in history(tmp_path / "whole")
        if (record["kind"], record["step"]) != ("validate", 4)
    ]
    second = [
        record
        for record in history(tmp_path / "parts")
        if (record["kind"], record["step"]) != ("validate", 4)
    ]
    assert first == second
    assert_same_checkpoint(tmp_path / "whole" / "checkpoint_6", tmp_path / "parts" / "checkpoint_6")


def test_resuming_in_the_middle_of_an_epoch_does_not_depend_on_workers(headwater, data, tmp_path):
    whole, parts = (write_params(tmp_path, data, name) for name in ("whole", "parts"))
    options = ("--eval_frequency", 0, "--batch_size", 100)  # 4 steps of 100 are more than an epoch
    assert headwater("fit", whole, *options, "--max_steps", 5)[0] == 0
    assert headwater("fit", parts, *options, "--max_steps", 2)[0] == 0
    workers = "trainer.fit.train_dataloader.num_workers=2"
    assert headwater("fit", parts, *options, "--max_steps", 5, workers)[0] == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert_same_checkpoint(tmp_path / "whole" / "checkpoint_5", tmp_path / "parts" / "checkpoint_5")


def test_micro_batches_are_the_same_after_a_resume(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 3, "--micro_batch_size", 2)[0] == 0
    text = yaml.safe_load((tmp_path / "run" / "params.yaml").read_text())
    del text["trainer"]["init"]["backend"]["micro_batch_size"]
    (tmp_path / "run" / "params.yaml").write_text(yaml.safe_dump(text))
    assert headwater("fit", tmp_path / "run", "--max_steps", 4)[0] == 0
    assert "4 × 2 samples" in (tmp_path / "run" / "plan.txt").read_text()


def test_optimizer_state_in_bf16_has_the_same_bits_in_parts_and_on_disk(headwater, data, tmp_path):
    narrow = "trainer.init.backend.optimizer_state=bf16"
    whole, parts = (write_params(tmp_path, data, name) for name in ("whole", "parts"))
    code, out, _ = headwater("fit", whole, "--max_steps", 4, narrow)
    assert code == 0 and "optimizer state: bf16, rounded stochastically; the run is not exact" in out
    disk = ("--disk", tmp_path / "tier", "trainer.init.backend.tier=disk")
    assert headwater("fit", parts, "--max_steps", 2, narrow, *disk)[0] == 0
    assert headwater("fit", parts, "--max_steps", 4, narrow)[0] == 0
    assert_same_checkpoint(tmp_path / "whole" / "checkpoint_4", tmp_path / "parts" / "checkpoint_4")
    code, out, _ = headwater("fit", parts, "--max_steps", 5, "trainer.init.backend.optimizer_state=exact")
    assert code == 0 and "not exact" not in out


def test_the_disk_tier_gives_the_same_bits(headwater, data, tmp_path):
    memory, disk = (write_params(tmp_path, data, name) for name in ("memory", "disk"))
    assert headwater("fit", memory, "--max_steps", 3)[0] == 0
    code, out, _ = headwater(
        "fit", disk, "--max_steps", 3, "--disk", tmp_path / "tier", "trainer.init.backend.tier=disk"
    )
    assert code == 0 and "masters and optimizer state: disk" in out
    assert history(tmp_path / "memory") == history(tmp_path / "disk")
    assert list((tmp_path / "tier").iterdir()) == [], "the files of the tier are gone"


def test_a_start_from_an_older_checkpoint_sets_later_ones_aside(headwater, params, tmp_path):
    run = tmp_path / "run"
    assert headwater("fit", params)[0] == 0
    for name in ("checkpoint_6.superseded", "checkpoint_6.superseded2"):
        code, _, error = headwater(
            "fit", params, f"--checkpoint_path={run / 'checkpoint_3'}", "--max_steps=5"
        )
        assert code == 0
        assert f"set aside: {run / name}" in error
        assert {path.name for path in run.glob("checkpoint_?")} == {"checkpoint_3", "checkpoint_5"}
        assert (run / name / "manifest.json").is_file()
        (run / "checkpoint_5").rename(run / "checkpoint_6")
    (run / "checkpoint_6").rename(run / "checkpoint_5")
    code, _, error = headwater("fit", params)
    assert (code, "set aside" in error) == (0, False)
    assert [r["step"] for r in history(run) if r["kind"] == "train"] == [*range(1, 7)]


def test_a_run_that_has_nothing_to_do_sets_nothing_aside(headwater, params, tmp_path):
    run = tmp_path / "run"
    assert headwater("fit", params)[0] == 0
    assert headwater("fit", params, f"--checkpoint_path={run / 'checkpoint_3'}", "--max_steps=3")[0] == 0
    assert (run / "checkpoint_6").is_dir()


def test_a_finished_run_reports_nothing_to_do(headwater, params):
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    code, _, error = headwater("fit", params, "--max_steps", 1)
    assert code == 0 and "nothing to do" in error


def test_a_run_can_start_from_the_weights_only(headwater, data, tmp_path, caplog):
    first, second = (write_params(tmp_path, data, name) for name in ("first", "second"))
    assert headwater("fit", first, "--max_steps", 3)[0] == 0
    start = tmp_path / "first" / "checkpoint_3"
    callback = "trainer.init.callbacks=[LoadCheckpointStates: {load_checkpoint_states: model}]"
    code, _, _ = headwater("fit", second, "--max_steps", 1, "--checkpoint_path", start, callback)
    assert code == 0
    assert history(tmp_path / "second")[0]["step"] == 1
    assert history(tmp_path / "second")[0]["loss"] < history(tmp_path / "first")[0]["loss"]
    code, _, _ = headwater("fit", second, "--max_steps", 2, callback)
    assert code == 0 and "LoadCheckpointStates is not used, since this run continues" in caplog.text
    assert (tmp_path / "second" / "checkpoint_2").exists()


def test_validate_gives_the_loss_of_the_last_evaluation(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 3)[0] == 0
    code, out, _ = headwater("validate", tmp_path / "run")
    assert code == 0
    assert float(out.split()[2]) == pytest.approx(history(tmp_path / "run")[-1]["loss"], abs=2e-6)


def test_validate_all_evaluates_every_checkpoint(headwater, params, data, tmp_path):
    params.write_text(params.read_text() + "  validate_all:\n    val_dataloaders: *val\n")
    assert headwater("fit", params)[0] == 0
    code, out, _ = headwater("validate", params, "--all")
    assert code == 0
    expected = [r["loss"] for r in history(tmp_path / "run") if r["kind"] == "validate"]
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == [str(tmp_path / "run" / f"checkpoint_{step}") for step in (3, 6)]
    assert [float(line[4]) for line in lines] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("mode", "kinds"), [("train", {"train"}), ("train_and_eval", {"train", "validate"})])
def test_the_model_zoos_command_line(params, tmp_path, capsys, mode, kinds):
    from headwater.run import main

    options = ["--num_csx", "1", "--num_steps", "3", "--model_dir", str(tmp_path / "other")]
    assert main(["--params", str(params), *options, "--mode", mode]) == 0
    assert {record["kind"] for record in history(tmp_path / "other")} == kinds
    capsys.readouterr()
    assert main(["--params", str(params), *options, "--mode", "eval"]) == 0
    assert capsys.readouterr().out.startswith("validation loss")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_the_model_zoos_command_line_starts_ranks(params, two, tmp_path):
    from headwater.run import main

    options = ["--num_csx", "2", "--model_dir", str(tmp_path / "other")]
    assert main(["--params", str(params), *options, "--mode", "train_and_eval"]) == 0
    assert history(tmp_path / "other") == history(two)


def test_a_dynamic_loss_scale_skips_steps_and_survives_a_resume(headwater, data, tmp_path):
    whole, parts = (write_params(tmp_path, data, name) for name in ("whole", "parts"))
    options = [
        "--eval_frequency=0",
        "trainer.init.precision={enabled: true, fp16_type: float16, loss_scaling_factor: dynamic}",
        # So large a weight on the loss overflows fp16 at first.
        "trainer.init.model.loss_scaling=batch_size",
        "trainer.init.model.loss_weight=10.0",
    ]
    assert headwater("fit", whole, *options, "--max_steps", 8)[0] == 0
    assert headwater("fit", parts, *options, "--max_steps", 3)[0] == 0
    assert headwater("fit", parts, *options, "--max_steps", 8)[0] == 0
    applied = [record["applied"] for record in history(tmp_path / "whole")]
    assert not applied[0] and applied[-1]
    assert history(tmp_path / "whole") == history(tmp_path / "parts")
    assert_same_checkpoint(tmp_path / "whole" / "checkpoint_8", tmp_path / "parts" / "checkpoint_8")
