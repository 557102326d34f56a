"""Scripts on two hosts: refused options, failures, different initial weights, and the documented script."""

import re
from pathlib import Path

import pytest
from benchmarks.namespaces import available
from script_hosts import run_on_hosts

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

DOCS = Path(__file__).resolve().parents[2] / "docs"

START = """
import os, signal, sys
import torch
import headwater as hw
rank = int(os.environ["RANK"])
{before}
backend = hw.backend("CSX", num_csx={num_csx})
torch.manual_seed({seed})
model = hw.compile(torch.nn.Linear(4, 1), backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, x in enumerate(hw.utils.data.DataExecutor([torch.ones(6, 4)] * 5)):
    model(x).mean().backward()
    {within}
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder, before="", within="", seed="0", num_csx=2, end=""):
    """Run a script on two hosts; return the exit codes and the printed text."""
    script = folder / "train.py"
    script.write_text(START.format(before=before, within=within, seed=seed, num_csx=num_csx) + end)
    return run_on_hosts(script, (), folder)


@pytest.mark.parametrize(
    ("within", "told"),
    [
        ("if rank and number == 2: raise ValueError('a bug')", "ValueError: a bug"),
        ("if rank and number == 2: os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("if rank and number == 2: os.abort()", "Fatal Python error: Aborted"),
    ],
    ids=["raises", "killed", "aborts"],
)
def test_an_error_of_a_rank_ends_other_hosts_and_names_the_rank(tmp_path, within, told):
    codes, logs = run(tmp_path, within=within)
    assert 0 not in codes
    assert told in logs[1] and re.search(r"rank\s*:? 1", logs[1]), logs[1]
    assert re.search(r"cannot reach \S+ \(node 1\), rank 1", logs[0]), logs[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"before": "sys.argv += [str(rank)]"},
            "argument 1 differs between ranks: rank 0 has 0, rank 1 has 1",
        ),
        ({"num_csx": 3}, "num_csx=3, but 2 ranks were started"),
        (
            {"within": "hw.step_closure(lambda loss: model.weight.grad)(x)"},
            "a gradient is requested on one rank",
        ),
    ],
    ids=["argument", "number", "closure"],
)
def test_scripts_that_differ_between_hosts_are_refused(tmp_path, options, told):
    codes, logs = run(tmp_path, **options)
    assert 0 not in codes
    assert told in logs[0], logs[0]


def test_weights_that_differ_at_the_start_are_those_of_the_first_host(tmp_path):
    end = f"\nopen(r'{tmp_path}' + f'/rank{{rank}}', 'w').write(str(model.weight.tolist()))\n"
    codes, logs = run(tmp_path, seed="rank", end=end)
    assert codes == [0, 0], logs
    assert "those of the first are taken" in logs[0]
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()


def test_the_documented_script_runs_on_two_hosts(tmp_path):
    page = (DOCS / "several_ranks.md").read_text()
    text = re.search(r"## Your own loop.*?```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(text[1])
    codes, logs = run_on_hosts(tmp_path / "train.py", (), tmp_path)
    assert codes == [0, 0], logs
    losses = [float(line) for line in logs[0].splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert len(losses) == 100
    assert not re.search(r"^\d+\.\d+$", logs[1], re.MULTILINE)
