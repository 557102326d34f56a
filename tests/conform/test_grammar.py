"""Random models: their programs, shrinking, and the processes of a campaign."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import psutil
import pytest
import torch

import headwater
from headwater.cli.main import main
from headwater.conform.grammar import workers
from headwater.conform.grammar.campaign import Folder, faults, run_campaign
from headwater.conform.grammar.case import Outcome, Part, run_case
from headwater.conform.grammar.draw import draw
from headwater.conform.grammar.judge import BAD, Finding, Verdict, draw_plans, judge, usable
from headwater.conform.grammar.kinds import KINDS
from headwater.conform.grammar.program import Piece, Program, draw_piece
from headwater.conform.grammar.settings import SETTINGS
from headwater.conform.grammar.shrink import shrink
from headwater.conform.grammar.standalone import standalone
from headwater.conform.plans import PLANS
from headwater.core.errors import ConfigError, RunError


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_programs_are_valid_python_with_every_feature():
    features = Counter()
    for case in range(600):
        program = draw(7, case)
        compile(program.source(), "program.py", "exec")
        features.update(program.features())
    assert features.keys() == KINDS.keys()
    assert len(KINDS) > 80
    assert draw(7, 3) == draw(7, 3) != draw(8, 3)


def test_programs_in_16_bits_have_the_same_features_under_autocast():
    for case in range(50):
        program, half = draw(7, case), draw(7, case, precision="bf16")
        assert half.features() == program.features() and half.settings == program.settings
        compile(half.source(), "program.py", "exec")
        lines = half.source().splitlines()
        at = next(number for number, line in enumerate(lines) if line.endswith("y = model(x, tokens)"))
        assert lines[at - 1].strip() == 'with torch.autocast("cpu", dtype=torch.bfloat16):'


def test_every_choice_of_a_feature_is_valid_python():
    settings = draw_piece(random.Random(0), SETTINGS, 0)
    for kind in KINDS.values():
        piece = draw_piece(random.Random(0), kind, 1)
        for name, values in kind.options.items():
            for value in values:
                chosen = {**piece.choices, name: value}
                source = Program(0, settings, (type(piece)(kind, 1, chosen, piece.targets),)).source()
                compile(source, "program.py", "exec")


def test_a_failing_program_is_shrunk_to_its_feature(monkeypatch):
    program = next(p for p in (draw(7, n) for n in range(1000)) if _only_cause(p) and usable(p))

    def compile_wrongly(model, backend):
        for module in model.modules():
            if isinstance(module, torch.nn.Bilinear):
                with torch.no_grad():
                    module.weight.mul_(1.5)
        return model

    monkeypatch.setattr(headwater, "compile", compile_wrongly)
    monkeypatch.setattr(headwater, "release", lambda model: None)
    plain = usable(program)
    (finding,) = judge(program, plain, ["memory"])
    assert finding.verdict is Verdict.DIFFERS
    small, finding = shrink(program, finding)
    assert small.features() == ("bilinear",)
    assert finding.reason.startswith("step 0 output")
    assert small.settings.choices["steps"] == 2 and small.settings.choices["optimizer"] == "sgd"
    script = standalone(small, "memory")
    assert "nn.Bilinear" in script and 'headwater.backend("CSX", **options)' in script


def _only_cause(program):
    return "bilinear" in program.features() and len(program.pieces) > 2


def test_a_kept_tensor_with_a_warning_is_not_a_fault():
    kept = Piece(KINDS["kept_reference"], 1, {"when": "before", "how": "detach"}, (0,))
    program = Program(3, draw_piece(random.Random(0), SETTINGS, 0), (kept,))
    (finding,) = judge(program, usable(program), ["memory"])
    assert finding.verdict is Verdict.WARNED and "first.weight" in finding.reason
    later = replace(program, pieces=(replace(kept, choices={"when": "step", "how": "detach"}),))
    (finding,) = judge(later, usable(later), ["memory"])
    assert finding.verdict is Verdict.EQUAL


def test_a_process_that_ends_or_hangs_loses_only_one_case(monkeypatch):
    def case(seed, case, *, precision, shrinks, begin):
        begin(Part(case, "plain" if case == 3 else "disk", (), ""))
        if case in (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        if case == 4:
            time.sleep(100)
        return Outcome(case, (Finding(Verdict.EQUAL, "memory"),), ())

    monkeypatch.setattr(workers, "run_case", case)
    outcomes = run_campaign(7, 6, workers=2, limit_s=3.0)
    assert [outcome.case for outcome in outcomes] == list(range(6))
    crashed = {outcome.case: outcome.findings[0].reason for outcome in outcomes if outcome.faults()}
    assert outcomes[3].findings[0].verdict is Verdict.CRASHED_PLAIN
    assert crashed == {2: "the process ended with signal 9", 4: "took more than 3 s"}


ENDLESS = """
import os
import time
from headwater.conform.grammar import workers

def run_case(*args, **kwargs):
    print(os.getpid(), flush=True)
    time.sleep(300)

workers.run_case = run_case
print(list(workers.run_cases(0, range(1), workers=1, limit_s=300)))
"""


def test_processes_end_with_the_command_that_started_them():
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as command:
        process = psutil.Process(int(command.stdout.readline()))
        command.kill()
    assert psutil.wait_procs([process], timeout=60)[1] == []


def test_a_campaign_continues_where_it_was_cut_off(monkeypatch, tmp_path):
    done = []

    def some(seed, cases, **options):
        for case in cases:
            done.append(case)
            yield Outcome(case, (Finding(Verdict.DIFFERS, "disk", "why", "x"),), ("a",), (("a",),), ("s",))

    monkeypatch.setattr("headwater.conform.grammar.campaign.run_cases", some)
    run_campaign(7, 3, workers=1, limit_s=1, folder=Folder(tmp_path, 7))
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write('{"case": 3, "find')
    outcomes = run_campaign(7, 5, workers=1, limit_s=1, folder=Folder(tmp_path, 7))
    assert done == [0, 1, 2, 3, 4]
    assert [json.loads(line)["case"] for line in (tmp_path / "cases.jsonl").read_text().splitlines()] == done
    (fault,) = faults(outcomes)
    assert fault.cases == (0, 1, 2, 3, 4)
    assert (tmp_path / "programs" / "case_4_0.py").read_text() == "s"
    for seed, precision in ((8, "fp32"), (7, "bf16")):
        with pytest.raises(ConfigError, match="found models of seed 7 in fp32"):
            Folder(tmp_path, seed, precision)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"seed": 7}\n{'])
def test_a_damaged_folder_of_a_campaign_is_an_error_with_a_remedy(tmp_path, content):
    Folder(tmp_path, 7)
    whole = (tmp_path / "campaign.json").read_text()
    (tmp_path / "campaign.json").write_text(content)
    with pytest.raises(ConfigError, match=r"(?s)campaign, or it is damaged.*campaign\.json.*remedy"):
        Folder(tmp_path, 7)
    (tmp_path / "campaign.json").write_text(whole)
    (tmp_path / "cases.jsonl").write_text(f"{content}\n")
    with pytest.raises(ConfigError, match=r"(?s)campaign, or it is damaged.*cases\.jsonl.*remedy"):
        Folder(tmp_path, 7).outcomes()


def test_cases_that_were_not_equal_are_run_again_with_another_version(tmp_path, monkeypatch):
    done = []

    def some(seed, cases, **options):
        for case in cases:
            done.append(case)
            verdict = Verdict.REFUSED if case == 1 else Verdict.EQUAL
            yield Outcome(case, (Finding(verdict, "disk"),), ())

    monkeypatch.setattr("headwater.conform.grammar.campaign.run_cases", some)
    monkeypatch.setattr("headwater.conform.grammar.campaign.program", lambda: {"version": "old"})
    run_campaign(7, 3, workers=1, limit_s=1, folder=Folder(tmp_path, 7))
    monkeypatch.undo()
    monkeypatch.setattr("headwater.conform.grammar.campaign.run_cases", some)
    for _ in range(2):  # the second time all outcomes are of this version, or equal
        outcomes = run_campaign(7, 4, workers=1, limit_s=1, folder=Folder(tmp_path, 7))
        assert done == [0, 1, 2, 1, 3]
        assert [outcome.case for outcome in outcomes] == [0, 1, 2, 3]
    versions = [outcome.version for outcome in outcomes]
    assert versions[0] == versions[2] == "old" and headwater.__version__ in versions[1]


def test_a_file_at_the_path_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(RunError, match="expected a folder"):
        Folder(tmp_path / "out", 7)


def test_the_command_runs_random_models(monkeypatch, capsys):
    def some(seed, cases, **options):
        verdicts = (Verdict.EQUAL, Verdict.FAILED if seed else Verdict.REFUSED)
        for case in cases:
            findings = tuple(Finding(verdict, "disk", "why", "x") for verdict in verdicts)
            bad = [finding for finding in findings if finding.verdict in BAD]
            yield Outcome(case, findings, (), ((),) * len(bad), ("print(1)",) * len(bad))

    monkeypatch.setattr("headwater.conform.grammar.campaign.run_cases", some)
    assert main(["conform", "--random", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 random models" in out and "4 equal" in out and "4 refused" in out
    assert main(["conform", "--random", "4", "--seed", "1"]) == 1
    out = capsys.readouterr().out
    assert "failed: x (cases 0, 1, 2, 3)" in out and "print(1)" in out


def test_a_case_is_run_under_two_plans():
    outcome = run_case(7, 1)
    assert [finding.plan for finding in outcome.findings] == list(draw_plans(7, 1))
    assert len(set(draw_plans(7, 1))) == 2 and set(draw_plans(7, 1)) <= set(PLANS)
    assert not outcome.faults()
    assert not run_case(7, 1, precision="fp16").faults()
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
