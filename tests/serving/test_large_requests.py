"""Large requests: another thread reads them, and the asyncio loop answers other requests meanwhile."""

import asyncio
import dataclasses
import json
import threading

import pytest
from serving_samples import LLAMA, TEXT

from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import DataError
from headwater.data.codec import Codec
from headwater.data.tokenizer import TrainBPE
from headwater.generation.batcher import Batcher
from headwater.generation.requests import Limits
from headwater.models.decoder import Decoder
from headwater.serving.errors import ApiError
from headwater.serving.service import CARD, CHAT, COMPLETIONS, Service
from headwater.serving.worker import Worker
from headwater.serving.writing import ServedModel

LONG = TEXT * 40
BODIES = {
    COMPLETIONS: {"prompt": LONG, "max_tokens": 0, "echo": True},
    CARD: {"input_data": [LONG], "params": {"max_new_tokens": 0}},
    CHAT: {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
}


class WaitingCodec:
    """A tokenizer that waits until the asyncio loop has done something else."""

    ends = (0,)

    def __init__(self):
        self.loop_is_free = threading.Event()

    def encode(self, text):
        assert self.loop_is_free.wait(200), "the asyncio loop waits for the tokenizer"
        return [1] * (len(text) // 4)

    def answer_prompt(self, messages):
        return self.encode(messages[0]["content"])

    def decode(self, tokens):
        return "a" * len(tokens)


@pytest.fixture
def service():
    config = DecoderConfig.model_validate({**LLAMA, "vocab_size": 400, "max_position_embeddings": 20_000})
    worker = Worker(Batcher(Decoder(config).eval(), "cpu", Limits(30_000, 512, 4)), "test")
    found = Service({"model": ServedModel("model", WaitingCodec(), 400, worker, 0, "")})
    yield found
    worker.close()
    found.close()


@pytest.mark.parametrize("path", BODIES)
def test_the_loop_continues_while_a_large_request_is_tokenized(service, path):
    async def ask():
        begun = asyncio.create_task(service.answer(path, json.dumps(BODIES[path])))
        await asyncio.sleep(0.01)
        service.models["model"].codec.loop_is_free.set()
        answer = await begun
        answer.cancel()
        return answer

    assert asyncio.run(ask()).prompt_tokens == len(LONG) // 4


def test_errors_of_large_requests_are_those_of_small_ones(service):
    service.models["model"].codec.loop_is_free.set()
    bodies = {"vocabulary": [1] * 20_000 + [400], "positions": LONG * 2, "characters": LONG * 100}
    messages = "ids from 0 to 399, got 400", "at most 19985 tokens", "at most 5120000 characters"
    for prompt, message in zip(bodies.values(), messages, strict=True):
        with pytest.raises(ApiError) as found:
            asyncio.run(service.answer(COMPLETIONS, json.dumps({"prompt": prompt})))
        assert found.value.status == 400 and message in str(found.value)


class WaitingPassages:
    """Passages that are found only after an event, and then not at all."""

    def __init__(self):
        self.event = threading.Event()

    def prompt(self, question, tokens_of, most):
        assert self.event.wait(200), "the test does not set the event"
        raise DataError("no passages")


def test_requests_that_wait_for_passages_are_limited_and_delay_no_large_ones(service, monkeypatch):
    monkeypatch.setattr("headwater.serving.service._MOST_WAITING", 10)
    model = dataclasses.replace(service.models["model"], passages=WaitingPassages())
    model.codec.loop_is_free.set()
    finding = Service({"model": model})
    statuses = []

    async def chat():
        body = {"messages": [{"role": "user", "content": "Who?"}]}
        with pytest.raises(ApiError) as found:
            await finding.answer(CHAT, json.dumps(body))
        statuses.append(found.value.status)

    async def ask():
        chats = [asyncio.create_task(chat()) for _ in range(15)]
        while len(statuses) < 5:
            await asyncio.sleep(0.01)
        assert statuses == [429] * 5
        answer = await asyncio.wait_for(finding.answer(COMPLETIONS, json.dumps(BODIES[COMPLETIONS])), 200)
        answer.cancel()
        model.passages.event.set()
        await asyncio.gather(*chats)
        assert statuses[5:] == [400] * 10
        await chat()
        assert statuses[-1] == 400, "requests that were answered do not count"

    try:
        asyncio.run(ask())
    finally:
        model.passages.event.set()
        finding.close()


@pytest.mark.parametrize("special", [True, False, None])
def test_long_texts_are_the_tokens_of_the_tokenizer(tmp_path, special):
    tokenizer = TrainBPE(400).train([TEXT])
    codec = Codec(tokenizer, tmp_path, (0,), 0)
    expected = tokenizer.encode(LONG, add_special_tokens=special is not False).ids
    assert codec.encode(LONG, special=special) == expected
    assert codec.decode(expected * 2) == tokenizer.decode(expected * 2)
