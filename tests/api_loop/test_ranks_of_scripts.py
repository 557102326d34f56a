"""Scripts on several ranks equal plain PyTorch; an error that ends them is printed once."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranks_script
import torch
from benchmarks.namespaces import available
from script_hosts import run_on_hosts
from torch.testing import assert_close

import headwater as hw
from headwater.core.errors import ConfigError

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")

PATIENCE_S = 300


def run(*command, **options):
    """Run a script or a `-c` text with Python; return exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, **options
    )
    return done.returncode, done.stdout, done.stderr


def loop(text):
    """Return a script that trains on two ranks, with `text` as its step."""
    return f"""
import os, signal, sys, time
import torch
import headwater as hw
backend = hw.backend("CSX", num_csx=2)
model = hw.compile(torch.nn.Linear(4, 1), backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank = hw.distributed.task_id()
batches = [torch.ones(6, 4)] * 100000
def step(x):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
{text}
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Train in plain PyTorch; return the result and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    return ranks_script.train(hw.backend("CPU"), folder), folder


@pytest.fixture(scope="module", params=["python", "torchrun", "hosts"])
def train(request):
    """Return a function that trains on two ranks: started by the script, by `torchrun`, or on two hosts."""

    if request.param == "hosts" and (missing := available()):
        pytest.skip(missing)

    def start(folder):
        """Train; return the printed text and the folder with the files."""
        if request.param == "hosts":
            codes, logs = run_on_hosts(ranks_script.__file__, (2, folder), folder)
            assert codes == [0, 0], logs
            return "".join(logs), folder
        torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2")
        launcher = torchrun if request.param == "torchrun" else ()
        code, output, error = run(*launcher, ranks_script.__file__, 2, folder)
        assert code == 0, output + error
        return output + error, folder

    return start


@pytest.fixture(scope="module")
def two(train, tmp_path_factory):
    """Train on two ranks; return the printed text and the folder with the files."""
    return train(tmp_path_factory.mktemp("two"))


def test_two_ranks_equal_plain_pytorch(two, plain):
    expected, folder = plain
    ranks = [json.loads((two[1] / f"seen_{rank}.json").read_text()) for rank in range(2)]
    assert len(expected.closures) == 2 * (ranks_script.STEPS - 1)
    assert_close(flat(ranks[0]["closures"]), flat(expected.closures), rtol=1e-5, atol=1e-6)
    assert ranks[1]["closures"] == [], "closures run once"
    for rank in ranks:
        assert_close(rank["norms"], expected.norms, rtol=1e-5, atol=1e-6)
        assert_close(rank["accumulated"], expected.accumulated, rtol=1e-5, atol=1e-6)
    weights, others = (torch.load(each / "weights.pt") for each in (two[1], folder))
    assert_close(dict(weights), dict(others), rtol=1e-4, atol=1e-6)


def flat(values):
    return [each for row in values for each in row]


def test_the_output_of_a_script_is_printed_once(two, request):
    begun = 1 if "python" in request.node.name else 2  # each rank reaches the line that prints the number
    assert [two[0].count(words) for words in ("begun", "trained", "every rank warns")] == [begun, 1, 1]


def test_repeated_runs_of_the_same_ranks_are_bit_identical(two, train, tmp_path):
    train(tmp_path)
    name = "seen_0.json"
    assert (tmp_path / name).read_text() == (two[1] / name).read_text()


def test_a_checkpoint_of_two_ranks_resumes_on_one(two, plain):
    name = f"checkpoint_{ranks_script.STEPS - 1}.mdl"
    losses = []
    for kind, folder in (("CSX", two[1]), ("CPU", plain[1])):
        model = hw.compile(ranks_script.make_model(), hw.backend(kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        inputs, labels = ranks_script.make_data()[:8]
        with torch.no_grad():
            model(inputs)
        state = hw.load(folder / name)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert float(optimizer.state_dict()["state"][5]["step"]) == ranks_script.STEPS - 1
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)


SPARSE = """
import json, torch
import headwater as hw
backend = hw.backend("CSX", num_csx={num_csx})
torch.manual_seed(0)
model = hw.compile(torch.nn.Linear(16, 8), backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
masks = hw.sparse.RigLSparsityOptimizer(model.named_parameters(), sparsity=0.5, schedule=2)
generator = torch.Generator().manual_seed(1)
for x in hw.utils.data.DataExecutor([torch.randn(8, 16, generator=generator) for _ in range(6)]):
    optimizer.zero_grad()
    masks.apply_sparsity()
    model(x).square().mean().backward()
    optimizer.step()
    masks.step()
print(json.dumps([masks.sparsity_of("weight"), model.weight.tolist()]))
"""


def test_masks_of_two_ranks_equal_those_of_one():
    found = []
    for num_csx in (1, 2):
        code, output, error = run("-c", SPARSE.format(num_csx=num_csx))
        assert code == 0, error
        found.append(json.loads(output))
    assert found[0][0] == found[1][0] == 0.5
    one, two = (torch.tensor(weights) for _, weights in found)
    assert_close(two, one, rtol=1e-4, atol=1e-6)
    assert torch.equal(one == 0, two == 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("for x in hw.utils.data.DataExecutor(batches):\n    step(x)\n    if rank: raise ValueError('a bug')",
         ["rank 1 has failed", "ValueError: a bug"]),
        ("for x in hw.utils.data.DataExecutor(batches):\n    step(x)\n    if rank: os.kill(os.getpid(), 9)",
         ["rank 1", "was ended by SIGKILL"]),
        ("for x in hw.utils.data.DataExecutor([torch.ones(5, 4)]):\n    step(x)",
         ["a batch of 5 samples cannot be divided among 2 ranks", "4 or 6"]),
        ("for x in batches:\n    step(x)", ["no batch was divided", "DataExecutor(loader)"]),
        ("head = torch.nn.Linear(1, 1)\noptimizer.add_param_group({'params': head.parameters()})\n"
         "for x in hw.utils.data.DataExecutor(batches):\n    head(model(x)).mean().backward()\n"
         "    optimizer.step()",
         ["is not in a compiled model"]),
        ("for x in hw.utils.data.DataExecutor(batches):\n    step(x)\n"
         "    if rank == 0: optimizer.state_dict()",
         ["rank 0 waits for the state of an optimizer, and rank 1 waits for the next batch"]),
    ],
    ids=["raises", "killed", "odd", "undivided", "plain parameter", "state on one rank"],
)  # fmt: skip
def test_an_error_of_a_rank_ends_all_ranks_and_is_printed_once(text, told):
    code, output, error = run("-c", loop(text))
    assert code != 0 and output == ""
    for part in told:
        assert error.count(part) == 1, error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hw.backend('CSX', num_csx=4096)", r"\(cores of this machine\), got 4096"),
        ("hw.backend('CPU', num_csx=2)", "num_csx=1 for plain PyTorch .CPU."),
        (
            "hw.backend('CPU'); hw.utils.CSConfig(num_csx=2)",
            "num_csx=1 for plain PyTorch .CPU.",
        ),
    ],
)
def test_an_invalid_number_of_ranks_is_refused_in_the_first_process(text, told):
    with pytest.raises(ConfigError, match=told):
        exec(text, {"hw": hw})


def test_srun_tasks_are_ranks_and_a_failing_one_names_itself():
    text = loop(
        "for x in hw.utils.data.DataExecutor(batches):\n    step(x)\n    if rank: raise ValueError('a bug')"
    )
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    tasks = []
    for task in "01":
        environment = {**os.environ, **step, "SLURM_PROCID": task, "SLURM_LOCALID": task}
        command = [sys.executable, "-c", text]
        tasks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [task.communicate(timeout=PATIENCE_S)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [1, 1]
    assert "rank 1 (process" in errors[0] and "is gone" in errors[0], errors[0]
    assert "rank 1 on " in errors[1] and "ValueError: a bug" in errors[1], errors[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_that_train_separately_get_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    hw.backend("CSX")
    assert "num_csx is 1: each rank trains separately" in caplog.text


def test_a_script_from_stdin_cannot_start_ranks(tmp_path):
    code, _, error = run("-", input="import headwater as hw\nhw.backend('CSX', num_csx=2)")
    assert code == 1 and "the script was read from stdin" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_first_process(tmp_path, number):
    text = f"open('{tmp_path}/' + str(os.getpid()), 'w').close()\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", loop(text)], start_new_session=True) as first:
        end = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < end and first.poll() is None, "the ranks never came"
            time.sleep(0.1)
        ranks = [int(path.name) for path in Path(tmp_path).iterdir()]
        os.killpg(first.pid, number)  # Ctrl-C as a terminal does it
    assert first.returncode == (130 if number == signal.SIGINT else -number)
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < end, "a rank goes on"
        time.sleep(0.1)


def is_running(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PLANNED_AGAIN = """
import sys
import torch
import headwater as hw
layers = [torch.nn.Linear(4, 4) for _ in range(4)]
model = hw.compile(torch.nn.Sequential(*layers), hw.backend("CSX", num_csx=2))
optimizer = torch.optim.Adam(model.parameters())
for rows in (4, 8):  # the larger batch is planned again
    for _ in range(2):
        optimizer.zero_grad()
        model(hw.distributed.take_part(torch.ones(rows, 4))).mean().backward()
        optimizer.step()
    hw.save(optimizer.state_dict(), sys.argv[1])
"""


def test_optimizer_state_after_a_new_plan_is_that_of_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PLANNED_AGAIN)
    code, output, error = run(script, tmp_path / "saved.mdl")
    assert code == 0, output + error
    state = hw.load(tmp_path / "saved.mdl")["state"]
    assert [float(state[index]["step"]) for index in range(8)] == [4] * 8


IN_TURNS = """
import sys
import torch
import headwater as hw
layers = [torch.nn.Linear(4, 4) for _ in range(4)]
model = hw.compile(torch.nn.Sequential(*layers), hw.backend("CSX", num_csx=2))
adam = torch.optim.Adam(model.parameters())
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step(optimizer):
    optimizer.zero_grad()
    model(hw.distributed.take_part(torch.ones(4, 4))).mean().backward()
    optimizer.step()
for optimizer in (adam, sgd, adam, sgd):
    step(optimizer)
hw.save(adam.state_dict(), sys.argv[1])
weights, state = {name: value.clone() for name, value in model.state_dict().items()}, hw.load(sys.argv[1])
after = []
for _ in range(2):
    step(adam)
    after.append([param.detach().clone() for param in model.parameters()])
    model.load_state_dict(weights)
    adam.load_state_dict(state)
assert all(map(torch.equal, *after))
"""


def test_alternating_optimizers_keep_the_state_of_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_TURNS)
    code, output, error = run(script, tmp_path / "saved.mdl")
    assert code == 0, output + error
    state = hw.load(tmp_path / "saved.mdl")["state"]
    assert [sorted(state[index]) for index in range(8)] == [["exp_avg", "exp_avg_sq", "step"]] * 8
    assert [float(state[index]["step"]) for index in range(8)] == [2] * 8
