"""Log-likelihoods with weights on disk and in memory: `python -m benchmarks.evaluation --batch_size 64`.

A random GPT answers the same requests with both tiers in turn, in one process. The scores must be equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from headwater.cli.arguments import read_model_dir
from headwater.cli.main import main as headwater
from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf
from headwater.evaluation.passes import Request
from headwater.models.decoder import Decoder
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


def main() -> int:
    args = make_parser().parse_args()
    requests = make_requests(args)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run, scorers = make_run(args, Path(name)), {}
        for tier in TIERS:
            backend = "trainer.init.backend"
            changes = [f"{backend}.tier={tier}", f"{backend}.num_slabs=2", f"{backend}.disk.path={name}"]
            config = read_model_dir(run, [*changes, f"target_device={args.device}"])
            inference = Inference(args.batch_size, args.tokens)
            scorers[tier] = stack.enter_context(open_scorer(config, inference))
        found = [scorer.scores(requests) for scorer in scorers.values()]
        assert found[0] == found[1], "scores from disk and from memory differ"
        seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
        for _ in range(args.rounds):
            for tier, scorer in scorers.items():
                start = time.perf_counter()
                scorer.scores(requests)
                seconds[tier].append(time.perf_counter() - start)
                print(f"{tier}: {seconds[tier][-1]:.2f} s")
    print(f"disk / memory, best of each: {min(seconds['disk']) / min(seconds['memory']):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
