"""`headwater.profile` writes the profile of a user's loop; the ranks of a run share one trace."""

import json
import time

import pytest
import torch
from tests.rank_processes import run_ranks

import headwater
from headwater.api.profile import LoopProfile
from headwater.core.busy import BusyTimes
from headwater.core.errors import ConfigError, RunError
from headwater.core.recorder import COMPUTE, RECORDER
from headwater.fabric import membership
from headwater.profiler.ranks import offsets_of
from headwater.profiler.summary import Row, StageWork, Summary, of_all_ranks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


def train(model, optimizer, steps, after=lambda: None):
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


@pytest.mark.parametrize("streams", [True, False])
def test_a_loop_has_a_profile_of_its_steps(streams, tmp_path, capsys):
    torch.manual_seed(0)
    model = Net()
    if streams:
        model = headwater.compile(model, headwater.backend(num_slabs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)  # the first step of a streamed model makes the plan
    with headwater.profile(tmp_path / "p", model) as profile:
        train(model, optimizer, 3, profile.step)
    found = json.loads((tmp_path / "p" / "op_profile.json").read_text())
    assert found["steps"] == [1, 2, 3]
    names = {entry["name"]: entry for entry in found["modules"]}
    if streams:
        assert names["model.layers.2.fwd"]["calls"] == names["model.layers.2.bwd"]["calls"] == 1
        headwater.release(model)
    assert sum(entry["share"] for entry in found["modules"] + found["others"]) == pytest.approx(1)
    assert "Time of steps 1 to 3" in capsys.readouterr().out
    assert json.loads((tmp_path / "p" / "chrome_trace.json").read_text())["traceEvents"]


def test_without_calls_of_step_the_context_is_one_step(tmp_path):
    with headwater.profile(tmp_path), RECORDER.span(COMPUTE, "some stage"):
        pass
    assert json.loads((tmp_path / "op_profile.json").read_text())["steps"] == [1]


def test_a_loop_that_fails_writes_nothing(tmp_path):
    with pytest.raises(ValueError), headwater.profile(tmp_path / "p"):
        raise ValueError
    assert not (tmp_path / "p").exists()


def test_a_folder_that_cannot_be_written_is_an_error_before_the_loop(tmp_path):
    (tmp_path / "p").write_text("")
    with pytest.raises(RunError), headwater.profile(tmp_path / "p"):
        raise AssertionError("the loop does not begin")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"model": 5}, "expected a torch.nn.Module, got a int"),
        ({"depth": -1}, "expected depth to be a number >= 0, got -1"),
        ({"depth": "all"}, "expected depth to be a number >= 0, got 'all'"),
    ],
)
def test_arguments_that_cannot_be_used_are_errors_before_the_loop(arguments, expected, tmp_path):
    with pytest.raises(ConfigError, match=expected), headwater.profile(tmp_path / "p", **arguments):
        pytest.fail("the loop began")


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_have_one_trace_on_one_clock(hosts, tmp_path):
    def rank(fabric):
        membership.joined.value = fabric
        taken = LoopProfile(None, depth=1, operators=False)
        for _ in range(2):
            time.sleep(0.05 * fabric.rank)  # so that rank 0 waits
            fabric.barrier("a step")
            with RECORDER.span(COMPUTE, f"stage of rank {fabric.rank}"):
                pass
            taken.step()
        taken.write(tmp_path)

    run_ranks(rank, 2, hosts=hosts)
    events = json.loads((tmp_path / "chrome_trace.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {1: "rank 0", 2: "rank 1"}
    found = json.loads((tmp_path / "op_profile.json").read_text())
    assert [entry["rank"] for entry in found["ranks"]] == [0, 1]
    stages = {event["pid"]: event["args"]["stage"] for event in events if event["args"].get("stage")}
    assert stages == {1: "stage of rank 0", 2: "stage of rank 1"}
    assert any(event["ph"] == "X" and event["cat"] == "collective" for event in events)


def test_the_tables_are_those_of_the_slowest_rank(tmp_path, capfd):
    def rank(fabric):
        membership.joined.value = fabric
        taken = LoopProfile(None, depth=1, operators=False)
        with RECORDER.span(COMPUTE, "a stage"):
            time.sleep(1.0 * fabric.rank)  # longer than a busy machine pauses the other rank
        fabric.barrier("the slower rank")
        taken.step()
        taken.write(tmp_path)

    run_ranks(rank, 2)
    found = json.loads((tmp_path / "op_profile.json").read_text())
    assert found["rank"] == 1
    others = [{row["name"]: row["ms"] for row in each["others"]} for each in found["ranks"]]
    waits = [each.get("other ranks", 0) for each in others]
    assert waits[0] > waits[1]
    assert "Time of step 1; rank 1, the slowest of 2 ranks" in capfd.readouterr().out


def summary(rank, own_s, update_s, disk_bytes):
    """Return the times of a rank that waits for other ranks for the rest of ten seconds."""
    return Summary(
        rank=rank,
        steps=(1,),
        whole_s=10.0,
        modules=(Row("model.fwd", own_s, calls=1),),
        others=(Row("other ranks", 10.0 - own_s),),
        stages=(StageWork("blocks.0", forward_s=own_s, update_s=update_s, disk_bytes=disk_bytes),),
        busy=BusyTimes({}, {}, {}),
        ratios={"compute": (4.0, own_s), "update": (1.0, update_s)},
    )


def test_the_updates_of_a_stage_are_those_of_all_ranks():
    # One rank of a host updates the stages on disk, and another one is the slowest.
    found = of_all_ranks([summary(0, 5.0, 2.0, 100), summary(1, 9.0, 0.0, 0)])
    assert found.rank == 1
    assert found.stages == (StageWork("blocks.0", forward_s=9.0, update_s=2.0, disk_bytes=100),)
    assert found.ratios == {"compute": (4.0, 9.0), "update": (1.0, 2.0)}
    alone = summary(0, 5.0, 2.0, 100)
    assert of_all_ranks([alone]) == alone


def test_a_second_profile_at_the_same_time_is_refused(tmp_path):
    with (
        headwater.profile(tmp_path / "first"),
        pytest.raises(RunError, match="one profile at a time"),
        headwater.profile(tmp_path / "second"),
    ):
        raise AssertionError("the second profile does not begin")
    assert not (tmp_path / "second").exists()
    with headwater.profile(tmp_path / "second"):  # the first one has ended
        pass


def test_operators_are_refused_while_another_profiler_of_torch_runs(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        with (
            pytest.raises(RunError, match="runs it already"),
            headwater.profile(tmp_path, operators=True),
        ):
            raise AssertionError("the profile does not begin")
        with headwater.profile(tmp_path):  # without operators both run, and the failed one has ended
            pass


def test_the_clock_of_a_host_is_shifted_by_the_median_difference():
    rounds = [[1000.0 + i, 1000.0 + i, 400.0 + i, 400.0] for i in (0, 1, 90)]
    rounds[2][2] -= 50  # rank 2 was late once
    assert offsets_of(rounds, [0, 0, 1, 1]) == [0, 0, 600, 600]
