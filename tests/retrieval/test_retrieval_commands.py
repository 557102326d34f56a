"""A small retriever, trained on real questions, finds the passage that answers; a model writes from it."""

import gzip
import json

import pytest
import yaml

from headwater.cli.main import main
from headwater.config import find_params, load_params
from headwater.trainer.retrieval import open_retriever
from headwater.trainer.session import fit
from shared_data import SHARED

QUESTIONS = SHARED / "data" / "squad" / "squad_v1.1_dev_questions.json.gz"
NUM_PAIRS = 64
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "filter_size": 64,
    "max_position_embeddings": 80,
    "dropout_rate": 0.0,
}


def pairs():
    """Return questions of SQuAD, each with the beginning of the paragraph that answers it."""
    with gzip.open(QUESTIONS, "rt") as file:
        articles = json.load(file)["data"]
    found = {
        " ".join(paragraph["context"].split()[:30]): paragraph["qas"][0]["question"]
        for article in articles
        for paragraph in article["paragraphs"]
    }
    return [(question, passage) for passage, question in found.items()][:NUM_PAIRS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a trained retriever, and an index of all passages."""
    if not QUESTIONS.is_file():
        pytest.skip("no questions of SQuAD here")
    folder = tmp_path_factory.mktemp("retriever")
    records = [{"question": question, "positive": passage} for question, passage in pairs()]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    passages = [{"text": record["positive"], "title": ""} for record in records]
    (folder / "passages.jsonl").write_text("".join(json.dumps(each) + "\n" for each in passages))
    options = "--mode embedding_pairs --num_passages 1 --vocab_size 1000 --sequence_length 80 --processes 1"
    data = [str(folder / "pairs.jsonl"), "--out", str(folder / "data"), "--val_fraction", "0"]
    assert main(["data", *data, *options.split()]) == 0
    loader = "trainer.fit.train_dataloader."
    fit(
        load_params(
            find_params("dpr/tiny"),
            {
                "trainer.init.model_dir": str(folder / "dpr"),
                "trainer.init.model": {"name": "dpr", "q_encoder": SIZES, "ctx_encoder": SIZES},
                "trainer.init.loop": {"max_steps": 90},
                "trainer.init.schedulers": [{"ConstantLR": {"learning_rate": 4e-3}}],
                "trainer.init.checkpoint": {"steps": 90},
                loader + "batch_size": 16,
                loader + "data_dir": str(folder / "data" / "train"),
                "trainer.fit.val_dataloader": [],
            },
        )
    )
    index = [str(folder / "passages.jsonl"), "--model_dir", str(folder / "dpr"), "--out"]
    assert main(["index", *index, str(folder / "index")]) == 0
    return folder


def test_the_answering_passage_is_found(folder):
    questions, passages = zip(*pairs(), strict=True)
    with open_retriever(folder / "index") as retriever:
        found = retriever.retrieve(questions, 5)
    best = sum(hits[0].passage.text in passage for hits, passage in zip(found, passages, strict=True))
    among = sum(
        any(hit.passage.text in passage for hit in hits)
        for hits, passage in zip(found, passages, strict=True)
    )
    # By chance it would be 1 and 5 of 64.
    assert best > NUM_PAIRS / 2 and among > 0.8 * NUM_PAIRS


@pytest.fixture(scope="module")
def generator(folder):
    """Return the folder of a language model that was hardly trained, with 1,024 positions."""
    texts = [str(folder / "passages.jsonl"), "--out", str(folder / "texts"), "--vocab_size", "400"]
    assert main(["data", *texts, "--sequence_length", "64", "--processes", "1"]) == 0
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "max_position_embeddings": 1024}
    init = {
        "model_dir": str(folder / "gpt"),
        "seed": 1,
        "model": {"name": "gpt2", "vocab_size": 400, **sizes},
        "optimizer": {"AdamW": {"learning_rate": 1e-3}},
        "loop": {"max_steps": 2},
    }
    loader = {
        "data_processor": "GptHDF5DataProcessor",
        "data_dir": str(folder / "texts" / "train"),
        "batch_size": 4,
        "shuffle": True,
    }
    path = folder / "gpt.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"init": init, "fit": {"train_dataloader": loader}}}))
    assert main(["fit", str(path)]) == 0
    return folder / "gpt"


@pytest.fixture
def generate(folder, generator, capsys):
    """Return a function that runs `headwater generate` with the index: exit code, stdout, stderr."""

    def run(prompt, *more):
        capsys.readouterr()
        words = ["--model_dir", generator, "--prompt", prompt, "--index", folder / "index", *more]
        code = main(["generate", *map(str, words), "--no-do_sample"])
        return code, *capsys.readouterr()

    return run


def test_the_answer_lists_the_passages_before_the_prompt(folder, generate, generator, capsys):
    question, _ = pairs()[3]
    code, out, err = generate(question, "--passages", 2, "--max_new_tokens", 6, "--no-return_full_text")
    answer, _, listed = out.partition("\n\npassages:\n")
    assert code == 0 and "left out" not in err
    with open_retriever(folder / "index") as retriever:
        hits = retriever.retrieve([question], 2)[0]
    assert listed.splitlines() == [
        f"[{number}] {hit.score:.3f}  ({hit.passage.source})" for number, hit in enumerate(hits, start=1)
    ]
    # The same prompt, written out, has the same continuation.
    written = f"[1] {hits[0].passage.text}\n\n[2] {hits[1].passage.text}\n\n{question}"
    words = ["--model_dir", str(generator), "--prompt", written, "--max_new_tokens", "6", "--no-do_sample"]
    capsys.readouterr()
    assert main(["generate", *words, "--no-return_full_text"]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    code, full, _ = generate(question, "--passages", 2, "--max_new_tokens", 6)
    assert code == 0 and full.startswith(question + answer)


def test_a_template_of_the_user(folder, generate, tmp_path):
    question, _ = pairs()[3]
    (tmp_path / "template.txt").write_text("Q: {prompt}\n{passages}\nA:\n")
    words = (question, "--passages", 2, "--max_new_tokens", 4)
    code, out, _ = generate(*words, "--template", tmp_path / "template.txt")
    assert code == 0
    plain = generate(*words)[1]
    assert plain.splitlines()[-3:] == out.splitlines()[-3:], "the same passages"
    assert plain != out
    (tmp_path / "template.txt").write_text("{prompt}")
    code, _, err = generate(question, "--template", tmp_path / "template.txt")
    assert code == 2 and "found no {passages}" in err


def test_passages_that_do_not_fit_are_left_out(generate):
    question, _ = pairs()[3]
    code, out, err = generate(question, "--passages", 10, "--max_new_tokens", 20)
    used = int(err.partition("note: ")[2].split()[0])
    assert code == 0 and 1 <= used < 10 and f"{used} of 10 passages fit" in err
    assert len(out.partition("\n\npassages:\n")[2].splitlines()) == used
    code, _, err = generate(question, "--max_new_tokens", 1020)
    assert code == 2 and "with only the best passage it has" in err and "--passage_words" in err


def test_without_a_number_there_are_as_many_new_tokens_as_fit(generate, tmp_path):
    question, _ = pairs()[3]
    template = tmp_path / "template.txt"

    def written(count, *more):
        template.write_text("{passages}{prompt}" + "!?" * count)
        return generate(question, "--passages", 3, "--template", template, *more)

    def tokens(count):
        _, _, err = written(count, "--max_new_tokens", 1020)
        return int(err.partition("with only the best passage it has ")[2].split()[0])

    # The prompt with the best passage is almost as long as the model reads.
    each = (tokens(20) - tokens(10)) // 10
    count = 10 + (1020 - tokens(10)) // each
    assert 1000 < tokens(count) <= 1020
    code, out, err = written(count)
    assert code == 0 and len(out.partition("\n\npassages:\n")[2].splitlines()) == 1
    assert "1 of 3 passages fit" in err


def test_overrides_of_the_language_model_do_not_reach_the_retriever(folder, generate, generator, tmp_path):
    question, _ = pairs()[3]
    model = "trainer.init.model.attention_dropout_rate=0.0"
    changes = ["--target_device", "CPU", model]
    code, out, _ = generate(question, "--max_new_tokens", 2, *changes)
    assert code == 0 and "passages:" in out
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    words = ["batch", tmp_path / "requests.jsonl", generator, "--index", folder / "index", *changes]
    assert main([*map(str, words)]) == 0


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_text_that_is_not_utf8_is_refused(option, generator, capsys):
    words = ["generate", "--model_dir", str(generator), "--prompt", "x", option, "a\udce9"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "expected text in UTF-8" in error and option in error


def test_options_of_passages_need_an_index(generator, capsys):
    words = ["generate", "--model_dir", str(generator), "--prompt", "x"]
    for more in (["--passages", "2"], ["--template", "x"], ["--encoder_dir", "x"]):
        assert main([*words, *more]) == 2
        assert f"{more[0]} needs --index" in capsys.readouterr().err
    assert main([*words, "--index", "missing"]) == 2
    assert "no such index" in capsys.readouterr().err
