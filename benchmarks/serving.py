"""A server under load: `python -m benchmarks.serving speed`, `clients`, `fuzz` or `disk`.

`speed` compares tokens per second of `headwater serve` with `transformers serve`, with and without its
option `--continuous-batching`, all through HTTP, and with `generate` of the transformers library in this
process, in turn. `transformers serve` also needs the package fastapi. A line says which server failed.
`clients` sends requests from 32 clients, and compares the answers with those of requests alone. `fuzz` sends
damaged requests. `disk` serves a large random model in little memory.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from headwater.cli.main import main as headwater
from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf
from headwater.data.assets import sample_text
from headwater.data.tokenizer import TrainBPE
from headwater.models.decoder import Decoder

PROMPT_TOKENS = 32
OURS = "headwater serve"
LIBRARY: dict[str, Sequence[str]] = {
    "transformers serve": (),
    "transformers serve --continuous-batching": ("--continuous-batching",),
}
"""Servers of the transformers library, each with its options."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("speed", "clients", "fuzz", "disk"))
    parser.add_argument("--hidden_size", type=int, default=512, help="width of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (%(default)s)")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (%(default)s)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 32], help="clients at once (%(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=1000, help="requests of `clients` and `fuzz` (%(default)s)"
    )
    parser.add_argument("--host_memory", default="1.5GiB", help="memory limit of `disk` (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder for models and weights on disk (a temporary one)")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    return parser


def make_tokenizer() -> Tokenizer:
    """Return a small tokenizer."""
    text = gzip.decompress(sample_text().read_bytes()).decode()[:200_000]
    return TrainBPE(4096).train([text])


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into the folder of a model."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """Write a random GPT-2 with 512 positions as the library does."""
    tokenizer = make_tokenizer()
    section = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_heads": args.hidden_size // 64,
        "max_position_embeddings": 512,
        "dropout_rate": 0.0,
    }
    config = DecoderConfig.model_validate({"name": "gpt2", **section})
    # The export comes first: it needs an empty folder.
    export_hf(Decoder(config, seed=1).state_dict(), config, folder)
    save_tokenizer(tokenizer, folder)
    return folder


def text_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Return the ids of 32 tokens in a row of a text, at different places."""
    text = gzip.decompress(sample_text().read_bytes()).decode()
    ids = tokenizer(text[:200_000]).input_ids
    starts = random.Random(0).sample(range(len(ids) - PROMPT_TOKENS), count)
    return [ids[start : start + PROMPT_TOKENS] for start in starts]


def random_prompts(model: Path, count: int) -> list[list[int]]:
    """Return prompts of random tokens of a model's vocabulary."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return torch.randint(1, vocabulary, (count, PROMPT_TOKENS)).tolist()


def imported(folder: Path) -> Path:
    """Import a model as a run beside its folder, and return the model_dir."""
    run = folder.with_name(f"{folder.name}_run")
    assert headwater(["checkpoint", "import", str(folder), "--model_dir", str(run)]) == 0
    return run


def make_large_model(folder: Path) -> Path:
    """Write a random Llama of 1.3 billion parameters in bf16, one layer in memory at a time."""
    folder.mkdir()
    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, folder)
    vocabulary, width, inner, layers = tokenizer.get_vocab_size(), 2048, 5632, 24
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    square, up, down = (width, width), (inner, width), (width, inner)
    shapes = {f"self_attn.{name}_proj": square for name in "qkvo"}
    shapes |= {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down}
    norms = ("input_layernorm", "post_attention_layernorm")
    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * 0.02

    for layer in range(layers):
        start = f"model.layers.{layer}"
        tensors = {f"{start}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        tensors |= {f"{start}.{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
        write(f"model-{layer:05d}.safetensors", tensors)
    ends = {"model.embed_tokens.weight": drawn(vocabulary, width), "lm_head.weight": drawn(vocabulary, width)}
    write("model-ends.safetensors", ends | {"model.norm.weight": torch.ones(width, dtype=torch.bfloat16)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


class ServerEnded(Exception):
    """A server of the transformers library has ended at its start."""


class Server:
    """A running server."""

    def __init__(
        self, process: subprocess.Popen[str] | subprocess.Popen[bytes], url: str, model: str | None = None
    ) -> None:
        self.process = process
        self.url = url
        self._named = {} if model is None else {"model": model}
        # Variables of the environment may name a proxy, which cannot reach this server.
        self._client = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=256), trust_env=False)

    def complete(self, prompt: Any, new_tokens: int) -> tuple[str, int]:
        """Return the greedy text after a prompt, and its number of tokens."""
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, **self._named}
        answer = self._client.post(f"{self.url}/v1/completions", json=body)
        answer.raise_for_status()
        found = answer.json()
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    def post(self, path: str, content: bytes) -> httpx.Response:
        """Send a body as it is."""
        return self._client.post(f"{self.url}{path}", content=content, timeout=60)

    def is_healthy(self) -> bool:
        """True if the server answers that it works."""
        try:
            return self._client.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_idle(self) -> None:
        """Return when no text is computed any more, at most after a minute."""
        end = time.monotonic() + 60
        while 'headwater_active_sequences{model="model_run"} 0' not in (
            self._client.get(f"{self.url}/metrics").text
        ):
            assert time.monotonic() < end, "the server computes texts of clients that have left"
            time.sleep(0.1)

    def peak_memory(self) -> int:
        """Return the most bytes of memory that the process had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    """Serve a model in a process."""
    command = [sys.executable, "-m", "headwater", "serve", str(folder), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at " in line, f"the server did not start: {line}"
        yield Server(process, line.rpartition(" at ")[2].strip())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def at_once(clients: int, calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], float]:
    """Return the results of calls by several threads, and the seconds that they took together."""
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        found = list(pool.map(lambda call: call(), calls))
    return found, time.perf_counter() - start


@contextmanager
def serving_of_library(folder: Path, *options: str) -> Iterator[Server]:
    """Serve a model with `transformers serve` in a process, in fp32 on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    command = [sys.executable, "-m", "transformers.cli.transformers", *words, "--dtype", "float32", *options]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = folder.with_name("library.log")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=offline, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}", model=str(folder))
    try:
        while not server.is_healthy():
            if process.poll() is not None:
                lines = log.read_text().strip().splitlines() or ["it needs pip install fastapi openai"]
                raise ServerEnded(lines[-1])
            time.sleep(0.5)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def generated_by_library(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Write texts with `generate` of the library in this process; return the number of new tokens."""
    ids = torch.tensor(prompts)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return int((written.shape[1] - ids.shape[1]) * len(prompts))


def speed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare tokens per second with `transformers serve` and with `generate` of the library, in turn."""
    import transformers

    saved = make_model(args, folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    words = ("--batch_size", str(max(args.batches) // 4 + 1))
    with ExitStack() as stack:
        ours = stack.enter_context(serving(imported(saved), *words))
        servers = {OURS: ours}
        for kind, options in LIBRARY.items():
            try:
                servers[kind] = stack.enter_context(serving_of_library(saved, *options))
            except ServerEnded as error:
                results[f"{kind} failed"] = str(error)
                print(f"{kind} failed: {error}", flush=True)
        for batch in args.batches:
            prompts = text_prompts(tokenizer, batch)

            texts = [tokenizer.decode(prompt) for prompt in prompts]

            def of_server(server: Server, texts: Sequence[str] = texts) -> int:
                calls = [functools.partial(server.complete, text, args.new_tokens) for text in texts]
                return sum(tokens for _, tokens in at_once(len(texts), calls)[0])

            kinds: dict[str, Callable[[], int]] = {
                **{kind: functools.partial(of_server, server) for kind, server in servers.items()},
                "transformers generate": functools.partial(
                    generated_by_library, model, prompts, args.new_tokens
                ),
            }
            rates, failures = rates_of(kinds, args.rounds)
            found = {"tokens_per_second": rates, "ratios": ratios(rates), "failed": failures}
            results[f"batch {batch}"] = found
            medians = {kind: f"{statistics.median(each):.1f}" for kind, each in rates.items()}
            print(f"batch {batch}: tokens/s {medians}, headwater / others {ratios(rates)}", flush=True)
            for kind, failure in failures.items():
                print(f"batch {batch}: {kind} failed: {failure}", flush=True)
    return results


def rates_of(
    kinds: dict[str, Callable[[], int]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return tokens per second of each system by round, and why systems have failed.

    Args:
        kinds: functions that write texts and return the number of tokens.
        rounds: measurements of each system, after one that warms up.
    """
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    failures: dict[str, str] = {}
    for round_number in range(rounds + 1):
        for kind in (kind for kind in kinds if kind not in failures):
            start = time.perf_counter()
            try:
                rate = kinds[kind]() / (time.perf_counter() - start)
            except httpx.HTTPError as error:
                if kind == OURS:
                    raise
                failures[kind] = f"{type(error).__name__}: {error}"
                continue
            if round_number:
                rates[kind].append(rate)
    return {kind: each for kind, each in rates.items() if kind not in failures}, failures


def ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of the ratios of Headwater's rate to each other one in the same round."""
    ours = rates[OURS]
    return {
        kind: round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
        for kind, theirs in rates.items()
        if theirs is not ours
    }


def clients(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Send requests from 32 clients, and compare the answers with those of requests alone."""
    texts = [f"It was the {number}th day" for number in range(100)]
    with serving(imported(make_model(args, folder / "model"))) as server:
        alone = [server.complete(text, 8)[0] for text in texts]
        numbers = [random.randrange(100) for _ in range(args.requests)]
        calls = [functools.partial(server.complete, texts[number], 8) for number in numbers]
        found, seconds = at_once(32, calls)
    wrong = sum(text != alone[number] for (text, _), number in zip(found, numbers, strict=True))
    print(f"{len(found)} answers to {args.requests} requests in {seconds:.1f} s; {wrong} differ from alone")
    return {"requests": args.requests, "answers": len(found), "wrong": wrong, "seconds": seconds}


VALUES: list[Any] = [
    None, True, 0, -1, 1e308, 10**30, "", "a", "\ud800", [], [[]], {}, {"a": 1}, [1, "a"], "\0" * 999,
    "x" * 99_999,
]  # fmt: skip
"""Values that replace those of a request."""
KEYS = ("stream", "temperature", "top_k", "model", "echo", "num_beams", "other")
"""Keys that a request gets beside its own."""
SHAPES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "stop": ["b"], "n": 2, "logprobs": 1, "seed": 3},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "top_p": 0.5,
    },
    "/score": {"input_data": ["a"], "params": {"max_new_tokens": 2, "do_sample": True}},
}
"""Requests without a fault, by path."""


@functools.cache
def oversized() -> bytes:
    """Return a body that is larger than the server accepts."""
    return json.dumps({"prompt": "x " * 9 * 2**20}).encode()


def damaged(generator: random.Random) -> tuple[str, bytes]:
    """Return a path and a body. Some keys or bytes are wrong, and one body of 200 is too large."""
    path = generator.choice(list(SHAPES))
    if generator.random() < 0.005:
        return path, oversized()
    body = json.loads(json.dumps(SHAPES[path]))
    for _ in range(generator.randint(0, 2)):
        body[generator.choice([*body, *KEYS])] = generator.choice(VALUES)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(generator.choice([0, 0, 0, 1, 3])):
        raw[generator.randrange(len(raw))] = generator.randrange(256)
    return path, bytes(raw[: generator.randint(0, len(raw))] if generator.random() < 0.1 else raw)


def leave_early(server: Server, path: str, raw: bytes, part: float) -> str:
    """Send a part of a request, and close the connection without reading."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall((head + raw)[: int(part * (len(head) + len(raw)))])
    return "left"


def fuzz(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Send damaged requests; one client of ten leaves before the answer.

    Each of the others must get an answer within a minute, none with a status of 500 or more.
    """
    generator = random.Random(0)

    def call(server: Server) -> Callable[[], int | str]:
        path, raw = damaged(generator)
        if generator.random() < 0.1:
            part = generator.choice([generator.random(), 1.0])
            return functools.partial(leave_early, server, path, raw, part)
        return lambda: server.post(path, raw).status_code

    with serving(imported(make_model(args, folder / "model"))) as server:
        found, seconds = at_once(16, [call(server) for _ in range(args.requests)])
        server.wait_until_idle()
        healthy = server.is_healthy() and server.complete("a", 2)[1] == 2
        peak = server.peak_memory()
    counts = Counter(map(str, found))
    print(f"{len(found)} requests in {seconds:.1f} s: {dict(counts)}, healthy after them: {healthy}")
    assert healthy and not any(count.startswith("5") for count in counts), "the server failed"
    return {"results": dict(counts), "seconds": seconds, "healthy": healthy, "peak_bytes": peak}


def disk(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve a model of 1.3 billion parameters from disk."""
    model = make_large_model(folder / "large")
    words = ("--host_memory", args.host_memory, "--disk", str(folder), "--batch_size", "1")
    with serving(model, *words, "--max_sequence_length", "512") as server:
        results: dict[str, Any] = {}
        for batch in (1, 4):
            prompts = random_prompts(model, batch)
            calls = [functools.partial(server.complete, prompt, 8) for prompt in prompts]
            found, seconds = at_once(batch, calls)
            rate = sum(tokens for _, tokens in found) / seconds
            results[f"batch {batch}"] = rate
            print(f"batch {batch}: {rate:.3f} tokens/s")
        results["peak_bytes"] = server.peak_memory()
    print(f"most memory of the server: {results['peak_bytes'] / 2**30:.2f} GiB, budget {args.host_memory}")
    return results


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "speed": speed,
    "clients": clients,
    "fuzz": fuzz,
    "disk": disk,
}


def main() -> int:
    args = make_parser().parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        results = PARTS[args.part](args, Path(name))
    if args.out is not None:
        args.out.write_text(f"{json.dumps({args.part: results}, indent=2)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
