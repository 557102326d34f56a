"""`headwater generate`: continue a text with a trained model, its weights streaming."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from headwater.cli.arguments import read_model_dir
from headwater.config import RunConfig
from headwater.core.errors import ConfigError, DataError
from headwater.models.generation import LanguageModel, generate
from headwater.trainer.engines import trained_model
from headwater.trainer.planning import Workload
from headwater.trainer.run_dir import RunDir
from headwater.trainer.zoo_job import language_model, zoo_trainable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `headwater generate`."""
    parser.description = "Continue a text with the newest checkpoint of a run."
    parser.add_argument("--model_dir", required=True, type=Path, metavar="DIR", help="folder of the run")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="how the text begins")
    parser.add_argument(
        "--max_new_tokens", type=int, default=100, metavar="N", help="tokens to add at most (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token (%(default)s)"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="sample among the K most likely tokens")
    parser.add_argument(
        "--top_p", type=float, metavar="P", help="sample among tokens that reach probability P"
    )
    parser.add_argument("--seed", type=int, default=0, help="another one gives another text (%(default)s)")
    parser.add_argument("--checkpoint_path", type=Path, metavar="PATH", help="use this checkpoint")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json (the one in the folder of the run)"
    )
    parser.add_argument("--end_of_text", metavar="TOKEN", help="token that ends a text (the tokenizer's own)")


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows it; returns the exit code."""
    print(continued(read_model_dir(args.model_dir), args))
    return 0


def continued(config: RunConfig, args: argparse.Namespace) -> str:
    """The prompt and what follows it.

    Args:
        config: the run.
        args: as `add_arguments` has them.

    Raises:
        ConfigError: if an argument is out of range, or there is no tokenizer.
        CheckpointError: if there is no checkpoint.
        DataError: if the prompt does not fit the model.
    """
    language_model(config)
    tokenizer, end = _load_tokenizer(
        args.tokenizer or RunDir(config.init.model_dir).tokenizer, args.end_of_text
    )
    prompt = torch.tensor([tokenizer.encode(args.prompt).ids], dtype=torch.int64)
    _check_vocabulary(prompt, config)
    trainable = zoo_trainable(config.init)
    with (
        trained_model(config.init, trainable, Workload(1), args.checkpoint_path) as engine,
        engine.inference(),
    ):
        tokens = generate(
            cast(LanguageModel, engine.model),
            prompt.to(engine.plan.device),
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            eos=end,
        )
    return str(tokenizer.decode(tokens[0].tolist()))


def _load_tokenizer(path: Path, end_of_text: str | None) -> tuple[Tokenizer, int]:
    try:
        from headwater.data.tokenizer import end_of_text_id, load_tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading text needs {error.name}", remedy="pip install 'headwater[data]'"
        ) from error
    tokenizer = load_tokenizer(path)
    return tokenizer, end_of_text_id(tokenizer, end_of_text)


def _check_vocabulary(prompt: torch.Tensor, config: RunConfig) -> None:
    size = language_model(config).vocab_size
    if prompt.numel() and int(prompt.max()) >= size:
        raise DataError(
            f"token id {int(prompt.max())} is beyond the vocabulary, vocab_size {size}",
            where="--tokenizer",
            remedy="name the tokenizer that the model was trained with",
        )
