"""`headwater scaling`: a family from its params files to the prediction of its largest size."""

import json
import signal

import pytest

from headwater.appliance.open import open_queue
from headwater.core.exit_codes import INTERRUPTED
from headwater.scaling.results import read_loss
from headwater.scaling.sizes import read_family

CARD = """\
name,flops,loss
111M,2.6E+18,2.566
256M,1.3E+19,2.299
590M,6.1E+19,2.184
1.3B,2.8E+20,1.996
2.7B,1.1E+21,1.834
6.7B,6.3E+21,1.704
13B,2.3E+22,1.575
"""


@pytest.fixture
def family(base, tmp_path, headwater):
    """The folder of five small sizes."""
    folder = tmp_path / "family"
    words = ("--widths", 8, 16, 24, 32, 48, "--depths", 1, "--tokens_per_parameter", 2)
    code, out, _ = headwater("scaling", "write", base, "--out", folder, *words)
    assert code == 0 and "w48_d1" in out
    return folder


def pretend(size, loss, *, steps=None, evaluated=True):
    """Write the history of a run that has reached `loss`."""
    size.model_dir.mkdir(exist_ok=True)
    last = size.steps if steps is None else steps
    records = [{"kind": "train", "step": last, "loss": 1.0}]
    if evaluated:
        records.append({"kind": "validate", "step": last, "loader": 0, "loss": loss})
    (size.model_dir / "history.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def test_sizes_are_trained_once_and_the_largest_is_predicted(family, headwater):
    code, out, err = headwater("scaling", "run", family)
    assert code == 0 and out.count("validation loss") == 5, err
    code, out, _ = headwater("scaling", "run", family)
    assert code == 0 and "validation loss" not in out
    sizes = read_family(family)
    assert all((size.model_dir / f"checkpoint_{size.steps}").exists() for size in sizes)
    code, out, err = headwater("scaling", "fit", family)
    # So few steps may not follow a law. Then the command must say so.
    assert code == 0 or "do not determine a power law" in err


def test_a_size_is_trained_on_the_ranks_of_its_params(base, tmp_path, headwater):
    base.write_text(base.read_text().replace("backend_type: CPU", "cluster_config: {num_csx: 2}"))
    folder = tmp_path / "family"
    words = ("--widths", 8, "--depths", 1, "--tokens_per_parameter", 1)
    assert headwater("scaling", "write", base, "--out", folder, *words)[0] == 0
    assert headwater("scaling", "run", folder)[0] == 0
    (size,) = read_family(folder)
    assert read_loss(size) is not None
    assert "2 CSXs" in (size.model_dir / "plan.txt").read_text()


@pytest.fixture
def size(base, tmp_path, headwater):
    """A small size, without a run."""
    words = ("--widths", 8, "--depths", 1, "--tokens_per_parameter", 2)
    assert headwater("scaling", "write", base, "--out", tmp_path / "one", *words)[0] == 0
    return read_family(tmp_path / "one")[0]


def evaluations(size):
    """The steps of the evaluations in a size's history."""
    lines = (size.model_dir / "history.jsonl").read_text().splitlines()
    return [each["step"] for each in map(json.loads, lines) if each["kind"] == "validate"]


def test_an_interrupted_last_evaluation_is_made_again(size, headwater, monkeypatch):
    evaluated = []

    def interrupt(*words, stop, **options):
        evaluated.append(True)
        signal.raise_signal(signal.SIGINT)
        assert stop()

    monkeypatch.setattr("headwater.trainer.loop.evaluate", interrupt)
    folder = size.params.parent
    assert headwater("scaling", "run", folder)[0] == INTERRUPTED
    assert evaluated and evaluations(size) == []
    monkeypatch.undo()
    code, _, err = headwater("scaling", "fit", folder)
    assert code == 2 and "continues an interrupted evaluation" in err
    code, out, err = headwater("scaling", "run", folder)
    assert code == 0 and "all sizes have ended" in out, err
    assert evaluations(size) == [size.steps] and read_loss(size) is not None


def test_run_that_makes_no_evaluation_ends_with_an_error(size, headwater):
    text = size.params.read_text()
    size.params.write_text(text.replace("eval_frequency: 1.0", "eval_frequency: 0"))
    code, _, err = headwater("scaling", "run", size.params.parent)
    assert code == 2 and "expected an evaluation at the last step" in err


def test_law_prediction_and_picture_of_finished_runs(family, headwater):
    *fitted, last = read_family(family)
    for size in fitted:
        pretend(size, 2.0 + (size.flops / 1e9) ** -0.2)
    code, out, _ = headwater("scaling", "fit", family)
    assert code == 0 and "not trained" in out
    pretend(last, 1.01 * (2.0 + (last.flops / 1e9) ** -0.2))
    code, out, _ = headwater("scaling", "fit", family)
    assert code == 0 and "-0.99%" in out and "0.2000" in out
    found = json.loads((family / "scaling.json").read_text())
    assert found["predictions"][0]["error"] == pytest.approx(1 / 1.01 - 1, abs=1e-6)
    assert found["law"]["irreducible"] == pytest.approx(2.0, abs=1e-4)
    assert (family / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_published_losses_in_a_table(tmp_path, headwater):
    (tmp_path / "card.csv").write_text(CARD)
    code, out, _ = headwater("scaling", "fit", tmp_path / "card.csv", "--out", tmp_path / "law")
    assert code == 0 and "13B" in out
    (prediction,) = json.loads((tmp_path / "law" / "scaling.json").read_text())["predictions"]
    assert prediction["loss"] == 1.575 and abs(prediction["error"]) < 0.02


def test_runs_without_an_end_are_named(family, headwater):
    sizes = read_family(family)
    for size in sizes:
        pretend(size, 2.0 + 1e9 / size.flops)
    pretend(sizes[1], 3.0, steps=sizes[1].steps - 1)
    (sizes[2].model_dir / "history.jsonl").unlink()
    code, _, err = headwater("scaling", "fit", family)
    assert code == 2 and f"unfinished ones: {sizes[1].name}, {sizes[2].name}" in err and "scaling run" in err


def test_run_without_an_evaluation_is_named(family, headwater):
    pretend(read_family(family)[0], 0.0, evaluated=False)
    code, _, err = headwater("scaling", "fit", family)
    assert code == 2 and "expected an evaluation at the last step" in err and "eval_frequency" in err


def test_too_few_sizes(family, headwater):
    for size in read_family(family):
        pretend(size, 2.0 + 1e9 / size.flops)
    code, _, err = headwater("scaling", "fit", family, "--predict", 2)
    assert (
        code == 2
        and "at least 4 sizes" in err
        and "train further sizes" in err
        and "write --predict 1" in err
    )
    code, _, err = headwater("scaling", "fit", family, "--predict", -1)
    assert code == 2 and "--predict" in err


def test_three_sizes_are_too_few_whatever_is_held_out(tmp_path, headwater):
    (tmp_path / "card.csv").write_text("".join(CARD.splitlines(keepends=True)[:4]))
    for held_out in (0, 1):
        code, _, err = headwater("scaling", "fit", tmp_path / "card.csv", "--predict", held_out)
        assert code == 2 and "train further sizes" in err and "--predict" not in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CARD.replace("2.299", "two"), "line 3"),
        ("a,b\n1,2\n", "name,flops,loss"),
        (CARD.replace("6.1E+19", "1.3E+19"), "got 256M and 590M"),
        (CARD.replace("2.299", ""), "unfinished ones: 256M"),
        (CARD.replace("2.3E+22", "nan"), "line 8"),
        (CARD.replace("2.3E+22", "-1"), "line 8"),
    ],
)
def test_bad_tables(tmp_path, headwater, text, message):
    (tmp_path / "card.csv").write_text(text)
    code, _, err = headwater("scaling", "fit", tmp_path / "card.csv")
    assert code == 2 and message in err and "remedy" in err


def test_an_out_folder_that_is_a_file(tmp_path, headwater):
    (tmp_path / "card.csv").write_text(CARD)
    code, out, err = headwater("scaling", "fit", tmp_path / "card.csv", "--out", tmp_path / "card.csv")
    assert code == 2 and "expected a folder or nothing, found a file" in err and not out


def test_missing_table_and_empty_folder(tmp_path, headwater):
    code, _, err = headwater("scaling", "fit", tmp_path / "nothing.csv")
    assert code == 2 and "the table cannot be read" in err
    code, _, err = headwater("scaling", "show", tmp_path)
    assert code == 2 and "headwater scaling write" in err


def test_sizes_that_have_not_ended_are_queued(family, headwater, tmp_path, monkeypatch):
    first, *others = read_family(family)
    pretend(first, 3.0)
    queue = tmp_path / "queue"
    # Without a supervisor no job starts, so that the test sees all of them.
    monkeypatch.setattr("headwater.appliance.open.ensure_supervisor", lambda folder: None)
    code, out, _ = headwater("scaling", "submit", family, "--queue_dir", queue)
    assert code == 0 and [line.split()[1] for line in out.splitlines()] == [size.name for size in others]
    jobs = open_queue(folder=queue).jobs()
    assert [job.command[-2:] for job in jobs] == [("fit", str(size.params)) for size in others]
    assert [job.model_dir for job in jobs] == [size.model_dir for size in others]
    code, out, err = headwater("scaling", "submit", family, "--queue_dir", queue)
    assert code == 1 and not out and err.count("not submitted") == len(others)
