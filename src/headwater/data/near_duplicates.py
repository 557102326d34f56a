"""Search for near-duplicates: documents that have most of their n-grams in common, apart from small edits.

The method is that of SlimPajama. Signatures are divided into bands. Two documents whose signatures are equal
in a band are near-duplicates, and so are documents that a chain of such pairs connects. The first document of
each group is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headwater.core.packages import importing
from headwater.data.inputs import Inputs
from headwater.data.journal import Corpus
from headwater.data.packing import numbered_tasks
from headwater.data.raw_records import BadRecords
from headwater.data.settings import NearDuplicates
from headwater.data.signatures import EMPTY, PERMUTATIONS, Sign, overlapping
from headwater.data.staging import complete_file
from headwater.data.workers import ordered_map

KEPT_FILE = "kept.npy"
"""File in which a search saves its result, so that a killed preparation finds it."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, an odd factor for hashes by multiplication."""
_ROWS = 1 << 14
"""Signatures that are read at once: 8 MiB."""


@dataclasses.dataclass(frozen=True)
class Bands:
    """Division of a signature into bands.

    Attributes:
        count: number of bands.
        rows: numbers of the signature in each band.
    """

    count: int
    rows: int

    def keys(self, signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return a hash of each band of `signatures` [documents, PERMUTATIONS]: [documents, bands]."""
        parts = signatures[:, : self.count * self.rows].reshape(-1, self.count, self.rows)
        keys = np.zeros(parts.shape[:2], dtype=np.uint64)
        for row in range(self.rows):
            keys = keys * _FACTOR + parts[:, :, row]
        return keys


def choose_bands(threshold: float) -> Bands:
    """Return the bands with the fewest errors for a Jaccard similarity of `threshold`, as datasketch does.

    Raises:
        ConfigError: if datasketch is not installed.
    """
    with importing("finding near-duplicates", "dedup"):
        from datasketch import MinHashLSH
    try:
        index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    except ValueError:
        # For thresholds close to 1 one band would be best, which the library refuses.
        return Bands(1, PERMUTATIONS)
    return Bands(index.b, index.r)


def find_kept(
    inputs: Inputs, near: NearDuplicates, bad: BadRecords, folder: Path, num_workers: int
) -> npt.NDArray[np.bool_]:
    """Return True for each document or record of `inputs` that is kept, in the order of the inputs.

    Args:
        inputs: the inputs.
        near: settings of the comparison.
        bad: decides if a record that cannot be used is skipped.
        folder: folder for temporary files, with which a killed search continues.
        num_workers: worker processes; 1 or less: work in this process.

    Raises:
        ConfigError: if datasketch is not installed.
        DataError: if an input cannot be used.
    """
    found, work = folder / KEPT_FILE, folder / "signatures"
    if not found.exists():
        bands = choose_bands(near.threshold)
        work.mkdir(exist_ok=True)
        with contextlib.closing(Corpus(work, 0)) as corpus:
            pieces = overlapping(inputs.documents(bad), near.ngram)
            done = corpus.progress.tasks
            # Without the + 1, empty records would never fill a task, and would pile up in memory.
            tasks = numbered_tasks(pieces, lambda piece: len(piece.text) + 1)
            rest = (task for task in tasks if task[0] >= done)
            for block in ordered_map(Sign(near.ngram), rest, num_workers):
                corpus.add(block)
            corpus.save()
            kept = first_of_groups(_read_keys(corpus, bands))
        with complete_file(found) as partial, partial.open("wb") as file:
            np.save(file, kept)
    shutil.rmtree(work, ignore_errors=True)
    result: npt.NDArray[np.bool_] = np.load(found)
    return result


def _read_keys(corpus: Corpus, bands: Bands) -> npt.NDArray[np.uint64]:
    """Return the keys of all documents, [documents, bands]; the pieces of a document are united."""
    documents = np.cumsum(corpus.lengths()[:, 0], dtype=np.int64) - 1
    keys = np.empty((documents[-1] + 1 if len(documents) else 0, bands.count), dtype=np.uint64)
    last = np.empty(0, dtype=np.uint32)
    with corpus.values_path.open("rb") as file:
        for start in range(0, len(documents), _ROWS):
            numbers = documents[start : start + _ROWS]
            rows = np.fromfile(file, np.uint32, len(numbers) * PERMUTATIONS).reshape(-1, PERMUTATIONS)
            present, starts = np.unique(numbers, return_index=True)
            signatures = np.minimum.reduceat(rows, starts)
            if start and documents[start - 1] == present[0]:
                # The document began in the rows before these.
                signatures[0] = np.minimum(signatures[0], last)
            last = signatures[-1]
            empty = (signatures == EMPTY).all(1)
            # A text without n-grams is similar to no other, so its keys must differ from all others.
            numbers_as_keys = present.astype(np.uint64)[:, None]
            keys[present] = np.where(empty[:, None], numbers_as_keys, bands.keys(signatures))
    return keys


def first_of_groups(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return True for the first document of each group, [documents].

    Documents with an equal key are in the same group.

    Args:
        keys: keys of the documents, [documents, bands].
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    groups = np.arange(len(keys))
    for column in keys.T:
        order = np.argsort(column)
        equal = column[order[1:]] == column[order[:-1]]
        if equal.any():
            pairs = groups[order[:-1][equal]], groups[order[1:][equal]]
            graph = coo_matrix((np.ones(len(pairs[0]), dtype=np.bool_), pairs), shape=(len(keys), len(keys)))
            groups = connected_components(graph, directed=False)[1][groups]
    kept = np.zeros(len(keys), dtype=np.bool_)
    kept[np.unique(groups, return_index=True)[1]] = True
    return kept
