"""The comparison of a model with plain PyTorch: verdicts, messages and the certificate."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from headwater.cli.main import main
from headwater.conform import compare, train
from headwater.conform.child import PLAIN, Request, outcome_of
from headwater.conform.compare import Comparison
from headwater.conform.isolated import Run, run_child
from headwater.conform.ranks import rounded_difference
from headwater.conform.record import first_difference
from headwater.conform.subject import load_subject
from headwater.core.errors import CheckpointError, ConfigError

SUBJECTS = Path(__file__).with_name("subjects.py")


@pytest.fixture
def in_process(monkeypatch):
    """Replace child processes by calls in this process, which compute the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(request, limit_s):
        found = outcome_of(request)
        return Run(found["status"], found.get("shown", []), found.get("message", ""), found.get("trace", ""))

    monkeypatch.setattr(compare, "run_child", run)
    yield
    torch.set_num_threads(threads)


def compared(factory, plans=("memory", "disk_recompute"), **options):
    return Comparison(f"{SUBJECTS}:{factory}", plans, **options).run()


@pytest.mark.parametrize("factory", ["plain", "with_loss_and_optimizer"])
def test_an_equal_model_gets_a_certificate(factory, in_process):
    report = compared(factory)
    assert report.passed
    assert [entry.outcome for entry in report.entries] == ["equal"] * 3
    assert report.entries[1].values > 20
    text = report.render()
    assert "3 steps in fp32, seed 0" in text and f"torch {version('torch')}" in text
    assert report.verdict == "equal: 2 plans compute what plain PyTorch computes"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_forwards_run_under_autocast_in_other_precisions(precision, in_process):
    report = compared("reports_its_dtype", ["memory", "disk_recompute"], precision=precision, steps=2)
    assert report.passed, report.render()
    dtype = {"bf16": 16, "fp16": 10}[precision]
    assert report.entries[0].detail == f"losses {dtype}, {dtype}"
    assert f"compared 2 steps in {precision}, seed 0" in report.render()
    assert compared("reports_its_dtype", ["memory"]).entries[0].detail == "losses 23, 23, 23"


def test_a_difference_is_reported_with_step_tensor_and_both_values(in_process):
    entry = compared("different", ["memory"]).entries[1]
    assert entry.outcome == "differs"
    name, values = entry.detail.split(": plain ")
    assert name == "step 0: loss"
    plain, streamed = values.split(",")[:2]
    assert float(plain) != float(streamed.replace(" streamed ", ""))


def test_a_refusal_is_listed_with_its_message_and_does_not_pass(in_process):
    report = compared("refused", ["slabs"])
    assert report.entries[1].outcome == "refused"
    assert "torch.func" in report.entries[1].detail
    assert not report.passed


def test_an_error_of_a_streamed_run_is_a_failure_with_its_trace(in_process):
    entry = compared("breaks", ["memory"]).entries[1]
    assert (entry.outcome, entry.detail) == ("failed", "RuntimeError: not in the mood")
    assert "subjects.py" in entry.trace


def test_a_model_that_is_not_deterministic_is_reported(in_process):
    report = compared("unsteady")
    assert [entry.outcome for entry in report.entries] == ["differs from itself"]
    assert report.verdict == "not compared: the plain run differs from itself"


def test_ranks_are_compared_within_a_tolerance_and_refused_with_dropout(in_process):
    assert "draws random numbers" in compared("dropout", ["ranks"]).entries[1].detail
    plain = [("step 0: loss", 1.0), ("step 1: loss", 2.0)]
    assert rounded_difference(plain, [("step 0: loss", 1.00001), ("step 1: loss", 2.0)], 1e-4) is None
    found = rounded_difference(plain, [("step 0: loss", 1.0), ("step 1: loss", 2.1)], 1e-4)
    assert found is not None and found.name == "step 1: loss"


def test_a_crash_or_hang_ends_only_a_child_process(tmp_path):
    def request(name, factory):
        return Request(f"{SUBJECTS}:{factory}", PLAIN, 1, 0, False, str(tmp_path), str(tmp_path / name))

    run = run_child(request("crash.pt", "killed"), limit_s=200)
    assert (run.status, run.message) == ("crashed", "the process was ended by SIGSEGV")
    assert "Segmentation fault" in run.trace
    assert run_child(request("hang.pt", "plain"), limit_s=0.01).status == "timed out"


def test_the_command_prints_and_writes_the_report(in_process, tmp_path, capsys):
    words = ["conform", f"{SUBJECTS}:plain", "--plans", "memory", "--steps", "2"]
    files = ["--json", str(tmp_path / "report.json"), "--out", str(tmp_path / "report.txt")]
    assert main([*words, *files]) == 0
    assert "equal: 1 plan computes what plain PyTorch computes" in capsys.readouterr().out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["equal"] and data["steps"] == 2
    assert data["entries"][1]["run"] == "memory"
    assert "equal" in (tmp_path / "report.txt").read_text()
    assert main(["conform", f"{SUBJECTS}:different", "--plans", "memory"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a model, found none"),
        ([f"{SUBJECTS}:nothing"], "expected a function 'nothing'"),
        (["nowhere_at_all:make"], "module 'nowhere_at_all' not found"),
        ([f"{SUBJECTS}:three"], "expected a torch module first, found int"),
        (["gpt/tinny"], "gpt/tiny"),
        ([f"{SUBJECTS}:plain", "--plans", "memory,tape"], "unknown plan 'tape'"),
        ([f"{SUBJECTS}:plain", "--random", "3"], "expected a model or --random, found both"),
    ],
)
def test_bad_input_exits_with_code_2_and_a_message(words, message, in_process, capsys):
    assert main(["conform", *words]) == 2
    assert message in capsys.readouterr().err


def test_first_difference_finds_values_shapes_dtypes_and_names():
    one = torch.tensor([1.0, 2.0])
    assert first_difference([("a", one)], [("a", one.clone())]) is None
    assert first_difference([("a", torch.tensor(float("nan")))], [("a", torch.tensor(float("nan")))]) is None
    found = first_difference([("a", one), ("b", one)], [("a", one), ("b", torch.tensor([1.0, 3.0]))])
    assert found is not None
    assert (found.name, found.plain, found.streamed) == ("b", "2.0", "3.0")
    assert found.detail == "first at [1], 1 of 2 elements differ, by at most 1"
    found = first_difference([("a", one)], [("a", one.double())])
    assert found is not None and found.streamed == "float64[2]"
    assert first_difference([("a", one)], [("b", one)]) is not None
    assert first_difference([("a", one)], []) is not None
    nan = float("nan")
    assert first_difference([("a", nan)], [("a", nan)]) is None
    assert first_difference([("a", nan)], [("a", 1.0)]) is not None
    assert first_difference([("a", 1.0)], [("a", nan)]) is not None


def test_a_hugging_face_folder_can_be_compared(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    subject = load_subject(str(tmp_path))
    assert subject.model.training
    loss = subject.loss(subject.model, subject.batches[0])
    assert loss.dim() == 0 and loss.requires_grad
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"cannot load these weights: .*\n.*where: ") as damaged:
        load_subject(str(tmp_path))
    assert damaged.value.where == str(tmp_path)


def test_a_params_file_without_data_is_refused():
    with pytest.raises(ConfigError):
        load_subject("gpt/tiny:make:it")


def test_a_long_record_keeps_losses_as_numbers(monkeypatch):
    monkeypatch.setattr(train, "_MOST_BYTES", 0)
    record = train.Record()
    record.add("step 0: loss", torch.tensor(1.5))
    record.add("step 0: output 0", torch.ones(3))
    (_, loss), (_, output) = record.shown
    assert torch.equal(loss, torch.tensor(1.5))
    assert output.startswith("float32[3] with digest ")


def test_digests_are_equal_for_values_that_are_equal(monkeypatch):
    monkeypatch.setattr(train, "_MOST_BYTES", 0)
    records = [train.Record(), train.Record()]
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    records[0].add("value", torch.tensor([0.0, float("nan"), 2.0]))
    records[1].add("value", torch.cat([torch.tensor([-0.0]), other_nan, torch.tensor([2.0])]))
    assert first_difference(records[0].shown, records[1].shown) is None


def test_the_plain_run_of_a_large_model_equals_itself_when_all_values_are_read(in_process, monkeypatch):
    monkeypatch.setattr(train, "_MOST_BYTES", 400)
    report = compared("dropout", plans=())
    assert report.passed, report.render()
    assert report.entries[0].detail.count(",") == 2, "three losses"
