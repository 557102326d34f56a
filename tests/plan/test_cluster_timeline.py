"""Resources serve one task at a time, in order; networkx finds the same length of the step."""

from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.plan.cluster.parts import PARTS, rank_parts
from headwater.plan.cluster.timeline import Kind, Timeline

SECONDS = st.integers(0, 20).map(float)  # whole numbers: sums are exact


@st.composite
def jobs(draw):
    """Draw tasks `(kind, seconds, resources, after)` on four resources."""
    count = draw(st.integers(1, 30))
    return [
        (
            draw(st.sampled_from(Kind)),
            draw(SECONDS),
            draw(st.lists(st.integers(0, 3), unique=True, max_size=2)),
            draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else [],
        )
        for number in range(count)
    ]


def timeline_of(tasks):
    timeline = Timeline()
    for number in range(4):
        timeline.resource("host", f"rank {number}")
    for kind, seconds, resources, after in tasks:
        timeline.add(kind, "work", 0, seconds, resources, after, seconds)
    return timeline


@given(jobs())
def test_a_timeline_is_as_long_as_its_longest_path(tasks):
    graph = networkx.DiGraph()
    last = {}
    for number, (_, seconds, resources, after) in enumerate(tasks):
        graph.add_edge((number, "begin"), (number, "end"), weight=seconds)
        before = {*after, *(last[each] for each in resources if each in last)}
        graph.add_weighted_edges_from(((other, "end"), (number, "begin"), 0.0) for other in before)
        last |= dict.fromkeys(resources, number)
    assert timeline_of(tasks).end_s == networkx.dag_longest_path_length(graph)


@given(jobs())
def test_resources_run_one_task_at_a_time_after_its_dependencies(tasks):
    timeline = timeline_of(tasks)
    for resource in range(4):
        own = [timeline.tasks[number] for number in timeline.of(resource)]
        assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(own))
        assert timeline.bytes_over(resource) == sum(s for _, s, held, _ in tasks if resource in held)
    for (_, _, _, after), task in zip(tasks, timeline.tasks, strict=True):
        assert all(task.start_s >= timeline.tasks[other].end_s for other in after)


@given(jobs(), st.data())
def test_a_longer_task_never_makes_another_end_earlier(tasks, data):
    slow = data.draw(st.integers(0, len(tasks) - 1))
    kind, seconds, *rest = tasks[slow]
    slower = [*tasks[:slow], (kind, seconds + data.draw(SECONDS), *rest), *tasks[slow + 1 :]]
    before, after = timeline_of(tasks), timeline_of(slower)
    assert all(b.end_s <= a.end_s for b, a in zip(before.tasks, after.tasks, strict=True))


@given(jobs())
def test_parts_of_a_rank_sum_to_the_whole_step(tasks):
    timeline = timeline_of(tasks)
    parts = rank_parts(timeline, 0)
    assert set(parts) == set(PARTS)
    assert min(parts.values()) >= 0.0
    assert sum(parts.values()) == pytest.approx(timeline.end_s)


def test_waiting_time_is_assigned_to_the_awaited_work():
    timeline = Timeline()
    rank, other, link = (timeline.resource("host", name) for name in ("rank 0", "rank 1", "link"))
    slow = timeline.add(Kind.COMPUTE, "forward", 0, 3.0, [other])
    timeline.add(Kind.COMPUTE, "forward", 0, 1.0, [rank])
    sent = timeline.add(Kind.BROADCAST, "weights", 0, 4.0, [link], [slow])
    timeline.add(Kind.COMPUTE, "backward", 0, 2.0, [rank], [sent])
    timeline.add(Kind.REDUCE, "gradients", 0, 5.0, [link])
    parts = rank_parts(timeline, rank)
    assert {name: seconds for name, seconds in parts.items() if seconds} == {
        "compute": 3.0,  # 0 to 1 and 7 to 9
        "idle": 2.0,  # 1 to 3, in which the other rank computes
        "broadcast": 4.0,  # 3 to 7
        "reduce": 3.0,  # 9 to 12
    }
