"""A server that puts passages of an index before the question of a chat."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_samples import TEXT, ServerProcess, post

from headwater.cli.main import main
from headwater.config.models.encoder import DPRConfig
from headwater.convert.checkpoint import export_hf
from headwater.data.tokenizer import TrainBPE
from headwater.models.bert import DPR
from headwater.retrieval.prompt import PassageTemplate
from headwater.serving.passages import PassagePrompts
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
    return post(f"{server.url}/v1/chat/completions", json=body)


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
        ({"max_tokens": 32_760}, "with only the best passage it has"),
    ],
)
def test_unsuitable_questions_are_refused(finding, changes, message):
    answer = ask(finding, QUESTION, **changes)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_other_paths_find_no_passages(finding):
    body = {"prompt": QUESTION, "temperature": 0}
    assert "passages" not in post(f"{finding.url}/v1/completions", json=body).json()


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


def test_a_batch_continues_only_with_the_same_passages(folders, index, tmp_path, capsys):
    requests, template, copy = (tmp_path / name for name in ("requests.jsonl", "template.txt", "index"))
    requests.write_text(json.dumps({"input_data": [QUESTION], "params": {"max_new_tokens": 1}}) + "\n")
    template.write_text("{passages} {prompt}")
    shutil.copytree(index, copy)
    words = ["batch", str(requests), f"long={folders['long']}", "--index", str(copy)]
    words += ["--template", str(template)]
    assert main(words) == main(words) == 0
    assert main([*words, "--passages", "2"]) == 2
    template.write_text("{passages}: {prompt}")
    assert main(words) == 2
    assert "other requests, or of other models" in capsys.readouterr().err
    template.write_text("{passages} {prompt}")
    assert main(words) == 0
    texts = tmp_path / "others.jsonl"
    texts.write_text('{"text": "Another text."}\n')
    run = ["--model_dir", str(index.parent / "run")]
    assert main(["index", str(texts), *run, "--out", str(copy), "--overwrite"]) == 0
    assert main(words) == 2


class OneAtATime:
    """A retriever that refuses a call during another one."""

    def __init__(self, retriever):
        self.index = retriever.index
        self._retriever = retriever
        self._lock = threading.Lock()

    def retrieve(self, questions, k):
        assert self._lock.acquire(blocking=False), "another thread uses the retriever"
        try:
            time.sleep(0.001)  # the other threads run
            return self._retriever.retrieve(questions, k)
        finally:
            self._lock.release()


def test_several_threads_find_passages_at_once(index):
    questions = [f"How many boats: {number}?" for number in range(6)]
    with open_retriever(index) as retriever:
        prompts = PassagePrompts(OneAtATime(retriever), PassageTemplate(), 2)

        def found(question):
            return prompts.prompt(question, lambda text: list(text.encode()), 1000)

        expected = [found(question) for question in questions]
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(found, questions * 4)) == expected * 4
    assert len({tuple(each.tokens) for each in expected}) == len(questions)
