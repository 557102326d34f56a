"""Jobs on an appliance over a real SSH server on loopback: files there, log and artifacts back."""

import gzip
import hashlib
import json
import signal
import subprocess
import sys
import threading

import pytest
import yaml
from queue_samples import wait_until
from ssh_samples import cutting

from headwater.appliance.remote.address import Address
from headwater.appliance.remote.bundle import Bundle
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.copy_lock import LOCK_FILE
from headwater.appliance.remote.follower import Follower
from headwater.appliance.remote.run_link import FILE, run_name
from headwater.appliance.types import Phase
from headwater.cli.following import read_choice
from headwater.cli.main import main
from headwater.cli.remote_params import bundle_params
from headwater.config.run import load_params
from headwater.core.errors import ConfigError, QueueError
from headwater.data.assets import sample_text
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE

WAFER = "ssh://wafer"
PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU}}
    model_dir: {folder}/run
    model: {{name: gpt2, vocab_size: 300, hidden_size: 32, num_hidden_layers: 2, num_heads: 2,
      max_position_embeddings: 16}}
    optimizer: {{AdamW: {{learning_rate: 1e-3}}}}
    loop: {{max_steps: 6}}
    checkpoint: {{steps: 3}}
  fit:
    train_dataloader: {{data_processor: GptHDF5DataProcessor, data_dir: {data}, batch_size: 8}}
"""
TRAIN = """
import json, random, sys, time
from pathlib import Path
import helper
out, go = map(Path, sys.argv[1:])
def step(number):
    partial = out / f"checkpoint_{number}.partial"
    partial.mkdir(parents=True)
    (partial / "weights.bin").write_bytes(random.Random(number).randbytes(9 << 20))
    (partial / "manifest.json").write_text("{}")
    partial.rename(out / f"checkpoint_{number}")
    with (out / "history.jsonl").open("a") as file:
        print(json.dumps({"step": number, "loss": 1 / number}), file=file)
    print("step", number, "loss", 1 / number, flush=True)
for number in range(1, 4):
    step(number)
end = time.monotonic() + 200
while not go.exists() and time.monotonic() < end:
    time.sleep(0.1)
    print("waiting", flush=True)
step(4)
(out / "curve.png").write_bytes(bytes(range(256)))
(out / "empty").touch()
(out / "later.partial").write_text("never finished")
print("end", helper.WORD)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Samples of 16 tokens from a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text(gzip.decompress(sample_text().read_bytes()).decode()[:20_000])
    prepare([text], folder / "samples", PrepareSettings(TrainBPE(300), 16))
    return folder / "samples" / "train"


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """The working folder of the client."""
    folder = tmp_path / "laptop"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def script(laptop):
    """A script with a module beside it, and the file whose existence lets it end."""
    (laptop / "train.py").write_text(TRAIN)
    (laptop / "helper.py").write_text("WORD = 'done'")
    return laptop / "go"


def sums(folder):
    """Checksum of each file in a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_all_arrived(job, folder):
    """Every artifact of a job is in a folder, byte by byte."""
    there = {
        path: sum_ for path, sum_ in sums(job.model_dir).items() if not path.endswith((".partial", ".lock"))
    }
    here = sums(folder)
    del here[FILE], here[LOCK_FILE]
    assert here == there


def test_a_job_whose_connection_is_killed_ten_times(sshd, queue, script, laptop, capfd):
    words = ["--appliance", WAFER, "jobs", "submit", "--follow", "--model_dir", "run"]
    # The first connection must succeed at once. The file is written after it.
    with cutting(1.0, most=10, after=(laptop / "run" / FILE).exists) as cuts:

        def end_job():
            wait_until(lambda: len(cuts) >= 10)
            script.touch()

        thread = threading.Thread(target=end_job)
        thread.start()
        code = main([*words, "--", "python", "train.py", "{model_dir}", str(script)])
        thread.join()
    out, err = capfd.readouterr()
    (job,) = queue.jobs(everything=True)
    assert (code, job.phase, len(cuts)) == (0, Phase.SUCCEEDED, 10), err
    assert_all_arrived(job, laptop / "run")
    assert out == f"{job.name}\n" + job.log.read_text() and "end done" in out
    assert not list(laptop.rglob("*.partial"))
    assert "connecting again" in err and "connected again" in err


def test_a_submission_whose_reply_is_lost_creates_one_job(sshd, queue, laptop, monkeypatch, capsys):
    ask = Connection.ask

    def ask_twice(self, request, body=b"", /, **fields):
        reply = ask(self, request, body, **fields)
        return ask(self, request, body, **fields) if request in ("submit", "add", "find") else reply

    monkeypatch.setattr(Connection, "ask", ask_twice)
    (laptop / "words.txt").write_text("hello")
    assert main(["--appliance", WAFER, "jobs", "submit", "--follow", "--", "cat", "words.txt"]) == 0
    assert len(queue.jobs(everything=True)) == 1
    assert "hello" in capsys.readouterr().out


def losses(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def test_fit_on_an_appliance_equals_fit_here(sshd, queue, laptop, data, capfd):
    for name in ("here", "there"):
        (laptop / name).mkdir()
        (laptop / f"{name}.yaml").write_text(PARAMS.format(folder=laptop / name, data=data))
    assert main(["fit", "here.yaml"]) == 0
    assert main(["--mgmt_address", WAFER, "fit", "there.yaml", "--max_steps", "3"]) == 0
    here, there = laptop / "here" / "run", laptop / "there" / "run"
    assert losses(there) == losses(here)[:3] and (there / "checkpoint_3").is_dir()
    assert main(["--appliance", WAFER, "fit", "there.yaml"]) == 0, "it continues from the checkpoint there"
    out, err = capfd.readouterr()
    assert losses(there) == losses(here) and "done: step 6" in out
    assert "sending" in err
    first, second = queue.jobs(everything=True)
    assert first.model_dir == second.model_dir
    assert_all_arrived(second, there)
    saved = yaml.safe_load((there / "params.yaml").read_text())["trainer"]
    assert saved["init"]["model_dir"] == str(second.model_dir)
    weights = [folder / "checkpoint_6" for folder in (here, there)]
    names = [path.name for path in weights[0].iterdir() if path.suffix == ".bin"]
    assert all((weights[0] / name).read_bytes() == (weights[1] / name).read_bytes() for name in names)


def test_validate_on_an_appliance(sshd, laptop, data, capfd, monkeypatch):
    section = "{{data_processor: GptHDF5DataProcessor, data_dir: {data}, batch_size: 8}}"
    sections = (
        f"  validate:\n    val_dataloader: {section}\n  validate_all:\n    val_dataloaders: {section}\n"
    )
    (laptop / "p.yaml").write_text((PARAMS + sections).format(folder=laptop, data=data))

    def said(*words, code=0):
        assert main([*map(str, words)]) == code
        return capfd.readouterr()

    there = ("--appliance", WAFER)
    assert "does not belong to a run on ssh://wafer" in said(*there, "validate", "p.yaml", code=2).err
    said(*there, "fit", "p.yaml")
    found = [
        line for line in said(*there, "validate", "p.yaml").out.splitlines() if "validation loss" in line
    ]
    assert found == said("validate", "p.yaml").out.splitlines(), "the copies here have the same loss"
    earlier = ("validate", "p.yaml", "--checkpoint_path", laptop / "run" / "checkpoint_3")
    monkeypatch.setenv("HEADWATER_APPLIANCE", WAFER)  # without effect
    assert said("validate", "p.yaml").out.splitlines() == found
    assert said(*earlier).out.strip() in said(*there, *earlier).out
    # The log of a job also has notices, such as those of a busy machine.
    lines = said(*there, "validate", "p.yaml", "--all").out.splitlines()
    names = [line.split()[0].rpartition("/")[2] for line in lines if "validation loss" in line]
    assert names == ["checkpoint_3", "checkpoint_6"]


def test_plan_on_an_appliance(sshd, queue, laptop, capfd):
    (laptop / "p.yaml").write_text(PARAMS.format(folder=laptop, data="missing"))
    plan = ["--appliance", WAFER, "plan", "p.yaml"]
    assert main([*plan, "--sequence_length", "8"]) == 0
    assert "predicted rate" in capfd.readouterr().out
    (job,) = queue.jobs(everything=True)
    assert job.model_dir is None and job.command[-2:] == ("--sequence_length", "8")
    assert main([*plan, "--png", "x"]) == 2
    assert "--png works only with files of this machine" in capfd.readouterr().err


def test_validate_while_the_run_trains(sshd, queue, submit, laptop, data, capfd):
    (laptop / "p.yaml").write_text(
        PARAMS.format(folder=laptop, data=data)
        + (f"    val_dataloader: {{data_processor: GptHDF5DataProcessor, data_dir: {data}, batch_size: 8}}\n")
    )
    assert main(["--appliance", WAFER, "fit", "p.yaml"]) == 0
    (first,) = queue.jobs(everything=True)
    submit("sleep", "1000", model_dir=first.model_dir)
    capfd.readouterr()
    assert main(["--appliance", WAFER, "validate", "p.yaml"]) == 0
    assert "validation loss" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["generate", "serve", "data"])
def test_commands_without_an_appliance_say_what_works(command, capfd):
    assert main(["--appliance", WAFER, command, "x"]) == 2
    err = capfd.readouterr().err
    assert f"headwater {command} runs only on this machine" in err
    assert f"jobs submit --follow -- headwater {command}" in err and "fit, jobs, plan, validate" in err


def start(*words):
    """Start a command in a separate process, as a terminal does."""
    command = [sys.executable, "-P", "-m", "headwater", "--appliance", WAFER, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("action", ["detach", "cancel"])
def test_ctrl_c_cancels_the_job_or_detaches(action, sshd, queue, script, laptop, capfd):
    options = ("--follow", "--model_dir", "run", "--on_interrupt", "ask" if action == "detach" else action)
    process = start("jobs", "submit", *options, "--", "python", "train.py", "{model_dir}", script)
    wait_until(lambda: (laptop / "run" / "checkpoint_3").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    (job,) = queue.jobs(everything=True)
    assert process.returncode == 130, err
    if action == "cancel":
        assert job.phase == Phase.CANCELLED and "asked the job to end" in err
        return
    assert job.phase == Phase.RUNNING and f"jobs attach {job.name}" in err
    script.touch()
    assert main(["--appliance", WAFER, "jobs", "attach", job.name]) == 0
    assert "end done" in capfd.readouterr().out
    assert_all_arrived(queue.show(job.name), laptop / "run")


def test_two_followers_take_turns_in_one_folder(sshd, queue, script, laptop, capfd):
    options = ("--follow", "--model_dir", "run")
    first = start("jobs", "submit", *options, "--", "python", "train.py", "{model_dir}", script)
    wait_until(lambda: (laptop / "run" / "checkpoint_3").exists())
    (job,) = queue.jobs()
    others = [start("jobs", "attach", job.name, "--model_dir", "run") for _ in range(2)]
    notices = [each.stderr.readline() for each in others]
    assert all("another process copies artifacts to run; waiting" in each for each in notices), notices
    first.kill()
    first.communicate()
    script.touch()
    for each in others:
        out, err = each.communicate(timeout=100)
        assert each.returncode == 0 and "end done" in out, err
    assert_all_arrived(queue.show(job.name), laptop / "run")
    assert not list(laptop.rglob("*.partial"))


def test_the_exit_code_of_a_failed_job(sshd, laptop, capfd):
    assert (
        main(
            ["--appliance", WAFER, "jobs", "submit", "--follow", "--", "sh", "-c", f"exit 7 #{'long' * 100}"]
        )
        == 7
    )
    assert "FAILED: ended with exit code 7" in capfd.readouterr().err


def test_an_error_while_a_job_is_followed(sshd, laptop, monkeypatch, capfd):
    def fail(self):
        raise QueueError("the machine refuses the login")

    monkeypatch.setattr(Follower, "run", fail)
    assert main(["--appliance", WAFER, "jobs", "submit", "--follow", "--", "true"]) == 2
    err = capfd.readouterr().err
    assert "it continues" in err and "jobs attach wsjob-000000000001" in err
    assert err.endswith("error: the machine refuses the login\n")


def test_only_blocks_that_differ_are_sent(sshd, queue, script, laptop, monkeypatch):
    script.touch()
    words = ["--appliance", WAFER, "jobs", "submit", "--model_dir", "run", "--"]
    assert main([*words, "python", "train.py", "{model_dir}", str(script)]) == 0
    job = queue.wait(queue.jobs(everything=True)[0].name, 100)
    partial = laptop / "run" / "checkpoint_2.partial"
    partial.mkdir()
    whole = (job.model_dir / "checkpoint_2" / "weights.bin").read_bytes()
    (partial / "weights.bin.partial").write_bytes(whole[: 5 << 20] + bytes(1 << 20))
    sent, ask = [], Connection.ask

    def record(self, request, body=b"", /, **fields):
        reply = ask(self, request, body, **fields)
        if request == "read" and fields["artifact"]["path"] == "checkpoint_2/weights.bin":
            sent.append(len(reply.body))
        return reply

    monkeypatch.setattr(Connection, "ask", record)
    assert main(["--appliance", WAFER, "jobs", "attach", job.name, "--artifacts", "small"]) == 0
    assert sent == [] and (laptop / "run" / "curve.png").exists()
    assert main(["--appliance", WAFER, "jobs", "attach", job.name]) == 0
    assert sent[0] == 0, "the first block is there already"
    assert [size for size in sent if size] == [4 << 20, 1 << 20]
    assert_all_arrived(job, laptop / "run")


def test_the_params_of_an_appliance(laptop, data, tmp_path):
    text = PARAMS.format(folder="runs", data=data) + (
        f"    val_dataloader: {{data_processor: GptHDF5DataProcessor, data_dir: {data}, batch_size: 8}}\n"
        "  validate:\n"
        "    val_dataloader: {data_processor: GptHDF5DataProcessor, data_dir: /far/away, batch_size: 8}\n"
    )
    (laptop / "params.yaml").write_text(text)
    bundle = Bundle()
    section = yaml.safe_load(bundle_params(load_params("params.yaml"), bundle))["trainer"]
    assert section["fit"]["train_dataloader"]["data_dir"] == ["data/0/train"]
    assert section["fit"]["val_dataloader"][0]["data_dir"] == ["data/0/train"], "each folder once"
    assert section["validate"]["val_dataloader"]["data_dir"] == ["/far/away"], "a path of the appliance"
    assert section["init"]["model_dir"] == "runs/run"
    assert {each.path for each in bundle.files} == {
        f"data/0/train/{path.name}" for path in data.iterdir() if path.is_file()
    }
    mounted = load_params(
        "params.yaml", {"trainer.init.backend.cluster_config.mount_dirs": [str(data.parent)]}
    )
    bundle = Bundle()
    section = yaml.safe_load(bundle_params(mounted, bundle))["trainer"]
    assert section["fit"]["train_dataloader"]["data_dir"] == [str(data)] and bundle.files == []
    assert "mount_dirs" not in section["init"]["backend"]["cluster_config"]


def test_files_that_cannot_be_sent(sshd, laptop, data, capfd):
    def error(*words):
        assert main(["--appliance", WAFER, *map(str, words)]) == 2
        return capfd.readouterr().err

    (laptop / "p.yaml").write_text(PARAMS.format(folder=laptop, data="nowhere"))
    assert "nowhere does not exist on this machine, and is not an absolute path" in error("fit", "p.yaml")
    (laptop / "large").mkdir()
    with (laptop / "large" / "x.h5").open("wb") as file:
        file.truncate(300 << 20)
    (laptop / "p.yaml").write_text(PARAMS.format(folder=laptop, data="large"))
    assert "expected at most 256 MiB" in error("fit", "p.yaml")
    assert "expected a file below the working folder" in error(
        "jobs", "submit", "--upload", data, "--", "true"
    )
    (laptop / "run" / "checkpoint_1").mkdir(parents=True)
    (laptop / "p.yaml").write_text(PARAMS.format(folder=laptop, data=data))
    assert "which an appliance cannot continue" in error("fit", "p.yaml")


def test_a_model_dir_belongs_to_one_run_of_one_appliance(tmp_path):
    name = run_name(tmp_path / "my run", Address("wafer"))
    assert name.startswith("my-run-")
    assert run_name(tmp_path / "my run", Address("wafer")) == name
    with pytest.raises(ConfigError, match="belongs to a run on ssh://wafer, not on ssh://other"):
        run_name(tmp_path / "my run", Address("other"))
    (tmp_path / "my run" / FILE).write_text("{")
    with pytest.raises(ConfigError, match="the file cannot be read"):
        run_name(tmp_path / "my run", Address("wafer"))


def test_another_version_of_headwater(sshd, laptop, monkeypatch, capfd):
    monkeypatch.setattr("headwater.appliance.remote.submission.version", lambda name: "99.0")
    (laptop / "p.yaml").write_text(PARAMS.format(folder=laptop, data="/far/away"))
    assert main(["--appliance", WAFER, "fit", "p.yaml"]) == 2
    assert "expected headwater 99.0, which this machine has" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("c", "cancel"),
        ("CANCEL\n", "cancel"),
        ("f", "follow"),
        ("", "detach"),
        ("d", "detach"),
        ("x", "detach"),
    ],
)
def test_answers_to_ctrl_c(answer, choice):
    assert read_choice(answer) == choice
