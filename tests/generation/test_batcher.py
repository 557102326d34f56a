"""Continuous batching: tokens of a pass, beginning and end of requests, sampling of one sequence."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import ConfigError, DataError, NonFiniteError
from headwater.generation.batcher import Batcher, divided
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Chooser, Sampling, repeating
from headwater.serving.worker import Worker


class CountingModel:
    """A model whose next token is the number of tokens that it has read of the sequence."""

    max_length = 100

    def __init__(self):
        self.passes = []
        self.caches = []

    def new_cache(self, max_length):
        self.caches.append([])
        return self.caches[-1]

    def next_logits(self, pieces):
        self.passes.append([len(piece.tokens) for piece in pieces])
        for piece in pieces:
            piece.cache.extend(piece.tokens.tolist())
        return torch.nn.functional.one_hot(torch.tensor([len(piece.cache) for piece in pieces]), 200).float()


def request(length, new, **settings):
    return GenerationRequest(tuple(range(length)), new, Sampling(0), **settings)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 50))
def test_a_pass_has_at_most_its_limit_and_every_generating_sequence(unread, more):
    limit = len(unread) + more
    counts = divided(unread, limit)
    assert sum(counts) <= limit
    assert all(0 <= count <= there for count, there in zip(counts, unread, strict=True))
    assert all(count == 1 for count, there in zip(counts, unread, strict=True) if there == 1)
    assert sum(counts) == min(limit, sum(unread))


def test_prompts_are_read_in_parts_beside_generated_tokens():
    model = CountingModel()
    batcher = Batcher(model, "cpu", Limits(100, 6, 4))
    first = batcher.add(request(3, 5))
    batcher.step()
    second = batcher.add(request(12, 2))
    batcher.run()
    assert model.passes == [[3], [1, 5], [1, 5], [1, 2], [1, 1]]
    assert first.output == [3, 4, 5, 6, 7]
    assert second.output == [12, 13]
    assert first.reason == second.reason == "length"
    assert model.caches[1] == [*range(12), 12]


def test_a_request_waits_until_its_keys_and_values_fit():
    batcher = Batcher(CountingModel(), "cpu", Limits(20, 20, 4))
    long, waits, short = (batcher.add(request(*sizes)) for sizes in ((10, 3), (9, 3), (2, 1)))
    batcher.step()
    assert (batcher.active, batcher.waiting, batcher.used_cache_tokens) == (1, 2, 12)
    assert not short.output, "requests begin in their order"
    batcher.run()
    assert [each.reason for each in (long, waits, short)] == ["length"] * 3
    assert (batcher.active, batcher.waiting, batcher.used_cache_tokens) == (0, 0, 0)


def test_no_more_sequences_than_allowed_are_computed_at_once():
    model = CountingModel()
    batcher = Batcher(model, "cpu", Limits(1000, 100, 3))
    for _ in range(7):
        batcher.add(request(2, 2))
    batcher.run()
    assert max(map(len, model.passes)) == 3


def test_cancelled_requests_release_their_memory():
    batcher = Batcher(CountingModel(), "cpu", Limits(20, 20, 4))
    running, waiting, last = (batcher.add(request(8, 8)) for _ in range(3))
    batcher.step()
    batcher.cancel(running)
    batcher.cancel(waiting)
    assert (batcher.active, batcher.waiting) == (0, 1)
    batcher.run()
    assert [each.reason for each in (running, waiting, last)] == ["cancelled", "cancelled", "length"]
    assert len(running.output) == 1


def test_texts_end_at_an_end_token_and_when_the_receiver_says_so():
    batcher = Batcher(CountingModel(), "cpu", Limits(100, 20, 4))
    ended = batcher.add(request(4, 50, ends=frozenset({7, 8})))
    stopped = batcher.add(request(4, 50, receive=lambda chosen: chosen.token == 9))
    batcher.run()
    assert (ended.output, ended.text_tokens, ended.reason) == ([4, 5, 6, 7], [4, 5, 6], "stop")
    assert (stopped.output, stopped.text_tokens) == ([4, 5, 6, 7, 8, 9],) * 2


def test_requests_that_can_never_fit_are_refused():
    batcher = Batcher(CountingModel(), "cpu", Limits(50, 20, 4))
    with pytest.raises(DataError, match="at most 11 new tokens"):
        batcher.add(request(40, 12))
    with pytest.raises(DataError, match="shorten the prompt to at most 50 tokens"):
        batcher.add(request(51, 1))
    with pytest.raises(DataError, match="shorten the prompt to at most 41 tokens"):
        batcher.add(request(51, 10))
    batcher.room.check(request(41, 10))
    with pytest.raises(DataError, match="request fewer new tokens, together at most 51"):
        batcher.add(request(51, 51))
    with pytest.raises(DataError, match="empty"):
        batcher.add(request(0, 1))
    with pytest.raises(DataError, match="at least 0, got -1"):
        batcher.add(request(3, -1))


def test_a_request_for_no_tokens_ends_without_a_pass():
    model = CountingModel()
    batcher = Batcher(model, "cpu", Limits(50, 20, 4))
    ended = batcher.add(request(3, 0))
    batcher.run()
    assert (ended.output, ended.reason, model.passes) == ([], "length", [])
    worker, reasons, done = Worker(batcher, "test"), [], threading.Event()
    worker.submit(request(3, 0), lambda generation, error: (reasons.append(generation.reason), done.set()))
    assert done.wait(60)
    worker.close()
    assert (reasons, model.passes) == (["length"], [])


def test_requests_that_have_not_reached_the_batcher_wait_too():
    model, reached, free = CountingModel(), threading.Event(), threading.Event()
    compute = model.next_logits

    def held(pieces):
        reached.set()
        assert free.wait(60)
        return compute(pieces)

    model.next_logits = held
    worker = Worker(Batcher(model, "cpu", Limits(50, 20, 1)), "test")
    worker.submit(request(4, 2), lambda generation, error: None)
    assert reached.wait(60)
    for _ in range(3):
        worker.submit(request(4, 2), lambda generation, error: None)
    assert worker.waiting == 3
    free.set()
    worker.close()


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_end_only_their_request(temperature):
    class Model(CountingModel):
        def next_logits(self, pieces):
            logits = super().next_logits(pieces)
            logits[[len(piece.cache) == 7 for piece in pieces], 3] = torch.nan
            return logits

    def sampled(length, new):
        return GenerationRequest(tuple(range(length)), new, Sampling(temperature))

    ended, found = threading.Event(), {}

    def end(generation, error):
        found[generation] = error
        if len(found) == 2:
            ended.set()

    worker = Worker(Batcher(Model(), "cpu", Limits(100, 20, 4)), "test")
    failed, other = worker.submit(sampled(5, 9), end), worker.submit(sampled(10, 9), end)
    assert ended.wait(60)
    assert worker.error is None
    worker.close()
    assert "finite logits" in str(found[failed])
    assert found[other] is None
    assert (len(failed.output), len(other.output)) == (2, 9)
    batcher = Batcher(Model(), "cpu", Limits(100, 20, 4))
    batcher.add(sampled(5, 9))
    with pytest.raises(NonFiniteError, match="finite logits"):
        batcher.run()


def test_the_length_of_a_request_is_limited():
    batcher = Batcher(CountingModel(), "cpu", Limits(100, 20, 4, length=30))
    with pytest.raises(DataError, match="30 positions"):
        batcher.add(request(20, 20))


def test_repeated_sequences():
    assert repeating([1, 2, 3, 1, 2], 3) == [3]
    assert repeating([1, 2, 1, 3, 1], 2) == [2, 3]
    assert repeating([4, 5], 1) == [4, 5]
    assert repeating([1, 2, 3, 1, 2], 0) == repeating([1, 2], 3) == []


def test_extreme_settings_still_choose_a_token():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert Chooser(Sampling(1e-308)).choose(logits, ()).token == 1
    assert Chooser(Sampling(1.0, top_p=1e-300)).choose(logits, ()).token == 1
    assert Chooser(Sampling(0, no_repeat_ngram_size=1)).choose(logits, (0, 1, 2, 3)).token == 1


def test_log_probabilities_are_those_before_temperature_and_restriction():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    expected = logits.log_softmax(-1)
    chosen = Chooser(Sampling(0.5, top_k=1), 2).choose(logits, ())
    assert chosen.token == 1
    assert chosen.log_probability == pytest.approx(float(expected[1]))
    assert chosen.top == ((1, pytest.approx(float(expected[1]))), (2, pytest.approx(float(expected[2]))))


def test_tokens_of_a_sequence_do_not_depend_on_other_sequences():
    def sampled(others):
        batcher = Batcher(CountingModel(), "cpu", Limits(1000, 20, 8))
        own = batcher.add(GenerationRequest((1, 2), 20, Sampling(30.0, seed=5)))
        for seed in range(others):
            batcher.add(GenerationRequest((1, 2, 3), 7, Sampling(30.0, seed=seed)))
        batcher.run()
        return own.output

    assert sampled(0) == sampled(5)


def test_a_negative_ngram_size_is_refused():
    with pytest.raises(ConfigError, match="no_repeat_ngram_size"):
        Sampling(no_repeat_ngram_size=-1)
