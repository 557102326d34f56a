"""The order of additions does not depend on the speed of the ranks, and cannot deadlock."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.store.gradients.turns import TurnQueue


class Counters:
    """Counters in memory; a wait that would block raises an error instead."""

    def __init__(self, count):
        self.values = [0] * count

    def post(self, slot, value):
        self.values[slot] = value

    def read(self, slot):
        return self.values[slot]

    def wait(self, slot, value, what):
        if self.values[slot] < value:
            raise BlockingIOError(what)


def queues(num_slots, num_ranks, *, together=False):
    taken, entered = Counters(num_slots), Counters(num_ranks) if together else None
    return [TurnQueue(num_slots, rank, num_ranks, taken, entered) for rank in range(num_ranks)]


def waits(queue, turn):
    try:
        queue.wait(turn, "the sum")
    except BlockingIOError:
        return True
    return False


def test_a_rank_has_one_first_turn_for_each_micro_batch_and_sum():
    (queue,) = queues(2, 1)
    assert not queue.has_begun
    assert queue.first(1).slot == 1
    assert queue.has_begun
    assert queue.first(1) is None
    queue.end_micro_batch()
    assert queue.first(1) is not None


def test_unused_turns_come_before_those_of_second_gradients():
    (queue,) = queues(3, 1)
    queue.first(1)
    rest = queue.end_micro_batch()
    assert [(turn.slot, second) for turn, second in rest] == [
        (0, False),
        (2, False),
        (0, True),
        (1, True),
        (2, True),
    ]
    assert queue.micro_batch == 1


def test_rank_one_waits_for_rank_zero():
    zero, one = queues(1, 2)
    first, second = zero.first(0), one.first(0)
    assert waits(one, second)
    assert not waits(zero, first)
    zero.pass_on(first)
    assert not waits(one, second)


def test_no_rank_adds_before_all_ranks_have_begun_the_micro_batch():
    zero, one = queues(1, 2, together=True)
    turn = zero.first(0)
    assert waits(zero, turn)
    one.first(0)
    assert not waits(zero, turn)


def test_wait_for_all_waits_for_the_rounds_that_this_rank_used():
    zero, one = queues(1, 2)
    turn = zero.first(0)
    zero.pass_on(turn)
    try:
        zero.wait_for_all(0, "all")
        raise AssertionError("rank 1 has not added")
    except BlockingIOError:
        pass
    one.pass_on(one.first(0))
    zero.wait_for_all(0, "all")
    zero.wait_for_first(0, 0, "first")


used = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=3)
"""By micro-batch, the sums to which a rank adds, in its order; a sum may occur twice."""


@settings(deadline=None)
@given(st.lists(used, min_size=1, max_size=3), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_additions_does_not_depend_on_the_speed_of_ranks(programs, together, random):
    num_ranks, num_micro_batches = len(programs), max(map(len, programs))
    every = queues(3, num_ranks, together=together)
    todo = []
    for queue, program in zip(every, programs, strict=True):
        turns = []
        for number in range(num_micro_batches):
            for slot in program[number] if number < len(program) else []:
                turn = queue.first(slot)
                turns += [turn] if turn is not None else []
            turns += [turn for turn, _ in queue.end_micro_batch()]
        todo.append(turns)
    order = {slot: [] for slot in range(3)}
    while any(todo):
        ready = [rank for rank in range(num_ranks) if todo[rank] and not waits(every[rank], todo[rank][0])]
        assert ready, "the ranks wait for each other"
        rank = random.choice(ready)
        turn = todo[rank].pop(0)
        order[turn.slot].append((turn.micro_batch, turn.number, rank))
        every[rank].pass_on(turn)
    for turns in order.values():
        assert [number for _, number, _ in turns] == list(range(2 * num_micro_batches * num_ranks))
        assert [rank for *_, rank in turns] == list(range(num_ranks)) * 2 * num_micro_batches
        assert [batch for batch, *_ in turns] == sorted(batch for batch, *_ in turns)
