"""A server process, used through the openai package and compared with the transformers library."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
import transformers
from pydantic import ValidationError
from serving_samples import PATIENCE_S, TEXT, get, post

from headwater.serving.schemas import CardRequest, ChatRequest, CompletionRequest

PROMPTS = ["The river", "the mill grinds the corn", "village", "past the mill, and"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as found:
        yield found


@pytest.fixture(scope="module")
def theirs(folders):
    """Returns the library's model and tokenizer by the name of a served model."""
    return {
        name: (
            transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
            transformers.AutoTokenizer.from_pretrained(folder),
        )
        for name, folder in folders.items()
    }


def written(model, ids, count, **settings):
    """Return the tokens that the library writes after tokens [1, seq]."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 0, **settings}
    mask = torch.ones_like(ids)  # otherwise the library hides end tokens in the prompt
    return model.generate(ids, attention_mask=mask, max_new_tokens=count, **settings)[0, ids.shape[1] :]


def greedy(theirs, name, prompt, count):
    """Return the tokens that the library writes."""
    model, tokenizer = theirs[name]
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = written(model, ids, count)
    return tokens, ids.shape[1]


def metrics(server):
    lines = get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.mark.parametrize("name", ["small", "long"])
def test_greedy_completions_equal_transformers(client, theirs, name):
    answer = client.completions.create(model=name, prompt=PROMPTS, max_tokens=20, temperature=0)
    expected = [greedy(theirs, name, prompt, 20) for prompt in PROMPTS]
    texts = [theirs[name][1].decode(tokens, skip_special_tokens=True) for tokens, _ in expected]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(count for _, count in expected)
    assert answer.object == "text_completion"


def test_chat_answers_equal_transformers(client, theirs):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who runs?"}]
    model, tokenizer = theirs["small"]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    expected = tokenizer.decode(written(model, ids, 15), skip_special_tokens=True)
    answer = client.chat.completions.create(model="small", messages=messages, max_tokens=15, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == ids.shape[1]
    assert answer.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("n", [1, 3])
def test_streams_are_the_same_texts_in_pieces(client, n):
    settings = {"model": "small", "max_tokens": 25, "n": n, "seed": 7, "temperature": 1.0}
    whole = client.completions.create(prompt="The mill", **settings)
    texts = [""] * n
    reasons = [None] * n
    usage = None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(prompt="The mill", **settings, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert len(set(texts)) == n


def test_a_chat_stream_begins_with_the_role(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who runs?"}]}]
    settings = {"model": "small", "messages": messages, "max_completion_tokens": 12, "seed": 3}
    chunks = list(client.chat.completions.create(stream=True, **settings))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == client.chat.completions.create(**settings).choices[0].message.content


def test_log_probabilities_equal_transformers(client, theirs):
    prompt = PROMPTS[0]
    answer = client.completions.create(model="small", prompt=prompt, max_tokens=6, temperature=0, logprobs=3)
    model, tokenizer = theirs["small"]
    tokens, start = greedy(theirs, "small", prompt, 6)
    ids = torch.cat([tokenizer(prompt, return_tensors="pt").input_ids[0], tokens])
    with torch.no_grad():
        expected = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-4)
    # Tokens with the same text share an entry.
    best = expected.max(1).values.tolist()
    assert [max(each.values()) for each in found.top_logprobs] == pytest.approx(best, abs=1e-4)
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    entries = chat.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    named = [each for entry in entries for each in (entry, *entry.top_logprobs)]
    assert all(bytes(each.bytes).decode(errors="replace") == each.token for each in named)


def test_stop_strings_end_a_text(client):
    whole = client.completions.create(model="long", prompt="The mill", max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[10:13]
    answer = client.completions.create(
        model="long", prompt="The mill", max_tokens=40, temperature=0, stop=[stop, "\x00"]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_equal_seeds_give_equal_texts(client):
    def sampled(seed):
        settings = {"temperature": 1.5, "top_p": 0.9, "extra_body": {"top_k": 50}}
        answer = client.completions.create(model="small", prompt="The", max_tokens=20, seed=seed, **settings)
        return answer.choices[0].text

    assert sampled(1) == sampled(1) != sampled(2)
    assert sampled(None) != sampled(None)


def test_the_prompt_is_repeated_on_request(client):
    settings = {"model": "small", "max_tokens": 5, "temperature": 0}
    plain = client.completions.create(prompt="The mill", **settings).choices[0].text
    assert client.completions.create(prompt="The mill", echo=True, **settings).choices[0].text == (
        f"The mill{plain}"
    )
    assert plain == client.completions.create(prompt=_ids("The mill"), **settings).choices[0].text


def test_no_new_tokens_are_an_empty_text(server, client):
    settings = {"model": "small", "prompt": "The mill", "max_tokens": 0}
    assert client.completions.create(**settings, echo=True).choices[0].text == "The mill"
    streamed = list(client.completions.create(**settings, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == "The mill"
    request = {"input_data": ["The mill"], "params": {"max_new_tokens": 0}}
    assert post(f"{server.url}/score", json=request).json() == ["The mill"]


def _ids(text):
    from headwater.data.tokenizer import TrainBPE

    return TrainBPE(400).train([TEXT]).encode(text).ids


def test_no_sequence_is_repeated(client, theirs):
    model, tokenizer = theirs["long"]
    ids = tokenizer("the mill", return_tensors="pt").input_ids
    expected = tokenizer.decode(written(model, ids, 60, no_repeat_ngram_size=2), skip_special_tokens=True)
    answer = client.completions.create(
        model="long",
        prompt="the mill",
        max_tokens=60,
        temperature=0,
        extra_body={"no_repeat_ngram_size": 2},
    )
    assert answer.choices[0].text == expected


def test_beam_search_equals_transformers(server, client, theirs):
    model, tokenizer = theirs["long"]
    ids = tokenizer("the mill", return_tensors="pt").input_ids
    settings = {"num_beams": 3, "early_stopping": True, "no_repeat_ngram_size": 2}
    expected = tokenizer.decode(written(model, ids, 12, **settings), skip_special_tokens=True)
    answer = client.completions.create(model="long", prompt="the mill", max_tokens=12, extra_body=settings)
    assert answer.choices[0].text == expected
    request = {"input_data": ["the mill"], "params": {"max_new_tokens": 12, **settings}, "model": "long"}
    assert post(f"{server.url}/score", json=request).json() == [f"the mill{expected}"]
    request["params"]["do_sample"] = True
    refused = post(f"{server.url}/score", json=request)
    assert refused.status_code == 400 and "does not support do_sample" in refused.text


def test_two_dozen_clients_get_their_own_answers(server, client):
    def ask(number):
        answer = client.completions.create(
            model="small", prompt=f"The {number}", max_tokens=5 + number % 7, temperature=0, echo=True
        )
        return answer.choices[0].text

    alone = [ask(number) for number in range(24)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, [*range(24)] * 3))
    assert together == alone * 3
    assert metrics(server)['headwater_active_sequences{model="small"}'] == 0


def test_the_models_and_their_state(server, client):
    assert [model.id for model in client.models.list()] == ["small", "long"]
    assert client.models.retrieve("long").model_dump()["max_model_len"] == 32768
    assert get(f"{server.url}/health").json() == {"status": "ok", "failed_models": []}
    found = metrics(server)
    assert found['headwater_model_up{model="small"}'] == 1
    assert found['headwater_cache_limit_tokens{model="small"}'] == 8 * 96


def test_the_cards_json(server, theirs):
    settings = {"top_p": 1.0, "temperature": 0.8, "max_new_tokens": 12, "do_sample": False}
    request = {"input_data": PROMPTS[:2], "params": {**settings, "return_full_text": True}}
    answer = post(f"{server.url}/score", json=request)
    expected = [greedy(theirs, "small", prompt, 12)[0] for prompt in PROMPTS[:2]]
    texts = [theirs["small"][1].decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert answer.json() == [a + b for a, b in zip(PROMPTS[:2], texts, strict=True)]
    request["params"]["return_full_text"] = False
    assert post(f"{server.url}/score", json={**request, "model": "small"}).json() == texts
    sampled = {**request["params"], "do_sample": True, "temperature": 2.0}
    pair = [post(f"{server.url}/score", json={**request, "params": sampled}).json() for _ in range(2)]
    assert pair[0] != pair[1]


BAD = {
    "not JSON": (b"{", 400, "JSON object"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "JSON object"),
    "a list": (b"[]", 400, "got list"),
    "deep": (b"[" * 200_000, 400, "JSON object"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    "no prompt": (b"{}", 400, "prompt"),
    "empty prompt": (b'{"prompt": []}', 400, "prompt"),
    "unknown key": (b'{"prompt": "a", "max_tokns": 3}', 400, "not supported; remedy: write max_tokens, or"),
    "inner key": (b'{"prompt": "a", "stream_options": {"includ_usage": true}}', 400, "write include_usage"),
    "strange key": (b'{"prompt": "a", "' + b"max_tokens" * 999 + b'": 3}', 400, "remedy: remove it"),
    "a number as text": (b'{"prompt": "a", "max_tokens": "3"}', 400, "max_tokens"),
    "negative": (b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
    "penalty": (b'{"prompt": "a", "frequency_penalty": 0.5}', 400, "frequency_penalty"),
    "token": (b'{"prompt": [5, 99999]}', 400, "token ids from 0 to"),
    "huge token": (b'{"prompt": [99999999999999999999999]}', 400, "token ids from 0 to"),
    "huge seed": (b'{"prompt": "a", "seed": 99999999999999999999999, "max_tokens": 1}', 200, ""),
    "many": (b'{"prompt": [' + b'"a",' * 16 + b'"a"], "n": 64}', 400, "divide"),
    "huge echo": (b'{"prompt": [99999999999999999999999], "echo": true}', 400, "token ids from 0 to"),
    "echo and logprobs": (b'{"prompt": "a", "echo": true, "logprobs": 1}', 400, "remove one"),
    "best of": (b'{"prompt": "a", "n": 2, "best_of": 3}', 400, "best_of to be 1 or n (2), got 3"),
    "keys": (b"{" + b",".join(b'"%d": 1' % each for each in range(101)) + b"}", 400, "at most 100 keys"),
    "beams and samples": (b'{"prompt": "a", "num_beams": 2, "temperature": 1}', 400, "support temperature"),
    "beams and n": (b'{"prompt": "a", "num_beams": 2, "n": 2}', 400, "does not support n"),
    "beams and logprobs": (b'{"prompt": "a", "num_beams": 2, "logprobs": 0}', 400, "support logprobs"),
    "many beams": (b'{"prompt": "a", "num_beams": 99}', 400, "use at most"),
    "ngrams": (b'{"prompt": "a", "no_repeat_ngram_size": 101}', 400, "no_repeat_ngram_size"),
    "model": (b'{"prompt": "a", "model": "gpt-5"}', 404, "use one of small, long"),
    "surrogate": (b'{"prompt": "\\ud800"}', 400, "JSON object"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "status", "message"), BAD.values(), ids=BAD)
def test_malformed_requests_get_an_error_of_openais_form(server, body, status, message):
    answer = post(f"{server.url}/v1/completions", content=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": [None] * 1000}),
        (CompletionRequest, {"prompt": [[None] * 1000] * 1000}),
        (ChatRequest, {"messages": [None] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [None] * 1000}]}),
        (CardRequest, {"input_data": [None] * 1000}),
    ],
)
def test_a_list_of_wrong_values_is_few_errors(schema, body):
    with pytest.raises(ValidationError) as found:
        schema.model_validate(body)
    assert found.value.error_count() < 10


def test_prompts_that_do_not_fit(client):
    with pytest.raises(openai.BadRequestError, match="shorten the prompt to at most 96 tokens"):
        client.completions.create(model="small", prompt="mill " * 200, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="at most 24576 characters, got 100000; remedy: shorten"):
        client.completions.create(model="small", prompt=["The", "x" * 100_000])
    with pytest.raises(openai.BadRequestError, match="at most 24576 characters, got 30000"):
        messages = [{"role": "user", "content": "x" * 10_000}] * 3
        client.chat.completions.create(model="small", messages=messages)
    with pytest.raises(openai.BadRequestError, match=r"request at most 9\d new tokens"):
        client.completions.create(model="small", prompt="The", max_tokens=200)
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.completions.create(model="other", prompt="The")


def test_other_paths_and_methods(server):
    assert get(f"{server.url}/v1/nothing").status_code == 404
    answer = get(f"{server.url}/v1/completions")
    assert answer.status_code == 405
    assert "another HTTP method" in answer.json()["error"]["message"]
    large = post(f"{server.url}/v1/completions", content=b" " * (17 * 2**20))
    assert large.status_code == 413


def test_pages_of_other_sites_are_refused(server):
    body = {"prompt": "a", "max_tokens": 1}
    url = f"{server.url}/v1/completions"
    assert post(url, json=body, headers={"Host": "evil.example"}).status_code == 403
    assert post(url, json=body, headers={"Origin": "https://evil.example"}).status_code == 403
    assert post(url, json=body, headers={"Origin": server.url}).status_code == 200


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request(server, streams):
    before = metrics(server)["headwater_disconnects_total"]
    # The answer takes a minute, so a test that stalls still meets it.
    body = {"model": "long", "prompt": "The", "max_tokens": 30_000, "stream": streams, "temperature": 0}
    active = 'headwater_active_sequences{model="long"}'
    with (
        httpx.Client(timeout=None) as own,
        own.stream("POST", f"{server.url}/v1/completions", json=body)
        if (streams)
        else _never_read(server.url, body),
    ):
        _until(lambda: metrics(server)[active] == 1)
    _until(lambda: metrics(server)["headwater_disconnects_total"] == before + 1)
    _until(lambda: metrics(server)[active] == 0)


class _never_read:
    """A request whose client closes the connection instead of reading the answer."""

    def __init__(self, url, body):
        self.request = (f"{url}/v1/completions", body)

    def __enter__(self):
        self.client = httpx.Client(timeout=None)
        self.thread = threading.Thread(target=self._send)
        self.thread.start()

    def _send(self):
        try:
            self.client.post(self.request[0], json=self.request[1])
        except httpx.HTTPError:
            return

    def __exit__(self, *exception):
        for connection in self.client._transport._pool.connections:
            connection._connection._network_stream._sock.shutdown(2)
        self.thread.join()
        self.client.close()


def _until(condition):
    """Block until a condition is true. Only the time limit of the whole test ends the wait earlier."""
    while not condition():
        time.sleep(0.02)
