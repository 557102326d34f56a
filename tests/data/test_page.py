"""The page of samples shows every token with its label, and is self-contained."""

import html.parser
import json

import pytest

from headwater.core.errors import DataError
from headwater.data.modes import ModeOptions
from headwater.data.page import write_page
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE


class Reader(html.parser.HTMLParser):
    """A parser that collects the tokens of a page: class, tooltip, text."""

    def __init__(self, page):
        super().__init__()
        self.tokens, self.open, self.addresses = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "span" and "title" in attributes:
            self.tokens.append([attributes["class"], attributes["title"], ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "span" and self.tokens:
            self.tokens[-1][2] += data


def made(tmp_path, mode, record, length=64, **options):
    source = tmp_path / "a.jsonl"
    source.write_text((json.dumps(record) + "\n") * 4)
    settings = PrepareSettings(
        TrainBPE(300), length, val_fraction=0.25, mode=mode, options=ModeOptions(**options)
    )
    prepare([source], tmp_path / "out", settings)
    write_page(tmp_path / "out", tmp_path / "page.html", num_samples=1)
    page = (tmp_path / "page.html").read_text()
    reader = Reader(page)
    assert reader.open == [] and reader.addresses == [] and "http" not in page
    return reader.tokens


def test_labels_that_count_and_texts_are_marked(tmp_path):
    record = {"prompt": "a <b>", "completion": " &c"}
    tokens = made(tmp_path, "prompt_completion", record, length=13, use_vsl=True)
    text = "".join(token[2] for token in tokens)
    assert text.count("a <b> &c") == 4
    assert {token[0].split()[0] for token in tokens} == {"g0", "g1"}  # two texts in each of two samples
    counted = [token for token in tokens if " l" in token[0]]
    assert "label '<|endoftext|>'" in counted[-1][1]
    assert all("position" in token[1] and "seen by the next" in token[1] for token in tokens)


@pytest.mark.parametrize(
    ("mode", "record", "shown"),
    [
        ("preference", {"prompt": "p", "chosen": "good", "rejected": "bad"}, ["pgood", "pbad"]),
        ("span_corruption", {"text": "one line"}, ["one line"]),
        (
            "embedding_pairs",
            {"question": "why", "positive": "so", "hard_negatives": ["no"]},
            ["so", "no", "why"],
        ),
    ],
)
def test_every_kind_of_sample_is_shown(tmp_path, mode, record, shown):
    text = "".join(token[2] for token in made(tmp_path, mode, record))
    places = [text.find(part) for part in shown]
    assert -1 not in places and places == sorted(places)


def test_error_names_a_folder_without_data(tmp_path):
    with pytest.raises(DataError, match="no prepared data"):
        write_page(tmp_path, tmp_path / "page.html")
