"""Prompts with passages: the template, and passages that do not fit."""

import pytest

from headwater.core.errors import ConfigError, DataError
from headwater.data.passages import Passage
from headwater.retrieval.index import Hit
from headwater.retrieval.prompt import PassageTemplate, fitted

HITS = [
    Hit(2.0, 7, Passage("The mill grinds {prompt}.", "Mills", "a.txt")),
    Hit(1.0, 3, Passage("The river runs.", "", "b.txt")),
]


def test_passages_are_numbered_and_come_before_the_prompt():
    expected = "[1] Mills\nThe mill grinds {prompt}.\n\n[2] The river runs.\n\nWho grinds?"
    assert PassageTemplate().prompt(HITS, "Who grinds?") == expected


def test_a_template_replaces_only_its_two_fields():
    template = PassageTemplate("{a} {prompt}\n{passages}\n{prompt}")
    assert template.prompt(HITS[1:], "{passages}") == "{a} {passages}\n[1] The river runs.\n{passages}"


@pytest.mark.parametrize(("text", "missing"), [("{prompt}", "passages"), ("{passages}", "prompt"), ("", "")])
def test_a_template_without_a_field_is_refused(text, missing):
    with pytest.raises(ConfigError, match=f"found no {{{missing}"):
        PassageTemplate(text)


def test_the_worst_passages_are_dropped_until_the_prompt_fits():
    def tokens_of(hits):
        return list(PassageTemplate().prompt(hits, "who?").encode())

    both, one = len(tokens_of(HITS)), len(tokens_of(HITS[:1]))
    assert fitted(HITS, tokens_of, both).hits == HITS
    found = fitted(HITS, tokens_of, both - 1)
    assert found.hits == HITS[:1] and found.tokens == tokens_of(HITS[:1])
    assert fitted(HITS, tokens_of, one).hits == HITS[:1]
    with pytest.raises(DataError, match=rf"(?s)at most {one - 1} tokens.*it has {one}.*--max_new_tokens"):
        fitted(HITS, tokens_of, one - 1)
