"""Problems in files, the prompts and tests made of them, and the metric pass@k."""

import gzip
import itertools
import json

import pytest
from problem_samples import ADD, LAST, SQUARE, write_problems

from headwater.core.errors import ConfigError, DataError
from headwater.evaluation.pass_rates import pass_at_k, pass_rates
from headwater.evaluation.problems import load_problems


def test_prompts_tests_and_solutions_in_the_form_of_humaneval(tmp_path):
    write_problems(tmp_path / "own.jsonl", ADD, LAST)
    stripped, whole = load_problems(["own", "own-unstripped"], tmp_path)
    assert [stripped.name, whole.name] == ["own", "own-unstripped"]
    assert [each.prompt for each in stripped.problems] == [ADD["prompt"].strip(), LAST["prompt"].strip()]
    assert [each.prompt for each in whole.problems] == [ADD["prompt"], LAST["prompt"]]
    for task in (stripped, whole):
        assert task.problems[0].reference == "\n" + ADD["test"] + "\ncheck(add)"
        assert task.problems[0].solution == ADD["prompt"] + ADD["canonical_solution"]
    assert stripped.cut("\n    return 1\n\n\ndef g():\n#") == "\n    return 1\n\n"
    assert (
        stripped.cut("\n    x = 1\n    # a note\n    print(x)\nprint(2)")
        == "\n    x = 1\n    # a note\n    print(x)"
    )
    assert stripped.cut("    return 2") == "    return 2"


def test_prompts_and_tests_in_the_form_of_mbpp(tmp_path):
    write_problems(tmp_path / "own.jsonl", SQUARE)
    (task,) = load_problems(["own"], tmp_path)
    (problem,) = task.problems
    assert problem.prompt == '"""\nWrite a function that squares.\nassert square(2) == 4\n"""\n'
    assert problem.reference == "assert square(2) == 4\nassert square(-3) == 9"
    assert problem.solution == SQUARE["code"]
    assert (
        task.cut("def square(n):\n    return 1\n\ndef g(): 0\nassert g")
        == "def square(n):\n    return 1\n\ndef g(): 0"
    )


def test_a_task_is_a_file_of_the_folder_or_a_path(tmp_path):
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(ADD) + "\n")
    path = write_problems(tmp_path / "other" / "mine.jsonl", LAST)
    one, other = load_problems(["humaneval", str(path)], tmp_path)
    assert (one.name, other.name) == ("humaneval", "mine")
    (same,) = load_problems(["any"], path)
    assert same.problems == other.problems


def test_mbpp_is_its_test_problems(tmp_path):
    write_problems(tmp_path / "mbpp.jsonl", *(SQUARE | {"task_id": number} for number in (10, 11, 510, 511)))
    assert len(load_problems(["mbpp"], tmp_path)[0].problems) == 2


def test_a_part_of_the_problems(tmp_path):
    write_problems(tmp_path / "own.jsonl", ADD, LAST, ADD)
    (whole,) = load_problems(["own"], tmp_path)
    assert load_problems(["own"], tmp_path, 1, 1)[0].problems == whole.problems[1:2]
    assert load_problems(["own"], tmp_path, 1)[0].problems == whole.problems[1:]
    with pytest.raises(DataError, match="limit_start is 3, and there are 3"):
        load_problems(["own"], tmp_path, 3)


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(ConfigError, match="include_path"):
        load_problems(["humaneval"], None)
    write_problems(tmp_path / "humaneval.jsonl", ADD)
    with pytest.raises(ConfigError, match="write humaneval"):
        load_problems(["humanevol"], tmp_path)
    write_problems(tmp_path / "odd.jsonl", {"question": "?"})
    with pytest.raises(DataError, match="found question"):
        load_problems(["odd"], tmp_path)
    write_problems(tmp_path / "odd.jsonl", ADD, {"prompt": "x", "entry_point": "x"})
    with pytest.raises(DataError, match=r"no 'test'\n.*odd.jsonl, line 2"):
        load_problems(["odd"], tmp_path)
    write_problems(tmp_path / "odd.jsonl", SQUARE | {"test_list": "assert 1"})
    with pytest.raises(DataError, match="list of tests"):
        load_problems(["odd"], tmp_path)
    (tmp_path / "odd.jsonl").write_text("")
    with pytest.raises(DataError, match="found nothing"):
        load_problems(["odd"], tmp_path)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_the_mean_over_all_choices_of_k_programs(samples):
    for passed in range(samples + 1):
        results = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            chosen = list(itertools.combinations(results, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_rates_are_means_over_problems():
    assert pass_rates([[True, False], [False, False], [True, True]]) == {"pass@1": 0.5}
    ten = [[True] + [False] * 9, [False] * 10]
    assert pass_rates(ten) == {"pass@1": pytest.approx(0.05), "pass@10": 0.5}
    assert pass_rates([*ten, [True]]).keys() == {"pass@1"}
    many = pass_rates([[True] * 3 + [False] * 197])
    assert many["pass@100"] == pytest.approx(1 - (100 / 200) * (99 / 199) * (98 / 198))
