"""Prepared data contain the text, shuffled and split, and are byte-identical for any number of workers."""

import filecmp
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headwater.core.errors import ConfigError, DataError
from headwater.data.documents import read_pieces
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.staging import staged_folder
from headwater.data.statistics import entropy, read_statistics
from headwater.data.tokenizer import TrainBPE
from headwater.data.workers import ordered_map


def prepare_book(text_file, out, *, num_workers=1, overwrite=False, **changes):
    keys = {"tokenizer": TrainBPE(400), "sequence_length": 32, "samples_per_file": 500, **changes}
    return prepare([text_file], out, PrepareSettings(**keys), num_workers=num_workers, overwrite=overwrite)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, book):
    """Return data of the book, prepared without interruption in this process."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "book.txt").write_text(book, encoding="utf-8")
    prepare_book(folder / "book.txt", folder / "out", num_workers=1)
    return folder / "out"


def samples_of(folder: Path):
    """Return all samples [n, 3, length], file after file."""
    parts = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            assert file.attrs["n_examples"] == len(file["data"])
            assert file["data"].dtype == np.int32
            parts.append(file["data"][:])
    return np.concatenate(parts)


def files_below(folder: Path):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_same_bytes(first: Path, second: Path):
    names = files_below(first)
    assert names == files_below(second)
    assert filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])


def test_samples_contain_the_text(shared, tmp_path):
    """Compared with transformers' GPT-2 tokenizer and a packing of the whole corpus in memory."""
    transformers = pytest.importorskip("transformers")
    source, vocab = shared / "text/c4_sample.jsonl.gz", shared / "vocab/gpt2"
    settings = PrepareSettings(vocab, 64, val_fraction=0.1, samples_per_file=700)
    statistics = prepare([source], tmp_path / "out", settings)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out/tokenizer.json"))
    corpus = []
    document = ""
    for piece in read_pieces([source]):
        document += piece.text
        if piece.ends_document:
            corpus += [*oracle(document)["input_ids"], 50256]
            document = ""
    count = (len(corpus) - 1) // 64
    rows = [tuple(corpus[64 * row : 64 * row + 65]) for row in range(count)]

    train, val = (samples_of(tmp_path / "out" / split) for split in ("train", "val"))
    samples = np.concatenate([train, val])
    found = [
        (*ids, labels[-1]) for ids, labels in zip(samples[:, 0].tolist(), samples[:, 2].tolist(), strict=True)
    ]
    assert (samples[:, 0, 1:] == samples[:, 2, :-1]).all()
    assert (samples[:, 1] == 1).all()
    assert sorted(found) == sorted(rows)
    assert found[: len(train)] != rows[: len(train)]
    assert len(val) == round(0.1 * count)

    assert (statistics.documents, statistics.tokens) == (corpus.count(50256), len(corpus))
    assert (statistics.train_samples, statistics.val_samples) == (len(train), len(val))
    assert statistics.dropped_tokens == len(corpus) - 64 * count
    frequency = torch.bincount(torch.tensor(corpus)).double()
    expected = torch.distributions.Categorical(probs=frequency / frequency.sum()).entropy()
    assert statistics.unigram_entropy == pytest.approx(expected.item(), rel=1e-6)
    assert read_statistics(tmp_path / "out") == statistics


def test_output_is_independent_of_workers_and_folders(reference, text_file, tmp_path):
    prepare_book(text_file, tmp_path / "out", num_workers=2)
    assert files_below(reference)[:2] == ["statistics.json", "tokenizer.json"]
    assert_same_bytes(tmp_path / "out", reference)


def test_other_seed_changes_only_the_order(text_file, tmp_path):
    sets = []
    for seed in (1, 2):
        prepare_book(text_file, tmp_path / str(seed), seed=seed, val_fraction=0)
        assert not list((tmp_path / str(seed) / "val").iterdir())
        sets.append(samples_of(tmp_path / str(seed) / "train")[:, 0].tolist())
    assert sets[0] != sets[1]
    assert sorted(sets[0]) == sorted(sets[1])


def test_no_text_is_lost(text_file, book, tmp_path):
    text = book[:20_000]
    text_file.write_text(text, encoding="utf-8")
    statistics = prepare_book(text_file, tmp_path / "out", sequence_length=1, val_fraction=0.3)
    assert statistics.text_bytes == len(text.encode())
    assert statistics.dropped_tokens == 1, "the last token has no label"
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / statistics.tokenizer_file))
    samples = np.concatenate([samples_of(tmp_path / "out" / split) for split in ("train", "val")])
    assert sorted(samples[:, 0, 0].tolist()) == sorted(tokenizer.encode(text).ids)


def test_too_little_text_is_refused_and_leaves_nothing(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    with pytest.raises(DataError, match=r"(?s)it makes 0 samples.*smaller sequence_length"):
        prepare_book(path, tmp_path / "out")
    path.write_text("")
    with pytest.raises(DataError, match=r"(?s)inputs contain no text.*short\.txt"):
        prepare_book(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("sequence_length", 0), ("samples_per_file", 0), ("val_fraction", 1.0), ("val_fraction", -0.1)],
)
def test_error_names_the_setting_out_of_range(text_file, tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"expected {key} .* got {value}\n"):
        prepare_book(text_file, tmp_path / "out", **{key: value})


def test_existing_output_is_only_replaced_with_overwrite(text_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    first = prepare_book(text_file, out)
    with pytest.raises(DataError, match=r"(?s)not empty.*out.*--overwrite"):
        prepare_book(text_file, out, seed=1)
    assert read_statistics(out) == first
    assert prepare_book(text_file, out, seed=1, overwrite=True) == read_statistics(out) != first
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "important.md").touch()
    with pytest.raises(DataError, match="not empty"):
        prepare_book(text_file, notes, overwrite=True)
    assert files_below(notes) == ["important.md"]


def test_a_file_in_the_place_of_the_folder_is_named(text_file, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(DataError, match="expected a folder, found a file"):
        prepare_book(text_file, tmp_path / "out", overwrite=True)


def test_second_writer_of_a_folder_is_refused(tmp_path):
    with (
        staged_folder(tmp_path / "out"),
        pytest.raises(DataError, match="another process is writing"),
        staged_folder(tmp_path / "out"),
    ):
        pass


SCRIPT = """
import multiprocessing, os, resource, signal, sys
from pathlib import Path
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE

source, out, workers, limit, sign = sys.argv[1:]

def kill_at_sign(event, arguments):
    at = {"open": 0, "os.rename": 1}.get(event)
    if sign and at is not None and str(arguments[at]).endswith(sign):
        parent = multiprocessing.parent_process()
        os.kill(os.getpid() if parent is None else parent.pid, signal.SIGKILL)

sys.addaudithook(kill_at_sign)
if __name__ == "__main__":
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    settings = PrepareSettings(TrainBPE(400), 32, samples_per_file=500)
    prepare([Path(source)], Path(out), settings, num_workers=int(workers))
"""


def run(tmp_path, text_file, *, workers, limit=0, kill_at=""):
    """Run a preparation in a process that is killed when it opens, or renames a file to, `kill_at`.

    Workers inherit stderr, so its end means that they have exited too.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, text_file, tmp_path / "out", str(workers), str(limit), kill_at]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=120)


@pytest.mark.parametrize("kill_at", ["tokenizer.json", "tokens.bin", "train/data-00002.h5"])
def test_killed_preparation_leaves_no_complete_output(text_file, reference, tmp_path, kill_at):
    process = run(tmp_path, text_file, workers=2, kill_at=kill_at)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="no prepared data"):
        read_statistics(tmp_path / "out")
    prepare_book(text_file, tmp_path / "out")
    assert_same_bytes(tmp_path / "out", reference)
    assert not (tmp_path / "out.partial").exists()


def test_failed_write_names_the_folder_and_leaves_nothing(text_file, tmp_path):
    """A limit on the file size simulates a full disk."""
    process = run(tmp_path, text_file, workers=1, limit=100_000)
    assert "DataError: output cannot be written" in process.stderr
    assert "516 bytes per document" in process.stderr
    assert process.returncode == 1
    assert not list(tmp_path.glob("out*"))


def square(number):
    if number == 7:
        raise DataError("seven", where="here")
    return number * number


def exit_at(number):
    if number == 3:
        os._exit(1)
    return number


def test_tasks_are_read_little_ahead_and_results_come_in_order():
    read = []

    def tasks():
        for number in range(1000):
            read.append(number)
            yield number

    results = ordered_map(abs, tasks(), 2)
    assert [next(results) for _ in range(5)] == list(range(5))
    assert len(read) <= 5 + 2 * 2
    results.close()
    with pytest.raises(DataError, match=r"seven\n  where: here"):
        list(ordered_map(square, range(20), 2))


def blocks_interrupts(_):
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_does_not_reach_workers_that_start():
    assert list(ordered_map(blocks_interrupts, range(4), 2)) == [True] * 4
    assert not blocks_interrupts(None)


def test_a_worker_that_dies_is_reported():
    with pytest.raises(DataError, match=r"(?s)worker process died.*--num_workers"):
        list(ordered_map(exit_at, range(20), 2))


def test_error_names_unreadable_statistics(tmp_path):
    (tmp_path / "statistics.json").write_text(json.dumps({"documents": 1}))
    with pytest.raises(DataError, match=r"(?s)statistics cannot be read.*statistics\.json"):
        read_statistics(tmp_path)


def test_entropy_of_even_and_certain_tokens():
    assert entropy(np.array([3, 0, 3])) == pytest.approx(np.log(2))
    assert entropy(np.array([5, 0])) == 0
