"""`headwater bigcode_eval`: programs of a model compared with those of transformers, and their results."""

import json

import pytest
from problem_samples import ADD, LAST, SQUARE, write_problems

from headwater.cli.main import main

RIGHT = 'def add(a, b):\n    """Add."""\n    return a + b\n'
WRONG = 'def add(a, b):\n    """Add."""\n    return a - b\n'
ENDLESS = 'def add(a, b):\n    """Add."""\n    while True: pass\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder, beside which `tasks` has the files of two tasks."""
    write_problems(tmp_path / "tasks" / "own.jsonl", ADD, LAST)
    write_problems(tmp_path / "tasks" / "squares.jsonl", SQUARE)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def evaluate(*words, tasks="own"):
    """Run the command, and return its exit code."""
    return main(["bigcode_eval", *map(str, words), "--tasks", tasks, "--include_path", "../tasks"])


def read(path):
    return json.loads(path.read_text())


def test_without_permission_programs_are_written_and_not_run(folder, library, capsys, monkeypatch):
    monkeypatch.setattr("headwater.evaluation.sandbox.Sandbox.run", None)
    assert evaluate(library, "--n_samples", 3, "--max_tokens", 8, tasks="own,squares") == 0
    assert "no program was run (--allow_code_execution)" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "generations_own.json",
        "generations_squares.json",
        "references_own.json",
        "references_squares.json",
    ]
    programs = read(folder / "generations_own.json")
    assert [len(each) for each in programs] == [3, 3]
    for problem, each in zip((ADD, LAST), programs, strict=True):
        assert all(text.startswith(problem["prompt"].strip()) for text in each)
    assert len(set(programs[0])) > 1
    tests = read(folder / "references_own.json")
    assert tests[0] == f"\n{ADD['test']}\ncheck(add)"


def test_greedy_programs_equal_those_of_transformers(folder, library):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(library)
    tokenizer = transformers.AutoTokenizer.from_pretrained(library)
    options = ("--temperature", 0, "--max_length_generation", 70)
    assert evaluate(library, *options, tasks="own,own-unstripped,squares") == 0
    prompts = {
        "own": [ADD["prompt"].strip(), LAST["prompt"].strip()],
        "own-unstripped": [ADD["prompt"], LAST["prompt"]],
        "squares": [f'"""\n{SQUARE["text"]}\n{SQUARE["test_list"][0]}\n"""\n'],
    }
    for task, texts in prompts.items():
        found = read(folder / f"generations_{task}.json")
        for prompt, (program,) in zip(texts, found, strict=True):
            tokens = tokenizer(prompt, return_tensors="pt").input_ids
            assert tokens.shape[1] < 70, "a prompt without room tests nothing"
            output = model.generate(tokens, do_sample=False, max_length=70, pad_token_id=0)
            assert program == tokenizer.decode(output[0], skip_special_tokens=True)


def test_a_program_does_not_depend_on_the_problems_and_samples_beside_it(folder, library):
    options = ("--temperature", 1.5, "--max_tokens", 12)
    assert evaluate(library, "--n_samples", 3, *options) == 0
    whole = read(folder / "generations_own.json")
    assert evaluate(library, "--n_samples", 2, "--limit_start", 1, "--limit", 1, *options) == 0
    assert read(folder / "generations_own.json") == [whole[1][:2]]
    assert evaluate(library, "--n_samples", 3, "--seed", 1, *options) == 0
    assert read(folder / "generations_own.json") != whole


def test_an_evaluation_continues_from_saved_programs(folder, library):
    options = ("--n_samples", 2, "--temperature", 1.5, "--max_tokens", 12)
    assert evaluate(library, *options) == 0
    whole = read(folder / "generations_own.json")
    assert evaluate(library, *options, "--save_every_k_tasks", 1) == 0
    saved = folder / "generations_own_intermediate.json"
    assert read(saved) == whole[:1] and read(folder / "generations_own.json") == whole
    assert evaluate(library, *options, "--load_generations_intermediate_paths", saved) == 0
    assert read(folder / "generations_own.json") == whole


def test_a_prompt_without_room_is_its_program(folder, library, capsys):
    assert evaluate(library, "--max_length_generation", 3, "--n_samples", 2) == 0
    assert read(folder / "generations_own.json") == [[each["prompt"].strip()] * 2 for each in (ADD, LAST)]
    assert "2 prompts of own left unanswered" in capsys.readouterr().err


def test_programs_are_run_in_the_sandbox(folder, library, capsys):
    assert evaluate(library, "--n_samples", 2, "--max_tokens", 4, "--allow_code_execution") == 0
    results = read(folder / "evaluation_results.json")
    assert results["own"] == {"pass@1": 0.0}
    assert [len(each) for each in results["outcomes"]["own"]] == [2, 2]
    assert results["config"]["n_samples"] == 2
    assert "own: pass@1 0.0000 (4 programs: 4 failed)" in capsys.readouterr().out


def test_saved_programs_are_run_without_a_model(folder, capsys):
    (folder / "saved.json").write_text(json.dumps([[RIGHT, WRONG, ENDLESS, RIGHT], ["x = 1"] * 4]))
    words = ("--load_generations_path", "saved.json", "--allow_code_execution", "--timeout", 5)
    assert evaluate(*words, "--metric_output_path", "out/scores.json") == 0
    results = read(folder / "out" / "scores.json")
    assert results["own"] == {"pass@1": 0.25}
    assert results["outcomes"]["own"][0] == ["passed", "failed: AssertionError", "timed out", "passed"]
    assert all("NameError" in result for result in results["outcomes"]["own"][1])
    assert "8 programs: 2 passed, 5 failed, 1 timed out" in capsys.readouterr().out


def test_the_solutions_of_the_problems_pass(folder):
    assert evaluate("--check_references", "--allow_code_execution", tasks="own,squares") == 0
    results = read(folder / "evaluation_results.json")
    assert results["own"] == results["squares"] == {"pass@1": 1.0}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--check_references"], "check_references needs allow_code_execution"),
        (["--metric_output_path", "x.json"], "metric_output_path needs allow_code_execution"),
        (["--load_generations_path", "x.json"], "load_generations_path needs allow_code_execution"),
        (["--check_references", "--allow_code_execution", "--generation_only"], "generation_only runs no"),
        (["--load_generations_path", "x.json", "--allow_code_execution"], "programs cannot be read"),
        (
            ["--load_generations_path", "few.json", "--allow_code_execution"],
            "expected programs for 2 problems",
        ),
        (["--load_generations_path", "odd.json", "--allow_code_execution"], "list of programs for each"),
        (["--n_samples", "2"], "expected a model that writes programs"),
        (["--load_data_path", "x"], "remove one of them"),
        (["--load_generations_intermediate_paths", "a", "b"], "one for each task"),
        (["--temperature", "-1"], "temperature"),
        (["--memory_limit", "1MiB"], "memory_limit"),
    ],
)
def test_wrong_options(folder, capsys, words, what):
    (folder / "few.json").write_text(json.dumps([[RIGHT]]))
    (folder / "odd.json").write_text(json.dumps([RIGHT]))
    assert evaluate(*words) == 2
    assert what in capsys.readouterr().err


def test_tasks_are_needed(capsys, library):
    assert main(["bigcode_eval", str(library)]) == 2
    assert "add --tasks" in capsys.readouterr().err
