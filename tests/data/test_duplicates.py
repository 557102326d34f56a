"""`headwater data --deduplicate`: documents and records that are equal to an earlier one."""

import json

import pytest

from headwater.cli.main import main
from headwater.data.duplicates import Duplicates
from headwater.data.statistics import read_statistics

TEXTS = ["The sea rose.", "the  SEA\nrose.", "All fled.", "The sea rose"]


def prepared(folder, inputs, *words):
    options = ["--vocab_size", "300", "--sequence_length", "8", "--processes", "1", "--val_fraction", "0"]
    assert (
        main(["data", *map(str, inputs), "--out", str(folder / "out"), "--overwrite", *options, *words]) == 0
    )
    return read_statistics(folder / "out")


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_cuts_between_blocks_do_not_matter():
    duplicates = Duplicates(skip=True)
    assert duplicates.is_new(["It was ", "night."])
    assert not duplicates.is_new(["It w", "as nigh", "t.", ""])
    assert duplicates.is_new(["It was night"])
    assert duplicates.count == 1


def test_documents_that_differ_only_in_space_and_case(tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    same = tmp_path / "b.txt"
    same.write_text(TEXTS[0])
    kept = prepared(tmp_path, [source, same])
    assert (kept.documents, kept.duplicate_records) == (5, 0)
    found = prepared(tmp_path, [source, same], "--deduplicate")
    assert (found.documents, found.duplicate_records) == (3, 2)
    long = tmp_path / "c.txt"
    long.write_text("The sea rose. " * 30_000)
    assert prepared(tmp_path, [long, same, long], "--deduplicate").documents == 2


@pytest.mark.parametrize("mode", ["prompt_completion", "classification"])
def test_records_are_compared_with_all_fields(tmp_path, mode, capsys):
    records = [{"prompt": text, "completion": "Yes.", "text": text, "label": 0} for text in TEXTS[:3]]
    records += [records[0] | {"completion": "No.", "label": 1}, records[0]]
    source = lines(tmp_path / "a.jsonl", records)
    found = prepared(tmp_path, [source], "--mode", mode, "--sequence_length", "32", "--deduplicate")
    assert (found.documents, found.duplicate_records) == (3, 2)
    assert "left out: duplicates" in capsys.readouterr().out
