"""Resuming with the same command after a kill, a full disk or damage."""

import os
import shutil
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from run_samples import assert_same_checkpoint, history, write_params

from headwater.core.attention import attention_kernel_available
from headwater.core.buffers import PAGE_BYTES
from headwater.core.safetensors import TensorFile
from headwater.trainer.history import read_history


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    from headwater.cli.main import main

    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(["fit", str(write_params(folder, data))]) == 0
    return folder / "run"


@pytest.fixture
def trained(params, tmp_path, undisturbed):
    """A finished run in the model_dir of `params`."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def assert_same_run(run, other):
    assert history(run) == history(other)
    assert_same_checkpoint(run / "checkpoint_6", other / "checkpoint_6")


def test_a_run_that_continues_with_another_attention_kernel_warns(headwater, params, tmp_path):
    whole = ("--trainer.init.model.dropout_rate=0", "--trainer.init.precision.enabled=true")
    command = ("fit", params, *whole)
    by_torch = (*command, "--trainer.init.backend.attention=torch")
    changes = []
    for number, words in enumerate((command, command, by_torch, command), start=1):
        code, _, error = headwater(*words, f"--max_steps={number}")
        assert code == 0, error
        changes.append("attention was computed by" in error)
    assert changes == [False, False, attention_kernel_available(), attention_kernel_available()]


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_history_with_zero_bytes_and_one_left_half_written(headwater, params, tmp_path, undisturbed):
    assert headwater("fit", params, "--max_steps", 3)[0] == 0
    for name in ("history.partial", "history.jsonl.partial"):
        (tmp_path / "run" / name).write_text("{")
    with (tmp_path / "run" / "history.jsonl").open("ab") as file:
        file.write(b"\0" * 700)
    assert headwater("fit", params)[0] == 0
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("file", ["weights_0001.safetensors", "manifest.json", "trainer.json"])
def test_a_damaged_newest_checkpoint_is_passed_over(headwater, params, trained, undisturbed, file):
    run = trained
    flip_byte(run / "checkpoint_6" / file)
    code, _, error = headwater("validate", params)
    assert (code, f"{run / 'checkpoint_6'} is damaged and skipped" in error) == (0, True)
    code, _, error = headwater("fit", params)
    assert code == 0
    assert f"{run / 'checkpoint_6'} is damaged and skipped" in error
    assert (run / "checkpoint_6.superseded").is_dir()
    assert_same_run(run, undisturbed)


@pytest.fixture
def reads(monkeypatch):
    """Notes offset and length of each read of this process, by file."""
    noted, plain = defaultdict(list), os.preadv

    def preadv(file, buffers, offset):
        count = plain(file, buffers, offset)
        noted[Path(f"/proc/self/fd/{file}").readlink()].append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return noted


@pytest.mark.parametrize("command", ["fit", "validate", "export"])
def test_a_checkpoint_is_read_once(headwater, params, tmp_path, trained, reads, command):
    words = ("checkpoint", "export", "--model_dir", trained, "--out", tmp_path / "exported")
    assert headwater(*(words if command == "export" else (command, params)))[0] == 0
    noted, tensors = dict(reads), 0
    for path in (trained / "checkpoint_6").glob("*.safetensors"):
        for place in TensorFile(path).places.values():
            # Reads of other tensors may reach into the first page of this one, and into its last.
            if place.num_bytes > 3 * PAGE_BYTES:
                middle = place.offset + place.num_bytes // 2
                times = sum(offset <= middle < offset + count for offset, count in noted.get(path, []))
                is_needed = command == "fit" or path.name.startswith("weights")
                assert times == is_needed, path.name
                tensors += 1
    assert tensors > 10


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(headwater, params, trained, undisturbed):
    run = trained
    shutil.rmtree(run / "checkpoint_6")
    (run / "checkpoint_3").rename(run / "checkpoint_9")
    code, out, error = headwater("checkpoint", "info", run)
    assert code == 1 and "damaged" in out and "its manifest says step 3" in error
    code, _, error = headwater("fit", params)
    assert code != 0 and "every checkpoint of this run is damaged" in error
    (run / "checkpoint_9").rename(run / "checkpoint_3")
    assert headwater("fit", params)[0] == 0
    assert_same_run(run, undisturbed)


def test_two_ranks_skip_a_checkpoint_if_one_rank_finds_damage(headwater, params, tmp_path, two):
    run = shutil.copytree(two, tmp_path / "run")
    flip_byte(run / "checkpoint_6" / "optimizer_0001.safetensors")
    assert headwater("fit", params, "--num_csx=2")[0] == 0
    assert (run / "checkpoint_6.superseded").is_dir()
    assert_same_run(run, two)


def test_info_reports_damaged_checkpoints(headwater, trained):
    run = trained
    shutil.copytree(run / "checkpoint_6", run / "checkpoint_4")
    flip_byte(run / "checkpoint_3" / "weights_0000.safetensors")
    code, out, error = headwater("checkpoint", "info", run, "--verify")
    assert code == 1
    states = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:]}
    assert states == {"checkpoint_3": "damaged", "checkpoint_4": "damaged", "checkpoint_6": "whole"}
    assert str(run / "checkpoint_3" / "weights_0000.safetensors") in error
    assert "all checksums are correct" not in out


def fine_tuning(params, start):
    """The params with a start from the weights of another run."""
    text = params.read_text().replace(
        "callbacks:", "callbacks:\n    - LoadCheckpointStates: {load_checkpoint_states: model}"
    )
    params.write_text(text.replace("  fit:\n", f"  fit:\n    ckpt_path: {start}\n"))
    return params


def test_a_fine_tuning_command_that_is_run_again_continues(headwater, data, tmp_path, undisturbed):
    whole, stopped = (
        fine_tuning(write_params(tmp_path, data, name), undisturbed / "checkpoint_6")
        for name in ("whole", "stopped")
    )
    assert headwater("fit", whole)[0] == 0
    assert headwater("fit", stopped, "--max_steps", 3)[0] == 0
    code, _, error = headwater("fit", stopped)
    assert (code, "set aside" in error) == (0, False)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    code, _, error = headwater("fit", stopped)
    assert code == 0 and "nothing to do" in error
    over = "--autoload_last_checkpoint=false"
    code, _, error = headwater("fit", stopped, over, "--max_steps", 3)
    assert code == 0 and "checkpoint_6.superseded" in error
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")[:4]


def test_a_run_with_another_seed_cannot_continue_and_the_remedy_works(headwater, data, tmp_path):
    params = write_params(tmp_path, data)
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    code, _, error = headwater("fit", params, "--max_steps", 2, "--seed", 4)
    assert code == 2 and "made with seed 3, but this run has seed 4" in error and "shuffle_seed" not in error
    advice = " ".join(error.partition("remedy: ")[2].split())
    assert advice.startswith("continue with seed 3, or start a new run (with another model_dir)")
    callback = advice.rpartition("callback ")[2]
    new = ("--model_dir", tmp_path / "new", "--checkpoint_path", tmp_path / "run" / "checkpoint_1")
    again = ("fit", params, *new, "--seed", 4, "--max_steps", 1, f"trainer.init.callbacks=[{callback}]")
    assert headwater(*again)[0] == 0


def test_checkpoint_path_sends_a_run_back_only_once(headwater, params, trained):
    run = trained
    back = ("fit", params, f"--checkpoint_path={run / 'checkpoint_3'}", "--max_steps")
    code, _, error = headwater(*back, 5)
    assert code == 0 and "checkpoint_6.superseded" in error
    code, _, error = headwater(*back, 6)
    assert (code, "set aside" in error) == (0, False)
    assert [r["step"] for r in history(run) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert (run / "checkpoint_5").is_dir()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_resumes_after_a_full_disk(headwater, small_disk, data, undisturbed):
    params = write_params(small_disk, data)
    run = small_disk / "run"
    assert headwater("fit", params, "--max_steps", 3)[0] == 0
    before = (run / "history.jsonl").read_bytes()
    fill_disk(small_disk / "ballast")
    with (run / "history.jsonl").open("ab") as file:
        file.truncate(len(before) - 1)  # so that the history has to be replaced
    code, _, error = headwater("fit", params)
    assert code == 1 and "no space left" in error
    (small_disk / "ballast").unlink()
    assert headwater("fit", params)[0] == 0
    assert [record["step"] for record in read_history(run / "history.jsonl")][-1] == 6
    assert_same_checkpoint(run / "checkpoint_6", undisturbed / "checkpoint_6")


def fill_disk(path):
    """Write a file as large as the disk allows."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_run_warns_if_the_disk_is_too_small_for_a_checkpoint(headwater, params, undisturbed, monkeypatch):
    files = [*undisturbed.glob("checkpoint_6/*.safetensors")]
    size = sum(path.stat().st_size for path in files)
    warned = []
    for number, free in enumerate((size * 9 // 10, size)):
        usage = shutil.disk_usage(params.parent)._replace(free=free)
        monkeypatch.setattr("headwater.trainer.checkpoint.shutil.disk_usage", lambda path, usage=usage: usage)
        code, _, error = headwater(
            "fit", params, "--max_steps=1", f"--model_dir={params.parent / str(number)}"
        )
        assert code == 0, error
        warned.append("a checkpoint takes" in error)
    assert warned == [True, False]
