"""Journal of the first pass: what was saved is there again, what came after it is cut off."""

import collections

import numpy as np

from headwater.data.examples import Block
from headwater.data.journal import Corpus


def block(values, lengths, **counts):
    values = np.array(values, dtype=np.int32)
    rows = np.array(lengths, dtype=np.int32).reshape(-1, 2)
    return Block(values, rows, np.bincount(values, minlength=8), collections.Counter(counts))


def test_an_opened_corpus_continues_from_the_last_journal(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.data.journal._INTERVAL_S", 1e9)
    first = Corpus(tmp_path, 8)
    first.add(block([1, 2, 0, 1], [[2, 2]], documents=1))
    first.save()
    first.add(block([3, 1], [[1, 1]], documents=1))
    first.close()
    assert (tmp_path / "tokens.bin").stat().st_size == 6 * 4
    again = Corpus(tmp_path, 8)
    assert (tmp_path / "tokens.bin").stat().st_size == 4 * 4
    assert (again.progress.tasks, again.progress.values, again.progress.examples) == (1, 4, 1)
    assert again.progress.counts == {"documents": 1}
    again.add(block([5, 1], [[1, 1]], documents=1, cut=1))
    again.save()
    assert again.lengths().tolist() == [[2, 2], [1, 1]]
    assert np.fromfile(again.values_path, dtype=np.int32).tolist() == [1, 2, 0, 1, 5, 1]
    assert again.progress.token_counts.tolist() == [1, 3, 1, 0, 0, 1, 0, 0]
    again.remove()
    assert list(tmp_path.iterdir()) == []
