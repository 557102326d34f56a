"""Masked tokens of BERT: the command and the server, compared with the pipeline of transformers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from serving_samples import ServerProcess, get, post

from headwater.cli.main import main

WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "mill",
    "and",
    "grinds",
    "corn",
    "of",
    "village",
    "a",
    "miller",
    "sleeps",
]
TEXTS = [
    "The river [MASK] past the mill",
    "the [MASK]",
    "a miller [MASK] and grinds the [MASK] of the village",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random BERT as the library saves it, the run that imports it, and the export of this run."""
    base = tmp_path_factory.mktemp("bert")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = transformers.BertTokenizerFast(vocab={name: number for number, name in enumerate(names)})
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = transformers.BertConfig(vocab_size=len(names), max_position_embeddings=24, **sizes)
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    found = base / "library", base / "run", base / "exported"
    model.save_pretrained(found[0])
    tokenizer.save_pretrained(found[0])
    assert main(["checkpoint", "import", str(found[0]), "--model_dir", str(found[1])]) == 0
    assert main(["checkpoint", "export", "--model_dir", str(found[1]), "--out", str(found[2])]) == 0
    # The class in the library's config.json names the task.
    transformers.BertForMaskedLM.from_pretrained(found[2]).save_pretrained(base / "masked")
    tokenizer.save_pretrained(base / "masked")
    return *found, base / "masked"


@pytest.fixture(scope="module")
def expected(folders):
    """Returns the answers of the library's pipeline with the exported model."""
    model = transformers.BertForMaskedLM.from_pretrained(folders[2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[2])
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")
    return lambda text, count: pipeline(text, top_k=count)


@pytest.fixture(scope="module")
def server(folders):
    with ServerProcess(f"bert={folders[1]}") as process:
        yield process


def assert_equal(found, expected):
    """Compare answers; scores are equal to 1e-4."""
    assert len(found) == len(expected)
    if isinstance(expected[0], list):
        for pair in zip(found, expected, strict=True):
            assert_equal(*pair)
        return
    scores = [[each["score"] for each in side] for side in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    others = [[{**each, "score": 0} for each in side] for side in (found, expected)]
    assert others[0] == others[1]


def ask(server, texts, **params):
    return post(f"{server.url}/score", json={"input_data": texts, "params": params})


@pytest.mark.parametrize("count", [None, 2, 1000])
def test_answers_of_the_server_equal_the_pipeline(server, expected, count):
    answer = ask(server, TEXTS, **({} if count is None else {"top_k": count})).json()
    most = 5 if count is None else min(count, 5 + len(WORDS))
    assert_equal(answer, [expected(text, most) for text in TEXTS])


def test_many_clients_get_their_own_answers(server, expected):
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda number: ask(server, [TEXTS[number % 3]], top_k=3).json(), range(36)))
    for number, answer in enumerate(found):
        assert_equal(answer, [expected(TEXTS[number % 3], 3)])


@pytest.mark.parametrize(
    ("texts", "params", "message"),
    [
        (["the mill"], {}, "with the mask token [MASK]"),
        (["[MASK] " * 30], {}, "at most 24 tokens, got 32"),
        (["[MASK]"], {"do_sample": True}, "do_sample has no effect"),
    ],
)
def test_a_wrong_request_says_what_was_expected(server, texts, params, message):
    answer = ask(server, texts, **params)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_paths_of_text_generation_are_refused_and_state_is_served(server):
    answer = post(f"{server.url}/v1/completions", json={"prompt": "[MASK]"})
    assert answer.status_code == 400 and "send it to /score" in answer.json()["error"]["message"]
    assert get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 24
    assert get(f"{server.url}/health").status_code == 200
    assert 'headwater_waiting_requests{model="bert"} 0' in get(f"{server.url}/metrics").text


@pytest.mark.parametrize("place", [1, 3], ids=["run", "library"])
def test_generate_prints_the_likely_tokens(folders, expected, capsys, place):
    capsys.readouterr()
    words = ["generate", "--model_dir", str(folders[place]), "--prompt", TEXTS[0], "--top_k", "3"]
    assert main(words) == 0
    lines = [
        f"{each['score']:.4f}  {each['token_str']}  {each['sequence']}" for each in expected(TEXTS[0], 3)
    ]
    assert capsys.readouterr().out.splitlines()[-3:] == lines
    assert main([*words, "--system", "x"]) == 2
    assert main([*words[:-1], "0"]) == 2


def test_a_server_without_a_model_that_writes_refuses_an_index(folders, tmp_path, capsys):
    assert main(["serve", f"bert={folders[1]}", "--port", "0", "--index", str(tmp_path)]) == 2
    assert "--index has no effect, because no served model writes texts" in capsys.readouterr().err
