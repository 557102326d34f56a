"""A server that puts passages of an index before the question of a chat."""

import json

import httpx
import pytest
from serving_samples import TEXT, ServerProcess

from headwater.cli.main import main
from headwater.config.models.encoder import DPRConfig
from headwater.convert.checkpoint import export_hf
from headwater.data.tokenizer import TrainBPE
from headwater.models.bert import DPR
from headwater.trainer.retrieval import open_retriever

TOWER = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "filter_size": 40,
    "max_position_embeddings": 40,
    "initializer_range": 0.5,
}
QUESTION = "What does the mill grind?"
DOCUMENTS = [{"text": "The mill grinds the corn.", "title": "Mills"}, {"text": "The river runs past."}] + [
    {"text": f"The village has {number} boats."} for number in range(6)
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Return an index of documents, made by random encoders."""
    folder = tmp_path_factory.mktemp("passages")
    config = DPRConfig.model_validate({"name": "dpr", "q_encoder": TOWER, "ctx_encoder": TOWER})
    tokenizer = folder / "tokenizer.json"
    TrainBPE(400).train([TEXT]).save(str(tokenizer))
    weights = DPR(config, seed=1).named_parameters()
    export_hf(weights, config, folder / "library", tokenizer_files=[tokenizer])
    run = ["--model_dir", str(folder / "run")]
    assert main(["checkpoint", "import", str(folder / "library"), *run]) == 0
    texts = folder / "documents.jsonl"
    texts.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    assert main(["index", str(texts), *run, "--out", str(folder / "index")]) == 0
    return folder / "index"


@pytest.fixture(scope="module")
def finding(folders, index):
    """A server with the index."""
    with ServerProcess(f"long={folders['long']}", "--index", index, "--passages", 2) as process:
        yield process


def ask(server, *contents, **more):
    messages = [{"role": "user", "content": content} for content in contents]
    body = {"model": "long", "messages": messages, "temperature": 0, "max_tokens": 5, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_the_answer_has_the_passages_that_the_model_read(finding, server, index):
    with open_retriever(index) as retriever:
        hits = retriever.retrieve([QUESTION], 2)[0]
    found = ask(finding, "Hello.", QUESTION).json()
    assert [each["text"] for each in found["passages"]] == [hit.passage.text for hit in hits]
    assert found["passages"][0].keys() == {"score", "text", "title", "source"}
    listed = (f"{hit.passage.title}\n{hit.passage.text}".strip() for hit in hits)
    numbered = [f"[{number}] {text}" for number, text in enumerate(listed, start=1)]
    written = "\n\n".join([*numbered, QUESTION])
    without = ask(server, "Hello.", written).json()
    assert found["choices"] == without["choices"] and found["usage"] == without["usage"]
    assert "passages" not in without


def test_only_the_first_piece_of_a_stream_has_the_passages(finding):
    answer = ask(finding, QUESTION, stream=True)
    lines = answer.text.strip().split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert pieces[0]["passages"] == ask(finding, QUESTION).json()["passages"]
    assert len(pieces) > 1 and not any("passages" in piece for piece in pieces[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [{"role": "user", "content": "mill " * 60}]}, "a question of at most 40 tokens"),
        ({"messages": [{"role": "user", "content": " "}]}, "the question is empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "a message with the role user"),
        ({"max_tokens": 4090}, "with only the best passage it has"),
    ],
)
def test_unsuitable_questions_are_refused(finding, changes, message):
    answer = ask(finding, QUESTION, **changes)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_other_paths_find_no_passages(finding):
    body = {"prompt": QUESTION, "temperature": 0}
    assert "passages" not in httpx.post(f"{finding.url}/v1/completions", json=body, timeout=60).json()


def test_requests_of_a_file_find_passages(folders, index, tmp_path, capsys):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2, "temperature": 0}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    words = ["batch", str(tmp_path / "requests.jsonl"), f"long={folders['long']}", "--index", str(index)]
    assert main(words) == 0
    answer = json.loads((tmp_path / "requests.answers.jsonl").read_text())
    assert len(answer["response"]["body"]["passages"]) == 5
    capsys.readouterr()
    assert main(words[:3]) == 2, "the answers are of a model with an index"
    assert main([*words, "--passages", "9"]) == 2
    assert "from 1 to 8 passages" in capsys.readouterr().err
