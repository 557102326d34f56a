"""Text of tokens that arrive one at a time: bytes of characters, spaces at the beginning, stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.serving.text import TextStream, possible_stop


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def streamed(text, stops=()):
    stream = TextStream(decode, list(b"before "), stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@given(st.text(), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_are_the_text_up_to_the_first_stop(text, stops):
    text = text.replace("\ufffd", "")
    stops = [stop for stop in stops if "\ufffd" not in stop]
    pieces = streamed(text, stops)
    # A stop ends the text as soon as its last character has arrived.
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    first_end = min((end for end, _ in ends), default=None)
    starts = [place for end, place in ends if end == first_end]
    assert "".join(pieces) == (text if first_end is None else text[: min(starts)])


def test_an_incomplete_character_is_held_back():
    assert streamed("aé→") == ["a", "", "é", "", "", "→", ""]


def test_a_possible_stop_is_held_back():
    assert streamed("a ENx ENDy", ["END"])[:8] == ["a", " ", "", "", "ENx", " ", "", ""]
    assert possible_stop("a\n", ["\n\n", "\nUser"]) == 1
    assert possible_stop("abc", ["x"]) == 0


def test_the_end_of_a_text_gives_out_what_was_held_back():
    assert streamed("a EN", ["END"])[-1] == "EN"
    stream = TextStream(decode, [], ())
    assert stream.add(0xC3) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("prompt", ["", "The"])
def test_a_tokenizer_that_drops_a_leading_space(prompt):
    stream = TextStream(lambda tokens: decode(tokens).removeprefix(" "), list(prompt.encode()))
    text = "".join(stream.add(token) for token in b" two words") + stream.finish()
    assert text == (" two words" if prompt else "two words")
