"""Cloze questions made from running text."""

import json

import pytest

from headwater.core.errors import DataError
from headwater.data.text.cloze import (
    ClozeSettings,
    cloze_questions,
    passages,
    sentences,
    write_cloze_questions,
)
from headwater.data.text.squad import read_questions

TEXT = (
    "Dr. Anne Weller sailed from Bristol to Lisbon in March 1892 with two small boats. "
    "The journey took 41 days, and nobody on the coast had expected such a slow crossing. "
    "Her brother William stayed behind, because the house in Cardiff had not been sold. "
    "He wrote long letters about the garden and the price of coal."
)
OTHER = TEXT.replace("Anne", "Emma").replace("1892", "1760").replace("41", "12").replace("William", "Robert")
SETTINGS = ClozeSettings(questions=200, max_words=100)


def test_abbreviations_do_not_end_sentences():
    parts = [TEXT[start:stop] for start, stop in sentences(TEXT)]
    assert "".join(parts) == TEXT
    assert [part[:10] for part in parts] == ["Dr. Anne W", "The journe", "Her brothe", "He wrote l"]


def test_passages_are_whole_sentences():
    found = list(passages(TEXT, ClozeSettings(min_words=10, max_words=35)))
    assert " ".join(found) == TEXT
    assert len(found) == 2
    assert list(passages("Too short.", ClozeSettings())) == []
    assert list(passages(TEXT, ClozeSettings(min_words=3, max_words=10))) == []


def test_answer_is_in_the_passage_and_not_in_the_question():
    questions = cloze_questions(TEXT, SETTINGS)
    assert len(questions) > 150
    for question in questions:
        (answer,) = question.answers
        assert TEXT.startswith(answer.text, answer.start)
        assert not set(question.text.rstrip("?").split()) & {"1892", "bristol"} & {answer.text.lower()}
    found = {question.answers[0].text for question in questions}
    assert {"March 1892", "41 days", "Lisbon", "William"} <= found
    assert {each.text.split()[0] for each in questions if each.answers[0].text == "41 days"} & {"how", "what"}


def test_questions_keep_words_of_their_sentence():
    """All words except the question word come from one sentence, some without their ending."""
    parts = [TEXT[start:stop].lower() for start, stop in sentences(TEXT)]
    for question in cloze_questions(TEXT, SETTINGS):
        words = question.text.rstrip("?").split()
        assert max(sum(word in part for word in words) for part in parts) >= len(words) - 5


def test_same_text_and_seed_make_the_same_questions():
    assert cloze_questions(TEXT, SETTINGS) == cloze_questions(TEXT, SETTINGS)
    assert cloze_questions(TEXT, SETTINGS) != cloze_questions(TEXT, ClozeSettings(200, seed=1))


def test_repeated_and_held_out_passages_are_left_out(tmp_path):
    path = tmp_path / "cloze.json"
    held_out = "Another one. " + TEXT[slice(*sentences(TEXT)[2])].upper()
    settings = ClozeSettings(max_words=100, questions=5)
    count = write_cloze_questions([TEXT, OTHER, OTHER], path, settings, [held_out])
    questions = read_questions(path)
    assert {question.context for question in questions} == {OTHER}
    assert len({question.identifier for question in questions}) == len(questions) == count
    assert len(json.loads(path.read_text())["data"][0]["paragraphs"]) == 1


def test_texts_without_sentences_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"(?s)no question.*25 or more words"):
        write_cloze_questions(["Short."], tmp_path / "cloze.json")
