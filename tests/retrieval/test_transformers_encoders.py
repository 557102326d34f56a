"""Encoders of transformers' DPR: vectors, ranking, and the commands with an imported run."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

from headwater.cli.main import main
from headwater.core.errors import DataError
from headwater.retrieval import build
from headwater.retrieval.index import PassageIndex
from headwater.trainer.retrieval import open_retriever

transformers = pytest.importorskip("transformers")

WORDS = [
    "river",
    "mill",
    "corn",
    "miller",
    "village",
    "grinds",
    "sleeps",
    "boat",
    "fish",
    "bread",
    "stone",
    "wheel",
    "water",
    "night",
    "day",
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
QUESTIONS = ["who grinds corn", "where does the miller sleep", "bread"]


def words(seed, count):
    return " ".join(np.random.default_rng(seed).choice(WORDS, count).tolist())


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the folder of two random encoders, with a tokenizer in each, as transformers saves them."""
    folder = tmp_path_factory.mktemp("dpr") / "library"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = transformers.BertTokenizerFast(vocab={name: number for number, name in enumerate(names)})
    torch.manual_seed(0)
    for name, kind in (
        ("question_encoder", transformers.DPRQuestionEncoder),
        ("ctx_encoder", transformers.DPRContextEncoder),
    ):
        config = transformers.DPRConfig(vocab_size=len(names), max_position_embeddings=24, **SIZES)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def run(library):
    """Return the folder of the run that `checkpoint import` makes of them."""
    assert main(["checkpoint", "import", str(library), "--model_dir", str(library.parent / "run")]) == 0
    return library.parent / "run"


@pytest.fixture(scope="module")
def documents(library):
    """Return a file with 50 documents of 3 to 32 words."""
    path = library.parent / "documents.jsonl"
    records = [
        {"text": words(n, 3 + n % 30), "title": words(100 + n, 2) if n % 2 else None} for n in range(50)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def index(run, documents):
    """Return the index of the documents."""
    folder = run.parent / "index"
    command = ["index", str(documents), "--model_dir", str(run), "--out", str(folder), "--batch_size", "16"]
    assert main([*command, "--passage_words", "12"]) == 0
    return folder


def theirs(library, name, texts):
    """Return the vectors of texts as transformers computes them."""
    kind = {
        "question_encoder": transformers.DPRQuestionEncoder,
        "ctx_encoder": transformers.DPRContextEncoder,
    }[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(library / name)
    model = kind.from_pretrained(library / name).eval()
    with torch.no_grad():
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        # DPR's authors trained with token types that are 0, also for the text after a title.
        return model(inputs["input_ids"], inputs["attention_mask"]).pooler_output


def test_vectors_and_ranking_equal_transformers(library, index):
    found = PassageIndex(index)
    passages = [found.passage(number) for number in range(len(found))]
    assert len(passages) > 70
    pairs = [(passage.title, passage.text) if passage.title else passage.text for passage in passages]
    vectors = torch.cat([theirs(library, "ctx_encoder", [pair]) for pair in pairs])
    torch.testing.assert_close(found._files[0].vectors, vectors, rtol=1e-5, atol=1e-5)
    scores = theirs(library, "question_encoder", QUESTIONS) @ vectors.mT
    expected = scores.sort(descending=True)
    with open_retriever(index) as retriever:
        hits = retriever.retrieve(QUESTIONS, len(passages))
    ours = torch.tensor([[hit.score for hit in row] for row in hits])
    torch.testing.assert_close(ours, expected.values, rtol=1e-5, atol=1e-4)
    # Passages with equal words have equal scores, in any order.
    for row, order, values in zip(hits, expected.indices, expected.values, strict=True):
        for place, hit in enumerate(row):
            is_alone = (values - values[place]).abs().lt(1e-3).sum() == 1
            assert hit.number == order[place] or not is_alone


def test_search_prints_score_title_source_and_text(index, documents, capsys):
    capsys.readouterr()
    assert main(["search", str(index), QUESTIONS[0], "--passages", "3"]) == 0
    printed = capsys.readouterr().out
    with open_retriever(index) as retriever:
        hits = retriever.retrieve(QUESTIONS[:1], 3)[0]
    lines = printed.splitlines()
    for number, hit in enumerate(hits, start=1):
        title = f"{hit.passage.title}  " if hit.passage.title else ""
        assert f"[{number}] {hit.score:.3f}  {title}({hit.passage.source})" in lines
        assert f"    {hit.passage.text}" in lines
    assert hits[0].passage.source.startswith(f"{documents}, line ")
    assert main(["search", str(index), QUESTIONS[0]]) == 0
    assert "[5]" in capsys.readouterr().out


def test_the_index_is_found_again_after_its_run_was_moved(run, documents, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(run, tmp_path / "run")
    command = ["index", str(documents), "--model_dir", str(tmp_path / "run"), "--out", str(tmp_path / "i")]
    assert main(command) == 0
    (tmp_path / "run").rename(moved)
    search = ["search", str(tmp_path / "i"), "river"]
    capsys.readouterr()
    assert main(search) == 2
    assert "name the folder of the run with --encoder_dir" in capsys.readouterr().err
    assert main([*search, "--encoder_dir", str(moved)]) == 0
    next(moved.glob("checkpoint_*")).rename(moved / "checkpoint_9")
    assert main([*search, "--encoder_dir", str(moved)]) == 2
    assert "the checkpoint with which the index was made; it is missing" in capsys.readouterr().err


def test_an_index_of_another_model_is_refused(library, index, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(library, other)
    for name, kind in (("question_encoder", transformers.DPRQuestionEncoder),):
        model = kind.from_pretrained(other / name)
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        model.save_pretrained(other / name)
    assert main(["checkpoint", "import", str(other), "--model_dir", str(tmp_path / "run")]) == 0
    with (
        pytest.raises(DataError, match=r"(?s)made with another model.*--encoder_dir"),
        open_retriever(index, encoder_dir=tmp_path / "run"),
    ):
        pass


def test_the_checkpoint_is_found_where_it_was_if_the_named_run_lacks_it(run, documents, tmp_path):
    checkpoint = next(run.glob("checkpoint_*"))
    elsewhere = tmp_path / "elsewhere" / "checkpoint_7"
    shutil.copytree(checkpoint, elsewhere)
    command = ["index", str(documents), "--model_dir", str(run), "--checkpoint_path", str(elsewhere)]
    assert main([*command, "--out", str(tmp_path / "i")]) == 0
    shutil.copytree(run, tmp_path / "moved")
    assert main(["search", str(tmp_path / "i"), "river", "--encoder_dir", str(tmp_path / "moved")]) == 0


def test_options_of_the_machine_replace_those_of_the_run(run, documents, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    params = yaml.safe_load((run / "params.yaml").read_text())
    params["trainer"]["init"].setdefault("backend", {})["backend_type"] = "GPU"
    (tmp_path / "run" / "params.yaml").write_text(yaml.safe_dump(params))
    machine = ["--target_device", "CPU"]
    command = ["index", str(documents), "--model_dir", str(tmp_path / "run"), "--out", str(tmp_path / "i")]
    assert main([*command, *machine]) == 0
    assert main(["search", str(tmp_path / "i"), "river", *machine]) == 0
    assert main(["search", str(tmp_path / "i"), "river", *machine, "--host_memory", "1KiB"]) != 0


@pytest.mark.parametrize(
    ("question", "more", "message"),
    [
        ("a\udce9?", (), "expected text in UTF-8, found other bytes at character 2"),
        ("river " * 30, (), "at most 24 tokens, which the encoder reads; got 32"),
        (" ", (), "the question is empty"),
        ("river", ("--passages", "1000"), "got 1000"),
        ("river", ("--passages", "0"), "expected an integer of at least 1"),
    ],
)
def test_an_unsuitable_question_is_refused(question, more, message, index, capsys):
    capsys.readouterr()
    assert main(["search", str(index), question, *more]) == 2
    assert message in capsys.readouterr().err


def test_unsuitable_runs_and_folders_are_refused_before_the_encoder_is_opened(
    run, documents, index, tmp_path, capsys
):
    def error(*words):
        capsys.readouterr()
        assert main(["index", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "not empty" in error(documents, "--model_dir", run, "--out", index)
    assert "not empty" in error(documents, "--model_dir", run, "--out", run, "--overwrite")
    checkpoint = next(run.glob("checkpoint_*"))
    files = sorted(checkpoint.iterdir())
    found = error(documents, "--model_dir", run, "--out", checkpoint, "--overwrite")
    assert "expected an index to replace" in found and sorted(checkpoint.iterdir()) == files
    below = documents.parent / "folder" / "index"
    assert "below" in error(documents.parent, "--model_dir", run, "--out", below) and not below.exists()
    new = tmp_path / "new"
    for number in (0, 5_000_000_000):
        found = error(documents, "--model_dir", run, "--out", new, "--passage_words", number)
        assert f"from 1 to 100000 words of a passage, got {number}" in found
    assert "does not exist" in error(tmp_path / "x.txt", "--model_dir", run, "--out", new)
    assert "params.yaml" in error(documents, "--model_dir", tmp_path, "--out", new)
    params = (run / "params.yaml").read_text()
    assert "name: dpr" in params
    shutil.copytree(run, tmp_path / "run")
    for folder in (tmp_path / "run").glob("checkpoint_*"):
        shutil.rmtree(folder)
    assert "no checkpoint" in error(documents, "--model_dir", tmp_path / "run", "--out", new)
    (tmp_path / "run" / "params.yaml").write_text(
        "trainer: {init: {model_dir: x, model: {name: bert, hidden_size: 8, num_heads: 2},"
        " optimizer: {AdamW: {learning_rate: 1.0e-3}}, loop: {max_steps: 1}}}"
    )
    assert "whose model is dpr, got a bert" in error(documents, "--model_dir", tmp_path / "run", "--out", new)
    assert not new.exists()


def test_an_error_says_that_the_command_continues(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "PASSAGES_PER_FILE", 8)
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "river"}) + "\n{}\n")
    command = ["index", str(path), "--model_dir", str(run), "--out", str(tmp_path / "index")]
    capsys.readouterr()
    assert main(command) == 2
    assert "continues" not in capsys.readouterr().err, "nothing was written yet"
    path.write_text((json.dumps({"text": "river"}) + "\n") * 300 + "{}\n")
    assert main(command) == 2
    assert f"kept in {tmp_path / 'index.partial'}; the same command continues" in capsys.readouterr().err
    assert main([*command, "--skip_bad_records"]) == 0
    assert len(PassageIndex(tmp_path / "index")) == 300
