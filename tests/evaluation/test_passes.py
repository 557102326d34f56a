"""Division of requests into passes, and of long texts into windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import DataError
from headwater.evaluation.passes import Request, check_ids, part_of_pass, passes, windows

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
REQUESTS = st.lists(st.builds(Request, TOKENS, TOKENS), max_size=12)


@given(REQUESTS, st.integers(1, 40))
def test_every_request_is_in_one_pass_of_at_most_the_given_tokens(requests, max_tokens):
    found = list(passes(requests, max_tokens))
    numbers = [number for each in found for group in each.values() for number in group]
    assert sorted(numbers) == list(range(len(requests)))
    for each in found:
        assert all(requests[number].inputs == tokens for tokens, group in each.items() for number in group)
        longest = len(next(iter(each)))
        assert longest == max(map(len, each))
        assert longest * len(each) <= max_tokens or len(each) == 1


@given(REQUESTS, st.integers(1, 40), st.integers(1, 4))
def test_ranks_divide_each_pass_into_parts_of_at_most_the_given_tokens(requests, max_tokens, ranks):
    for each in passes(requests, max_tokens, ranks):
        parts = [part_of_pass(each, rank, ranks) for rank in range(ranks)]
        assert sorted(tokens for part in parts for tokens in part) == sorted(each)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for part in parts:
            assert all(group == each[tokens] for tokens, group in part.items())
            assert len(part) <= 1 or max(map(len, part)) * len(part) <= max_tokens


def test_requests_that_read_the_same_tokens_share_a_sequence():
    letters = [Request((7, 8, 9), (letter,)) for letter in (1, 2, 3, 4)]
    assert list(passes(letters, 100)) == [{(7, 8, 9): [0, 1, 2, 3]}]


@given(st.lists(st.integers(1, 99), max_size=40), st.integers(1, 12))
def test_windows_predict_each_token_once_with_the_most_context(tokens, max_length):
    found = list(windows(tokens, 0, max_length))
    assert [token for each in found for token in each.continuation] == tokens
    whole, end = [0, *tokens], 0
    for each in found:
        end += len(each.continuation)
        assert list(each.inputs) == whole[max(0, end - max_length) : end]


@pytest.fixture(scope="module")
def utils():
    return pytest.importorskip("lm_eval.utils")


@given(tokens=st.lists(st.integers(1, 99), max_size=40), max_length=st.integers(1, 12))
def test_windows_are_those_of_the_harness(utils, tokens, max_length):
    theirs = utils.get_rolling_token_windows(tokens, prefix_token=0, max_seq_len=max_length, context_len=1)
    expected = [utils.make_disjoint_window(each) for each in theirs]
    found = [(list(each.context), list(each.continuation)) for each in windows(tokens, 0, max_length)]
    assert found == [(list(context), list(continuation)) for context, continuation in expected]


def test_a_context_that_is_too_long_loses_its_beginning():
    request = Request((1, 2, 3, 4), (5, 6))
    assert request.cut(3) == Request((3, 4), (5, 6))
    assert request.cut(5) is request


def test_a_token_outside_of_the_vocabulary_names_the_tokenizer():
    with pytest.raises(DataError, match=r"tokenizer does not fit the model.*vocab_size 10, got 12") as caught:
        check_ids([[1, 12], [3]], 10)
    assert caught.value.where == "--tokenizer"
