"""Small random models for servers, and server processes."""

import json
import os
import signal
import subprocess
import sys

import httpx

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf
from headwater.data.tokenizer import TrainBPE
from headwater.models.decoder import Decoder

TEXT = "The river runs past the mill, and the mill grinds the corn of the village. " * 20
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
PATIENCE_S = 200
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "initializer": {"name": "normal", "std": 0.3},
}
GPT2 = {**MODEL, "name": "gpt2", "max_position_embeddings": 96}
LLAMA = {
    **MODEL,
    "name": "llama",
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
    "max_position_embeddings": 32768,
}


def save_model(folder, section, *, ends=True, seed=5):
    """Save a random model as the transformers library does, with its tokenizer and a chat template.

    Args:
        ends: False for a model that, at temperature 0, writes until `max_tokens`. A test that acts during an
            answer needs one: any other model may end its answer first.
    """
    folder.mkdir()
    tokenizer = TrainBPE(400).train([TEXT])
    config = DecoderConfig.model_validate({**section, "vocab_size": tokenizer.get_vocab_size()})
    state = Decoder(config, seed=seed).state_dict()
    if not ends:
        state["head.weight"][tokenizer.token_to_id("<|endoftext|>")] = 0.0  # some other score is above 0
    export_hf(state, config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def get(url, **options):
    """Return the answer to a GET request; a slow machine may take its time."""
    return httpx.get(url, timeout=PATIENCE_S, **options)


def post(url, **options):
    """Return the answer to a POST request; a slow machine may take its time."""
    return httpx.post(url, timeout=PATIENCE_S, **options)


class ServerProcess:
    """A server in a process.

    Args:
        words: arguments of `headwater serve`.
        token: token of the server, if it has one.
    """

    def __init__(self, *words, token=None):
        command = [sys.executable, "-m", "headwater", "serve", *map(str, words), "--port", "0"]
        environment = {**os.environ, **({"HEADWATER_TOKEN": token} if token else {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        line = self.process.stdout.readline()
        self.url = line.rpartition(" at ")[2].strip()
        if not self.url.startswith("http"):
            self.process.wait()
            raise AssertionError(f"no server: {line}{self.process.stderr.read()}")

    def stop(self, how=signal.SIGTERM):
        """End the process; return its exit code and stderr."""
        self.process.send_signal(how)
        _, error = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, error

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
