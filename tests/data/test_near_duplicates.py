"""`headwater data --deduplicate_near`, compared with exact similarities and with datasketch itself."""

import filecmp
import json
import random
import re
import string
import sys

import networkx
import numpy as np
import pytest

from headwater.cli.main import main
from headwater.core.errors import ConfigError
from headwater.data import documents, near_duplicates, packing
from headwater.data.documents import Piece, cut_pieces
from headwater.data.modes import ModeOptions
from headwater.data.near_duplicates import Bands, choose_bands, first_of_groups
from headwater.data.prepare import prepare
from headwater.data.settings import NearDuplicates, PrepareSettings
from headwater.data.signatures import Sign, hashed_ngrams, overlapping
from headwater.data.statistics import read_statistics
from headwater.data.tokenizer import TrainBPE

datasketch = pytest.importorskip("datasketch")


def features(text, n=13):
    """Return the n-grams of a text, as SlimPajama's description defines them."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    text = re.sub(r"\s+", " ", text.strip())
    return {text[start : start + n] for start in range(len(text) - n + 1)}


def hash_of(gram):
    found = 0
    for letter in gram:
        found = (found + ord(letter)) * 0x9E3779B97F4A7C15 % 2**64
    return found >> 32


def minhash(grams):
    found = datasketch.MinHash(num_perm=128, hashfunc=hash_of)
    found.update_batch(sorted(grams))
    return found


def edited(text, share, seed):
    """Return a copy of a text in which this share of the words is replaced."""
    draw = random.Random(seed)
    words = [word if draw.random() >= share else f"edit{draw.randrange(1000)}" for word in text.split(" ")]
    return " ".join(words)


@pytest.fixture(scope="module")
def texts(book):
    """Passages of a novel, each with a copy in which up to 3 % of the words are replaced, in random order."""
    passages = [book[start : start + 1200] for start in range(0, 120_000, 1200)]
    copies = [edited(text, number % 7 / 200, number) for number, text in enumerate(passages)]
    return random.Random(0).sample([*passages, *copies], 2 * len(passages))


@pytest.fixture(scope="module")
def similarities(texts):
    """Exact Jaccard similarities of all texts to those before them, [texts, texts]."""
    sets = [features(text) for text in texts]
    found = np.eye(len(texts))
    for place, here in enumerate(sets):
        for other, there in enumerate(sets[:place]):
            shared = len(here & there)
            found[place, other] = shared / (len(here) + len(there) - shared)
    return found


@pytest.fixture(scope="module")
def minhashes(texts):
    return [minhash(features(text)) for text in texts]


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def kept_of(folder, texts, *, near=None):
    """Return True for each text that a preparation of them keeps."""
    source = lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    found = []

    def find_kept(*args):
        found.append(near_duplicates.find_kept(*args))
        return found[0]

    settings = PrepareSettings(TrainBPE(300), 32, val_fraction=0, deduplicate=near or NearDuplicates())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.data.prepare.find_kept", find_kept)
        statistics = prepare([source], folder / "out", settings, overwrite=True)
    (kept,) = found
    assert statistics.duplicate_records == np.count_nonzero(~kept)
    assert statistics.documents == np.count_nonzero(kept)
    return kept


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9])
def test_the_share_left_out_depends_on_the_exact_similarity(tmp_path, texts, similarities, threshold):
    """The share is the probability of two equal bands; 0.05 above the threshold it is more than a half."""
    kept = kept_of(tmp_path, texts, near=NearDuplicates(threshold))
    highest = np.tril(similarities, -1).max(1)
    bands = choose_bands(threshold)
    chance = 1 - (1 - highest**bands.rows) ** bands.count
    deviation = np.sqrt((chance * (1 - chance)).sum())
    assert abs(np.count_nonzero(~kept) - chance.sum()) < 3 * deviation
    assert chance[highest >= threshold + 0.05].min() > 0.5
    assert not kept[highest == 1].any()
    assert kept[highest < threshold - 0.25].all()


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_groups_are_those_of_an_index_of_datasketch(tmp_path, texts, minhashes, threshold):
    index, graph = datasketch.MinHashLSH(threshold=threshold, num_perm=128), networkx.Graph()
    for number, found in enumerate(minhashes):
        graph.add_node(number)
        graph.add_edges_from((number, other) for other in index.query(found))
        index.insert(number, found)
    first = {min(group) for group in networkx.connected_components(graph)}
    kept = kept_of(tmp_path, texts, near=NearDuplicates(threshold))
    assert set(np.flatnonzero(kept)) == first
    assert 0 < len(first) < len(texts)


@pytest.mark.parametrize("ngram", [1, 2, 13])
def test_different_ngrams_have_different_hashes(book, ngram):
    piece = Piece(book, True, len(book), 0, True)
    hashes = np.concatenate(list(hashed_ngrams(piece, ngram)))
    expected = len(features(book, ngram))
    assert expected - expected**2 / 2**32 - 2 <= len(np.unique(hashes)) <= expected


@pytest.mark.parametrize("ngram", [1, 2, 13, 100])
def test_the_signature_of_a_long_document_is_that_of_datasketch(monkeypatch, book, ngram):
    monkeypatch.setattr(documents, "PIECE_CHARS", 5000)
    text = f"\n {book[:40_000]} ... \n"
    found = list(cut_pieces([text]))
    assert len(found) > 7
    pieces = [Piece(part, ends, len(part), 0, not number) for number, (part, ends) in enumerate(found)]
    block = Sign(ngram)((0, list(overlapping(pieces, ngram))))
    assert block.lengths.ravel().tolist() == [1] + [0] * (len(pieces) - 1)
    signature = block.values.view(np.uint32).reshape(-1, 128).min(0)
    assert (signature == minhash(features(text, ngram)).hashvalues).all()


def test_long_documents_are_compared_as_a_whole(tmp_path, monkeypatch, book):
    monkeypatch.setattr(documents, "PIECE_CHARS", 5000)
    monkeypatch.setattr(packing, "_TASK_CHARS", 12_000)
    monkeypatch.setattr(near_duplicates, "_ROWS", 3)
    parts = [book[start : start + 50_000] for start in range(0, 150_000, 50_000)]
    for part in (*parts, "Short.", edited(parts[1], 0.01, 0), parts[2] + parts[0], "short"):
        (tmp_path / f"{len(list(tmp_path.iterdir()))}.txt").write_text(part)
    kept = find(tmp_path)
    assert kept == [True, True, True, True, False, True, False]


def find(folder, **options):
    """Return a list with True for each document of a folder that is kept."""
    from rich.progress import Progress

    from headwater.data.inputs import Inputs
    from headwater.data.raw_records import BadRecords

    inputs = Inputs(documents.find_inputs([folder]), "documents", "text", Progress(disable=True))
    return near_duplicates.find_kept(inputs, NearDuplicates(**options), BadRecords(), folder, 1).tolist()


@pytest.mark.parametrize("ngram", [1, 13, 1000])
def test_short_documents_are_compared_as_a_whole_and_empty_ones_never(tmp_path, ngram):
    texts = ["", "!?", "Hi, you.", "...", "hi  YOU", "Hi me.", "\n", "", "Hi you!"]
    lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    # Empty texts are not documents.
    kept = dict(zip([text for text in texts if text], find(tmp_path, ngram=ngram), strict=True))
    assert [text for text, is_kept in kept.items() if not is_kept] == ["hi  YOU", "Hi you!"]


def test_groups_of_documents_with_equal_keys():
    draw = np.random.default_rng(0)
    for documents_, bands, values in [(0, 3, 5), (1, 1, 1), (8, 2, 8), (30, 2, 40), (200, 9, 900)]:
        keys = draw.integers(values, size=(documents_, bands)).astype(np.uint64)
        graph = networkx.Graph()
        graph.add_nodes_from(range(documents_))
        for band in keys.T:
            graph.add_edges_from((int(np.flatnonzero(band == key)[0]), n) for n, key in enumerate(band))
        first = {min(group) for group in networkx.connected_components(graph)}
        assert set(np.flatnonzero(first_of_groups(keys))) == first


def test_bands_are_those_of_slim_pajama_and_exist_for_every_threshold():
    assert choose_bands(0.8) == Bands(9, 13)
    assert choose_bands(1.0) == Bands(1, 128)
    for threshold in (1e-9, 0.01, 0.3, 0.99, 1 - 1e-9):
        bands = choose_bands(threshold)
        assert 1 <= bands.count * bands.rows <= 128


@pytest.mark.parametrize("workers", [1, 2])
def test_output_is_that_of_a_preparation_of_the_kept_documents(tmp_path, texts, workers):
    """So near-duplicates are in neither split, and neither the tokenizer nor the order depends on them."""
    source = lines(tmp_path / "all.jsonl", [{"text": text} for text in texts])
    options = ["--vocab_size", "300", "--sequence_length", "32", "--val_fraction", "0.3"]
    near = ["--deduplicate_near", "--near_threshold", "0.7", "--processes"]
    assert main(["data", str(source), "--out", str(tmp_path / "near"), *options, *near, str(workers)]) == 0
    kept = kept_of(tmp_path, texts, near=NearDuplicates(0.7))
    unique = lines(tmp_path / "some.jsonl", [{"text": text} for text in np.array(texts)[kept]])
    assert main(["data", str(unique), "--out", str(tmp_path / "unique"), *options, "--processes", "1"]) == 0
    found = [
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for folder in (tmp_path / "near", tmp_path / "unique")
    ]
    assert found[0] == found[1]
    found[0].remove("statistics.json")
    assert filecmp.cmpfiles(tmp_path / "near", tmp_path / "unique", found[0], shallow=False)[0] == found[0]
    statistics = read_statistics(tmp_path / "near")
    assert statistics.settings["deduplicate"] == {"threshold": 0.7, "ngram": 13}


@pytest.mark.parametrize("mode", ["prompt_completion", "classification"])
def test_all_strings_of_a_record_are_compared(tmp_path, texts, mode, capsys):
    records = [
        {"prompt": texts[n][:300], "completion": texts[n + 1][:300], "text": texts[n][300:600], "label": 0}
        for n in (0, 1)
    ]
    other = records[0] | {"completion": "Another. " * 30}
    records += [records[0] | {"label": 1}, records[1] | {"text": records[1]["text"].upper()}, other]
    source = lines(tmp_path / "a.jsonl", records)
    words = ["--vocab_size", "300", "--sequence_length", "800", "--val_fraction", "0", "--deduplicate_near"]
    words += ["--processes", "1"]
    assert main(["data", str(source), "--out", str(tmp_path / "out"), "--mode", mode, *words]) == 0
    found = read_statistics(tmp_path / "out")
    assert (found.documents, found.duplicate_records) == (3, 2)
    assert "left out: duplicates" in capsys.readouterr().out


TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]


@pytest.mark.parametrize(
    ("mode", "bad", "good"),
    [
        ("prompt_completion", {"completion": " "}, {"completion": "Nobody."}),
        ("prompt_completion", {"completion": 3}, {"completion": "Nobody."}),
        ("summarization", {"document": "x", "summary": []}, {"document": "x", "summary": "Nobody."}),
        ("chat", {"messages": TURNS[:1]}, {"messages": TURNS}),
        ("classification", {"text": "x", "label": "many"}, {"text": "x", "label": 1}),
        ("preference", {"chosen": "Nobody."}, {"chosen": "Nobody.", "rejected": "He."}),
        ("embedding_pairs", {"positive": ""}, {"positive": "Nobody.", "negative": "He."}),
        ("extractive_summarization", {"source": ["x"]}, {"source": ["x", "y"], "source_labels": [0, 1]}),
        ("image_text", {"image": "none.png", "captions": ["x"]}, {"image": "a.png", "captions": ["x"]}),
    ],
)
def test_a_record_without_an_example_does_not_replace_a_similar_one(tmp_path, texts, mode, bad, good):
    (tmp_path / "a.png").touch()
    records = [{"prompt": texts[0], "question": texts[0], **each} for each in (bad, good, good)]
    source = lines(tmp_path / "a.jsonl", records)
    options = {"image_dir": tmp_path, "num_features": 4, "begin_of_text": "e"} if mode == "image_text" else {}
    found = prepare(
        [source],
        tmp_path / "out",
        PrepareSettings(
            TrainBPE(300),
            1500,
            val_fraction=0,
            mode=mode,
            options=ModeOptions(**options),
            skip_bad_records=True,
            deduplicate=NearDuplicates(),
        ),
    )
    assert (found.documents, found.duplicate_records, found.train_samples) == (2, 1, 1)
    assert found.bad_records + found.empty_records == 1


def test_finished_signatures_are_not_computed_again(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(packing, "_TASK_CHARS", 20_000)
    monkeypatch.setattr("headwater.data.journal._INTERVAL_S", -1.0)
    source = lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = PrepareSettings(TrainBPE(300), 32, deduplicate=NearDuplicates())
    sign, numbers = Sign.__call__, []

    def interrupted(self, task):
        numbers.append(task[0])
        if len(numbers) == 5:
            raise KeyboardInterrupt
        return sign(self, task)

    def interrupted_training(self, texts):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sign, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainBPE, "train", interrupted_training)
        prepare([source], tmp_path / "out", settings)
    assert numbers == [0, 1, 2, 3, 4, *range(4, numbers[-1] + 1)]
    prepare([source], tmp_path / "out", settings)
    assert numbers[-1] == max(numbers) and numbers.count(numbers[-1]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, r"expected near_threshold in \(0, 1\], got 0"),
        ({"threshold": 1.01}, r"expected near_threshold in \(0, 1\], got 1.01"),
        ({"threshold": float("nan")}, r"expected near_threshold in \(0, 1\], got nan"),
        ({"ngram": 0}, "expected near_ngram from 1 to 1000, got 0"),
        ({"ngram": 1001}, "expected near_ngram from 1 to 1000, got 1001"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        NearDuplicates(**options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--near_ngram", "5"], "--near_ngram has no effect without --deduplicate_near"),
        (["--deduplicate", "--near_threshold", "0.5"], "--near_threshold has no effect without"),
        (["--deduplicate", "--deduplicate_near"], "not allowed with"),
        (
            ["--deduplicate_near", "--near_threshold", "much"],
            "expected --near_threshold to be a number, got 'much'",
        ),
    ],
)
def test_options_that_do_not_fit_together(tmp_path, text_file, words, message, capsys):
    try:
        status = main(["data", str(text_file), "--out", str(tmp_path / "out"), *words])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_missing_package_is_an_error_with_a_command(tmp_path, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    settings = PrepareSettings(TrainBPE(300), 32, deduplicate=NearDuplicates())
    with pytest.raises(ConfigError, match="finding near-duplicates needs datasketch") as error:
        prepare([text_file], tmp_path / "out", settings)
    assert error.value.remedy == "pip install 'headwater[dedup]'"
    assert not (tmp_path / "out.partial").exists()
