"""Log-likelihoods with weights on disk and in memory: `python -m benchmarks.evaluation --batch_size 64`.

A random GPT answers the same requests with both tiers in turn, in one process. The answers must be equal.
`--tasks arc_easy,winogrande --include_path FOLDER` uses questions of lm-evaluation-harness instead of random
ones, with a tokenizer that was trained on the shipped text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch

from benchmarks.serving import make_tokenizer, save_tokenizer
from headwater.cli.arguments import read_model_dir
from headwater.cli.main import main as headwater
from headwater.config.harness import HarnessArguments
from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf
from headwater.data.codec import Codec, open_codec
from headwater.evaluation.passes import Request, Score, passes
from headwater.evaluation.scorer import Scorer
from headwater.models.decoder import Decoder
from headwater.trainer.harness import load_tasks, run_tasks
from headwater.trainer.inference import Inference, open_scorer

TIERS = ("memory", "disk")
ANSWER_TOKENS = 8
VOCABULARY = 8192


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=64, help="sequences of a pass (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--passes", type=int, default=2, help="passes of a measurement (%(default)s)")
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each tier (%(default)s)")
    parser.add_argument("--tasks", help="tasks of lm-evaluation-harness, with commas between them")
    parser.add_argument("--include_path", type=Path, help="folder with task files")
    parser.add_argument("--limit", type=int, default=200, help="questions of each task (%(default)s)")
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    return parser


def make_run(args: argparse.Namespace, folder: Path) -> Path:
    """Write a random model as a run, and return its model_dir."""
    section = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_heads": args.hidden_size // 64,
        "max_position_embeddings": args.tokens,
        "dropout_rate": 0.0,
    }
    config = DecoderConfig.model_validate({"name": "gpt2", **section})
    export_hf(Decoder(config, seed=1).state_dict(), config, folder / "hf")
    assert headwater(["checkpoint", "import", str(folder / "hf"), "--model_dir", str(folder / "run")]) == 0
    return folder / "run"


def make_requests(args: argparse.Namespace) -> list[Request]:
    """Return random requests that fill the passes."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch_size * args.passes, args.tokens + 1)
    texts = torch.randint(0, VOCABULARY, shape, generator=generator).tolist()
    return [Request(tuple(text[:-ANSWER_TOKENS]), tuple(text[-ANSWER_TOKENS:])) for text in texts]


class Recorder:
    """A scorer that also keeps the requests for log-likelihoods.

    Args:
        scorer: answers the requests.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.max_length = scorer.max_length
        self.requests: list[Request] = []
        self._scorer = scorer

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        self.requests += requests
        return self._scorer.scores(requests)


def questions(args: argparse.Namespace, scorer: Scorer, folder: Path) -> list[Request]:
    """Return the requests that the harness makes of the questions of the tasks."""
    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, folder)
    codec: Codec = open_codec(folder)
    tree = {"tasks": args.tasks, "limit": args.limit, "include_path": args.include_path}
    arguments = HarnessArguments.model_validate({**tree, "truncate": True})
    tasks = load_tasks(arguments)
    recorder = Recorder(scorer)
    run_tasks(tasks, arguments, cast(Scorer, recorder), codec, {})
    return recorder.requests


def measure(
    scorers: dict[str, Scorer], requests: Sequence[Request], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the clock and of the processor for each tier, by round."""
    seconds: dict[str, list[tuple[float, float]]] = {tier: [] for tier in scorers}
    for _ in range(rounds):
        for tier, scorer in scorers.items():
            start = time.perf_counter(), time.process_time()
            scorer.scores(requests)
            seconds[tier].append((time.perf_counter() - start[0], time.process_time() - start[1]))
            print("{}: {:.2f} s, {:.2f} s of the processor".format(tier, *seconds[tier][-1]), flush=True)
    return seconds


def main() -> int:
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run, scorers = make_run(args, Path(name)), dict[str, Scorer]()
        for tier in TIERS:
            backend = "trainer.init.backend"
            changes = [f"{backend}.tier={tier}", f"{backend}.num_slabs=2", f"{backend}.disk.path={name}"]
            config = read_model_dir(run, [*changes, f"target_device={args.device}"])
            inference = Inference(args.batch_size, args.tokens)
            scorers[tier] = stack.enter_context(open_scorer(config, inference))
        requests = make_requests(args)
        if args.tasks:
            requests = questions(args, scorers["memory"], Path(name))
        found = [scorer.scores(requests) for scorer in scorers.values()]
        assert found[0] == found[1], "answers from disk and from memory differ"
        count = len(list(passes(requests, args.batch_size * args.tokens)))
        print(f"{len(requests)} requests in {count} passes")
        seconds = measure(scorers, requests, args.rounds)
    for place, clock in enumerate(("clock", "processor")):
        disk, memory = (sum(each[place] for each in seconds[tier]) for tier in ("disk", "memory"))
        print(f"disk / memory by the {clock}, all rounds together: {disk / memory:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
