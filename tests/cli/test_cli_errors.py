"""Errors of the command line: a short message with place and remedy, and an exit code; no data are lost."""

import io
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from run_samples import assert_same_checkpoint, history, model_dir

from headwater.cli.main import escape_unprintable, forget_useless_width
from headwater.core.errors import StoreError
from headwater.data.statistics import read_statistics
from headwater.store.store import WeightStore
from headwater.trainer import session
from headwater.trainer.callback import Callback
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.model_dir_lock import ModelDirLock


def assert_refused(result, *texts, code=2):
    """The command failed with a message that holds `texts`, and without a traceback."""
    got, _, err = result
    assert got == code, err
    assert err.startswith("error: ") and "Traceback" not in err
    for text in texts:
        assert text in err


def test_a_misspelt_key(headwater, params):
    params.write_text(params.read_text().replace("hidden_size", "hiden_size"))
    assert_refused(
        headwater("fit", params), "unknown key 'hiden_size'", f"{params}, line 9", "write 'hidden_size'"
    )


def test_a_value_of_the_wrong_type(headwater, params):
    result = headwater("fit", params, "trainer.init.loop.max_steps=many")
    assert_refused(result, "max_steps to be an integer", "command line")


def test_a_drawing_of_a_plan_that_cannot_be_written(headwater, params, tmp_path):
    pytest.importorskip("matplotlib")
    result = headwater("plan", params, "--png", tmp_path)
    assert result[0] == 1 and "Is a directory; found a folder" in result[2] and "Traceback" not in result[2]


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["fit", f"{LONG}.yaml"],
        ["fit", "PARAMS", f"trainer.fit.train_dataloader.data_dir={LONG}"],
        ["validate", LONG],
        ["evaluate", LONG, "--text", "x"],
        ["generate", "--model_dir", LONG, "--prompt", "x"],
        ["checkpoint", "info", LONG],
        ["data", LONG, "--out", "o"],
        ["scaling", "fit", LONG],
        ["serve", LONG],
    ],
)
def test_a_path_that_the_system_refuses_to_look_up(headwater, params, words):
    words = [params if word == "PARAMS" else word for word in words]
    assert_refused(headwater(*words), "a path cannot be used: File name too long", "name a shorter path")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["fti"], ["unknown command 'fti'", "did you mean fit"]),
        (["fit", "PARAMS", "--num_stpes", "3"], ["unknown option --num_stpes", "did you mean --num_steps"]),
        (["fit", "PARAMS", "--trainer.init.sede", "3"], ["unknown key 'sede'", "write 'seed'"]),
        (["fit", "PARAMS", "trainer.init.seed"], ["unexpected argument"]),
        (["fit", "PARAMS", "--vocab_sise", "9"], ["did you mean trainer.init.model.vocab_size=VALUE"]),
        (["fit", "PARAMS", "--vocab_size", "9"], ["did you mean trainer.init.model.vocab_size=VALUE"]),
        (
            ["fit", "PARAMS", "vocab_sise=9"],
            ["unknown key vocab_sise", "trainer.init.model.vocab_size=VALUE"],
        ),
        (["plan", "PARAMS", "--num_layers", "9"], ["trainer.init.model.num_hidden_layers=VALUE"]),
        (["plan", "PARAMS", "--weight_decy=0"], ["trainer.init.optimizer.NAME.weight_decay=VALUE"]),
        (
            ["plan", "PARAMS", "trainer.init.model.hidden_size=1000000000000"],
            ["the sizes of the model are too large", "sizes=[3000000000000, 1000000000000]", "model"],
        ),
        (
            ["evaluate", "PARAMS", "--text", "x.txt", "--eos_id", "-1"],
            ["expected the id of a token", "got -1"],
        ),
        (["plan", "PARAMS", "--qqq", "9"], ["remedy: see headwater plan --help"]),
        (
            ["plan", "PARAMS", "trainer.innit.seed=3"],
            ["unknown key 'innit'", "where: command line: trainer.innit.seed", "write 'init'"],
        ),
        (["fit", "PARAMS", "--on_interrupt", "detatch"], ["got 'detatch'", "did you mean detach"]),
        (["fit"], ["PARAMS", "headwater fit --help"]),
        (
            ["plan", "PARAMS", "--host_memory", "-5GiB"],
            ["expected a size in bytes, got '-5GiB'", "write for example 8GiB"],
        ),
        (["fit", "PARAMS", "--num_steps", "-5"], ["num_steps", "-5"]),
        (["fit", "gpt/tinny"], ["there is no params file 'gpt/tinny'", "gpt/tiny"]),
        (["generate", "--prmpt", "x"], ["unknown option --prmpt", "did you mean --prompt"]),
        (["checkpoint", "exprt"], ["got 'exprt'", "did you mean export"]),
        (
            ["data", "x.txt", "--out", "o", "--vocab_size", "4k"],
            ["expected --vocab_size to be an integer, got '4k'"],
        ),
        (["conform", "--random", "many"], ["--random", "expected an integer of at least 1, got 'many'"]),
        (["input_worker", "--listen", "node", "PARAMS"], ["host:port, got 'node'", "command line: --listen"]),
    ],
)
def test_a_misspelt_command_line(headwater, params, words, texts):
    assert_refused(headwater(*(params if word == "PARAMS" else word for word in words)), *texts)


def test_a_name_that_the_locale_cannot_encode(tmp_path):
    (tmp_path / "text.txt").write_text("seven words of a text\n" * 500)
    command = ("data", "text.txt", "--vocab_size", "260", "--sequence_length", "16", "--out", "prüf")
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"},
        capture_output=True,
        text=True,
    )
    assert_refused((done.returncode, done.stdout, done.stderr), "encoding ascii", "set PYTHONUTF8=1")
    assert "pr\\udcc3\\udcbcf" in done.stderr


def test_a_text_that_is_not_unicode(headwater, monkeypatch, params):
    def read(arguments):
        "\udcfc.yaml".encode()

    monkeypatch.setattr("headwater.cli.plan.read_params", read)
    assert_refused(headwater("plan", params), "expected text in UTF-8, got '\\udcfc.yaml'", "rename the file")


def test_a_long_text_that_is_not_unicode_is_shown_in_part(headwater, monkeypatch, params):
    def read(arguments):
        ("first line\n" + "x" * 150 + "\udcfc" + "x" * 5000 + "\nlast line\n").encode()

    monkeypatch.setattr("headwater.cli.plan.read_params", read)
    code, out, err = headwater("plan", params)
    assert_refused((code, out, err), "x\\udcfcx")
    assert len(err) < 400 and "line" not in err


def test_stdout_escapes_what_its_encoding_does_not_have(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    escape_unprintable()
    print("grün")
    assert written.getvalue() == b"gr\\xfcn\n"


@pytest.mark.parametrize(("columns", "kept"), [("0", None), ("20", None), ("120", "120"), ("wide", "wide")])
def test_a_file_has_lines_of_at_least_80_characters(columns, kept, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", columns)
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        forget_useless_width()
    assert os.environ.get("COLUMNS") == kept


def test_data_that_do_not_exist(headwater, params, data):
    params.write_text(params.read_text().replace(f"{data}/train", f"{data}/tarin"))
    assert_refused(headwater("fit", params), "data_dir", f"did you mean {data / 'train'}")


def test_an_error_of_data_names_the_section(headwater, params, data):
    text = params.read_text()
    params.write_text(text.replace(f"{data}/val", f"{data}/none"))
    assert_refused(headwater("fit", params), f"trainer.fit.val_dataloader, data_dir: {data}/none")
    params.write_text(text)
    result = headwater("fit", params, "trainer.fit.train_dataloader.batch_size=100000")
    assert_refused(result, "too few samples for one batch", "trainer.fit.train_dataloader, batch_size")


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("stages_on_device=2", "stages_on_device needs ranks of one host that all compute on GPUs"),
        ("tier=disk", "tier is disk, but no disk folder is given"),
        ("micro_batch_size=3", "micro_batch_size 3 does not divide batch_size"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_data_are_read(
    headwater, params, data, setting, what
):
    backend = f"trainer.init.backend.{setting}"
    result = headwater("fit", params, backend, f"trainer.fit.train_dataloader.data_dir={data}/none")
    assert_refused(result, what)


def test_a_file_as_data_dir(headwater, params, data):
    file = next((data / "train").glob("*.h5"))
    result = headwater("fit", params, f"trainer.fit.train_dataloader.data_dir={file}")
    assert_refused(
        result, "data_dir is a file, expected a folder", f"write the folder that holds it: {data / 'train'}"
    )


def test_samples_longer_than_the_model(headwater, params):
    result = headwater("fit", params, "trainer.init.model.max_position_embeddings=8")
    assert_refused(result, "samples have 16 tokens", "the model reads at most 8 (max_position_embeddings)")


def test_a_token_beyond_the_vocabulary(headwater, params, tmp_path):
    folder = tmp_path / "beyond"
    folder.mkdir()
    with h5py.File(folder / "samples.h5", "w") as file:
        file["data"] = np.full((16, 3, 16), 300, dtype=np.int32)
    result = headwater("fit", params, f"trainer.fit.train_dataloader.data_dir={folder}")
    assert_refused(
        result, "expected token ids below vocab_size=", "got 300", "samples.h5", "vocab_size to at least 301"
    )


def test_a_batch_in_which_nothing_counts_is_trained_with_a_warning_beside_a_hidden_file(
    headwater, params, tmp_path
):
    folder = tmp_path / "masked"
    folder.mkdir()
    with h5py.File(folder / "samples.h5", "w") as file:
        file["data"] = np.stack([np.ones((16, 16)), np.zeros((16, 16)), np.ones((16, 16))], 1).astype(
            np.int32
        )
    (folder / "._samples.h5").write_text("of another system")
    code, _, err = headwater("fit", params, f"trainer.fit.train_dataloader.data_dir={folder}")
    assert code == 0
    assert err.count("no position of a batch counts in the loss") == 1


def test_data_with_another_vocabulary(headwater, params, tmp_path):
    # The first token beyond the vocabulary is rarely the largest, so the remedy names the data's vocabulary.
    text = tmp_path / "more.txt"
    text.write_text("".join(chr(code) * 3 for code in range(0x4E00, 0x4E00 + 900)) * 3, encoding="utf-8")
    words = ("--vocab_size", 700, "--sequence_length", 16, "--val_fraction", 0)
    assert headwater("data", text, "--out", tmp_path / "more", *words)[0] == 0
    vocabulary = read_statistics(tmp_path / "more").vocab_size
    assert vocabulary > 300
    result = headwater("fit", params, f"trainer.fit.train_dataloader.data_dir={tmp_path}/more/train")
    assert_refused(
        result, "expected token ids below vocab_size=300", f"set vocab_size to at least {vocabulary},"
    )


def test_a_loss_that_is_not_finite(headwater, params, tmp_path):
    schedule = "trainer.init.schedulers=[ConstantLR: {learning_rate: 1e30}]"
    result = headwater("fit", params, schedule)
    assert_refused(result, "step 2", "stage '", "learning rate", code=1)
    assert complete_checkpoints(tmp_path / "run") == [tmp_path / "run" / "checkpoint_1"], "nothing is lost"


IN_BACKWARD = ("trainer.init.backend.updates=in_backward", "trainer.init.precision.max_gradient_norm=null")


def plant(patch, stage, step):
    """Make the gradients of one stage NaN in one step."""
    add, seen = WeightStore.add_gradient, set()

    def planted(store, key, gradient, **options):
        if key[0] == stage % len(store.stages):
            seen.add((store.ledger.num_commits, key[1]))
            if store.ledger.num_commits == step - 1:
                gradient = gradient * float("nan")
        add(store, key, gradient, **options)

    patch.setattr(WeightStore, "add_gradient", planted)
    return seen


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_gradient_that_is_not_finite_after_updates_in_backward(
    headwater, params, tmp_path, monkeypatch, tier
):
    """The first stage is the last one in backward: all others have applied the step."""
    options = (
        *IN_BACKWARD,
        f"trainer.init.backend.tier={tier}",
        f"trainer.init.backend.disk.path={tmp_path}",
    )
    with monkeypatch.context() as patch:
        seen = plant(patch, 0, 5)
        result = headwater("fit", params, *options)
    assert {commits for commits, _ in seen} == {0, 1, 2, 3, 4}, "the fifth step had the fault"
    assert_refused(
        result, "gradient of step 5", "resume from the last checkpoint", "have applied step 5", code=1
    )
    left = complete_checkpoints(tmp_path / "run")
    assert left == [tmp_path / "run" / "checkpoint_3"], "none of a step that is applied in part"
    assert headwater("fit", params, *options)[0] == 0
    straight = model_dir(tmp_path / "straight")
    assert headwater("fit", params, "trainer.init.precision.max_gradient_norm=null", straight)[0] == 0
    assert_same_checkpoint(tmp_path / "run" / "checkpoint_6", tmp_path / "straight" / "checkpoint_6")
    assert history(tmp_path / "run") == history(tmp_path / "straight")


def test_a_gradient_that_is_not_finite_before_the_first_update(headwater, params, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        plant(patch, -1, 5)
        assert_refused(headwater("fit", params, *IN_BACKWARD), "was not applied", code=1)
    assert complete_checkpoints(tmp_path / "run")[-1] == tmp_path / "run" / "checkpoint_4", "nothing is lost"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("trainer.init.precision.max_gradient_norm=1.0", "max_gradient_norm, which needs all gradients"),
        ("trainer.init.precision={enabled: true, fp16_type: float16}", "float16, whose steps may be skipped"),
        ("trainer.init.sparsity={sparsity: 0.3}", "sparsity, which reads gradients"),
        ("trainer.init.backend.cluster_config={num_csx: 2, num_memx: 1}", "store ranks"),
    ],
)
def test_settings_without_updates_in_backward(headwater, params, option, text):
    result = headwater("plan", params, *IN_BACKWARD, option)
    assert_refused(result, "in_backward", text, "on_fetch")


def test_a_plan_says_when_stages_are_updated(headwater, params):
    told = {
        updates: headwater("plan", params, *IN_BACKWARD, f"trainer.init.backend.updates={updates}")[1]
        for updates in ("on_fetch", "in_backward")
    }
    assert "updates: when a stage is fetched next" in told["on_fetch"]
    assert "updates: during the backward, stage by stage" in told["in_backward"]


def test_a_memory_budget_below_the_minimum(headwater, params, tmp_path):
    result = headwater("fit", params, "--host_memory", "20MiB")
    assert_refused(result, "does not fit", "20.0 MiB of host memory", "set host_memory")
    assert not complete_checkpoints(tmp_path / "run")


def test_two_runs_in_one_model_dir(headwater, params, tmp_path):
    with ModelDirLock(tmp_path / "run"):
        assert_refused(headwater("fit", params), "another run works in this model_dir", str(tmp_path / "run"))
    assert headwater("fit", params, "--max_steps", 1)[0] == 0


def test_a_checkpoint_that_is_not_there(headwater, params, tmp_path):
    assert_refused(headwater("validate", params), "there is no checkpoint", "headwater fit")
    missing = tmp_path / "checkpoint_9"
    assert_refused(headwater("fit", params, "--checkpoint_path", missing), "no such checkpoint", str(missing))


def test_a_folder_that_is_not_a_checkpoint(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    run = tmp_path / "run"
    new = ("fit", params, "--model_dir", tmp_path / "new", "--checkpoint_path")
    assert_refused(
        headwater(*new, run), "expected a checkpoint, got the model_dir of a run", f"{run}/checkpoint_1"
    )
    weights = tmp_path / "weights"
    assert headwater("checkpoint", "export", "--model_dir", run, "--out", weights)[0] == 0
    assert_refused(
        headwater(*new, weights), "got a folder of weights", f"headwater checkpoint import {weights}"
    )


def test_a_checkpoint_of_another_shape(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    result = headwater("fit", params, "--max_steps", 2, "trainer.init.model.hidden_size=64")
    assert_refused(result, "embedding.weight has shape (300, 32)", "when these weights were trained")
    assert "Predicted peak" not in result[1], "no plan is shown for a run that cannot start"
    assert complete_checkpoints(tmp_path / "run") == [tmp_path / "run" / "checkpoint_1"]


def test_a_checkpoint_with_a_flipped_byte(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    file = max(
        (tmp_path / "run" / "checkpoint_1").rglob("*.safetensors"), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, out, messages = headwater("fit", params)
    notice, _, error = messages.partition("\n")
    assert "checkpoint_1 is damaged and skipped" in notice
    assert_refused((code, out, error), str(file), code=1)


def test_a_folder_that_is_not_a_model_dir(headwater, tmp_path):
    assert_refused(headwater("fit", tmp_path), "not the model_dir of a run", "params.yaml")


GENERATE = ["generate", "--prompt", "x", "--model_dir"]
IMPORT = ["checkpoint", "import", "--model_dir", "new"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([*GENERATE, "MISSING"], "expected the model_dir of a run, found no folder"),
        ([*GENERATE, "FILE"], "expected the model_dir of a run, found a file"),
        ([*GENERATE, "FOLDER"], "the folder is not the model_dir of a run: it has no params.yaml"),
        (["checkpoint", "info", "MISSING"], "no such checkpoint"),
        (["checkpoint", "info", "FILE"], "expected the folder of a checkpoint, found a file"),
        (
            ["checkpoint", "info", "FOLDER"],
            "the folder is not a complete checkpoint: it has no manifest.json",
        ),
        ([*IMPORT, "MISSING"], "the folder does not exist"),
        ([*IMPORT, "FOLDER"], "the folder has no config.json"),
        (["search", "FILE", "x"], "expected the folder of an index, found a file"),
        (["search", "FOLDER", "x"], "the folder is not an index: it has no index.json"),
        (["board", "MISSING"], "expected a folder of runs, found no folder"),
        (["board", "FILE"], "expected a folder of runs, found a file"),
        (["fit", "FILE"], "the params file is empty"),
    ],
)
def test_an_error_names_what_is_at_a_path(headwater, tmp_path, words, what):
    (tmp_path / "FILE").touch()
    (tmp_path / "FOLDER").mkdir()
    paths = {name: tmp_path / name for name in ("MISSING", "FILE", "FOLDER")}
    (path,) = (paths[word] for word in words if word in paths)
    assert_refused(headwater(*(paths.get(word, word) for word in words)), what, str(path), "remedy: ")


def test_files_of_a_run_that_are_in_the_way_or_damaged(headwater, params, tmp_path):
    assert headwater("fit", params, "--max_steps", 1)[0] == 0
    run, file = tmp_path / "run", tmp_path / "file"
    file.touch()
    result = headwater("checkpoint", "export", "--model_dir", run, "--out", file)
    assert_refused(result, "expected a new folder, found a file", str(file))
    result = headwater("evaluate", run, "--text", tmp_path / "none.txt")
    assert_refused(result, "the texts cannot be read: No such file or directory\n", "none.txt")
    (run / "checkpoint_1" / "manifest.json").write_text("{")
    result = headwater("checkpoint", "info", run / "checkpoint_1")
    assert "the manifest is damaged: it is not JSON" in "".join(map(str, result))


def test_too_little_text_names_the_input(headwater, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello")
    result = headwater("data", text, "--out", tmp_path / "out", "--vocab_size", 300)
    assert_refused(result, "too little text: it makes 0 samples", f"where: {text}", "use more text")


def test_a_file_with_another_name_is_not_suggested_for_its_suffix(headwater, tmp_path):
    (tmp_path / "rand.yaml").touch()
    result = headwater("fit", tmp_path / "nosuch.yaml")
    assert_refused(result, "there is no params file")
    assert "rand.yaml" not in result[2]
    assert_refused(headwater("fit", tmp_path / "ramd.yaml"), f"write '{tmp_path / 'rand.yaml'}'")


@pytest.mark.parametrize(("name", "out"), [("train", "PARENT"), ("prepared", "DIR")])
def test_the_remedy_for_missing_data_names_their_folder(headwater, params, data, tmp_path, name, out):
    missing = tmp_path / "other" / name
    params.write_text(params.read_text().replace(f"{data}/train", str(missing)))
    out = out.replace("PARENT", str(missing.parent))
    result = headwater("fit", params)
    assert_refused(result, "data_dir does not exist", str(missing), f"headwater data INPUT --out {out}\n")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--num_csx=4096", "(cores of this machine), got 4096"),
        ("trainer.init.loop.grad_accum_steps=3", "batch_size 8 cannot be divided into 3 equal micro-batches"),
        ("--micro_batch_size=3", "micro_batch_size 3 does not divide batch_size 8"),
        ("--target_device=GPU", "no GPU"),
    ],
)
def test_unsupported_devices_and_settings(headwater, params, option, text, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_refused(headwater("fit", params, option), text, "remedy")


def test_a_folder_that_has_the_name_of_a_file_of_the_run(headwater, params, tmp_path):
    (tmp_path / "run" / "loss_curve.png").mkdir(parents=True)
    assert_refused(
        headwater("fit", params), "found a folder", str(tmp_path / "run" / "loss_curve.png"), "remedy"
    )
    assert not (tmp_path / "run" / "params.yaml").exists(), "the run has not begun"


class FailsAtStepTwo(Callback):
    """A callback that can do nothing after the second step."""

    def on_step_end(self, event):
        if event.step == 2:
            raise StoreError("its disk is gone", where="step 2")


class FailsToMeasureStepTwo(Callback):
    """A callback that cannot measure the second step."""

    def measure(self, event):
        if event.step == 2:
            raise StoreError("its disk is gone", where="step 2")
        return {}


@pytest.mark.parametrize("kind", [FailsAtStepTwo, FailsToMeasureStepTwo])
def test_a_callback_that_fails_loses_no_step(headwater, params, tmp_path, monkeypatch, kind):
    with monkeypatch.context() as patch:
        patch.setattr(session, "make_callbacks", lambda *_: [kind()])
        assert_refused(headwater("fit", params), "its disk is gone", code=1)
    assert complete_checkpoints(tmp_path / "run") == [tmp_path / "run" / "checkpoint_2"]
    assert headwater("fit", params)[0] == 0
    straight = model_dir(tmp_path / "straight")
    assert headwater("fit", params, straight)[0] == 0
    assert_same_checkpoint(tmp_path / "run" / "checkpoint_6", tmp_path / "straight" / "checkpoint_6")


def test_a_deleted_working_directory_is_an_error(headwater, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, error = headwater("config", "list")
    assert code == 2 and "the working directory was deleted" in error
