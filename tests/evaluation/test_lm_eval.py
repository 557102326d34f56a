"""`headwater lm_eval` compared with the harness's own `hf` model on the same weights."""

import json

import pytest

from headwater.cli.main import main

SAMPLES = 60
TASKS = ("arc_easy", "winogrande", "mmlu", "lambada", "rolling", "triviaqa")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def theirs(library, tasks):
    """Evaluates tasks with the harness's own model."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(library), batch_size=16, device="cpu", dtype="float32")
    # Without the tasks of the harness: reading their thousands of files takes 9 s.
    manager = TaskManager(include_path=str(tasks), include_defaults=False)

    def evaluate(task, limit=SAMPLES):
        return lm_eval.simple_evaluate(
            model, tasks=[f"local_{task}"], limit=limit, task_manager=manager, bootstrap_iters=0
        )

    return evaluate


def ours(model, tasks, out, *options, names=TASKS):
    """Run the command line, and return the results with their samples."""
    listed = ",".join(f"local_{name}" for name in names)
    words = [
        "--tasks",
        listed,
        "--include_path",
        tasks,
        "--output_path",
        out,
        "--log_samples",
        "--limit",
        SAMPLES,
    ]
    assert main(["lm_eval", *map(str, (model, *words, *options))]) == 0
    results = json.loads((out / "results.json").read_text())
    files = {f"local_{name}": out / f"local_{name}.json" for name in names}
    return results | {"samples": {name: json.loads(file.read_text()) for name, file in files.items()}}


def answers(samples):
    """Return what the model answered to each request of each question."""
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def numbers(value):
    if isinstance(value, list | tuple):
        return [each for item in value for each in numbers(item)]
    return [value]


def assert_same(results, expected, task):
    name = f"local_{task}"
    for metric, value in expected["results"][name].items():
        if isinstance(value, float):
            assert results["results"][name][metric] == pytest.approx(value, rel=TOLERANCE), metric
    pairs = zip(answers(results["samples"][name]), answers(expected["samples"][name]), strict=True)
    for found, wanted in pairs:
        for one, other in zip(numbers(found), numbers(wanted), strict=True):
            # Samples in JSON hold numbers as text.
            if isinstance(other, float):
                assert float(one) == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)
            else:
                assert str(one) == str(other)


@pytest.mark.slow
def test_every_kind_of_task_equals_the_harness_own_model(library, trained, tasks, theirs, tmp_path):
    from_library = ours(library, tasks, tmp_path / "library", "--truncate")
    from_run = ours(trained, tasks, tmp_path / "run", "--truncate", "--batch_size", "3")
    for task in TASKS:
        expected = theirs(task)
        assert_same(from_library, expected, task)
        assert_same(from_run, expected, task)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_two_ranks_equal_one_rank_and_the_harness_own_model(tier, library, tasks, theirs, tmp_path):
    names, count = ("arc_easy", "lambada", "rolling", "triviaqa"), 12
    words = (f"--trainer.init.backend.tier={tier}", "--disk", tmp_path, "--truncate", "--limit", count)
    # Three sequences of full length: a pass of two ranks has two of them each, so there are several passes.
    one = ours(library, tasks, tmp_path / "one", *words, "--batch_size", "3", names=names)
    two = ours(library, tasks, tmp_path / "two", *words, "--batch_size", "3", "--num_csx=2", names=names)
    for task in names:
        name = f"local_{task}"
        for metric, value in one["results"][name].items():
            if isinstance(value, float):
                assert two["results"][name][metric] == pytest.approx(value, rel=1e-6), metric
        for found, wanted in zip(answers(two["samples"][name]), answers(one["samples"][name]), strict=True):
            for each, other in zip(numbers(found), numbers(wanted), strict=True):
                # Log-likelihoods are numbers as text; texts and True begin with a letter.
                if str(other).startswith("-"):
                    assert float(each) == pytest.approx(float(other), rel=1e-6)
                else:
                    assert each == other
        assert_same(two, theirs(task, count), task)
