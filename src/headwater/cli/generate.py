"""`headwater generate`: generate text with a trained model whose weights are streamed."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from headwater.cli.arguments import read_model_dir
from headwater.config.models.preference import DPOConfig
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError, DataError
from headwater.core.side_files import end_tokens, special_token
from headwater.models.generation import LanguageModel, generate
from headwater.trainer.engines import trained_model
from headwater.trainer.planning import Workload
from headwater.trainer.run_dir import RunDir
from headwater.trainer.zoo_job import language_model, policy_names, zoo_trainable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater generate`."""
    parser.description = "Continue a text, or answer a message, with the newest checkpoint of a run."
    parser.add_argument("--model_dir", required=True, type=Path, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="beginning of the text, or the message"
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="answer PROMPT as a chat message (default if the model was trained on conversations)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before PROMPT; needs --chat")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=100,
        metavar="N",
        help="largest number of tokens to generate (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 always chooses the most likely token (%(default)s)",
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument(
        "--top_p",
        type=float,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (%(default)s)")
    parser.add_argument("--checkpoint_path", type=Path, metavar="PATH", help="checkpoint to use (the newest)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json (the one in the folder of the run)"
    )
    parser.add_argument(
        "--end_of_text", metavar="TOKEN", help="end-of-text token (those in generation_config.json)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt with its continuation, or the answer to a message; return the exit code."""
    print(continued(read_model_dir(args.model_dir), args))
    return 0


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt as token ids, with what is needed to decode the model's output.

    Attributes:
        tokenizer: the run's tokenizer.
        tokens: token ids of the prompt.
        ends: ids of the tokens that end the text.
        is_message: true if the prompt is a chat message; then only the answer is printed.
    """

    tokenizer: Tokenizer
    tokens: list[int]
    ends: list[int]
    is_message: bool

    def text(self, tokens: list[int]) -> str:
        """Return the text to print for the tokens of the prompt followed by the generated ones."""
        return str(self.tokenizer.decode(tokens[len(self.tokens) :] if self.is_message else tokens))


def continued(config: RunConfig, args: argparse.Namespace) -> str:
    """Return the prompt with its continuation, or only the answer to a chat message.

    Args:
        config: the run.
        args: the arguments that `add_arguments` adds.

    Raises:
        ConfigError: if an argument is out of range, or the tokenizers library is not installed.
        CheckpointError: if the run has no checkpoint.
        DataError: if the tokenizer is missing, or the prompt does not fit the model.
    """
    model = language_model(config)
    prompt = _read_prompt(RunDir(config.init.model_dir), args)
    input_ids = torch.tensor([prompt.tokens], dtype=torch.int64)
    _check_vocabulary(input_ids, model.vocab_size)
    is_tuned = isinstance(config.init.model, DPOConfig)
    init = config.init.model_copy(update={"model": model})
    with (
        trained_model(
            init,
            zoo_trainable(init),
            Workload(1),
            args.checkpoint_path,
            names=policy_names if is_tuned else None,
        ) as engine,
        engine.inference(),
    ):
        tokens = generate(
            cast(LanguageModel, engine.model),
            input_ids.to(engine.plan.device),
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            eos=prompt.ends,
        )
    return prompt.text(tokens[0].tolist())


def _read_prompt(run_dir: RunDir, args: argparse.Namespace) -> _Prompt:
    """Encode the prompt in the format of the training data."""
    try:
        from headwater.data.tokenizer import end_of_text_id, load_tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading text needs {error.name}", remedy="run: pip install 'headwater[data]'"
        ) from error
    path = args.tokenizer or run_dir.tokenizer
    tokenizer = load_tokenizer(path)
    folder = path if path.is_dir() else path.parent
    ends = [] if args.end_of_text else _known_ends(tokenizer, run_dir, folder)
    ends = ends or [end_of_text_id(tokenizer, args.end_of_text)]
    is_message = _is_message(run_dir, args)
    text = _message_text(tokenizer, folder, ends[0], args) if is_message else args.prompt
    # A chat template writes the special tokens itself.
    tokens = tokenizer.encode(text, add_special_tokens=not is_message).ids
    return _Prompt(tokenizer, tokens, ends, is_message)


def _known_ends(tokenizer: Tokenizer, run_dir: RunDir, folder: Path) -> list[int]:
    """Return the ids that end a text, from `generation_config.json`, the tokenizer and the training data."""
    ends = end_tokens(folder)
    token = special_token(folder, "eos_token")
    number = None if token is None else tokenizer.token_to_id(token)
    prepared = run_dir.prepared_data()
    others = (number, None if prepared is None else prepared.end_of_text_id)
    return list(dict.fromkeys([*ends, *(other for other in others if other is not None)]))


def _is_message(run_dir: RunDir, args: argparse.Namespace) -> bool:
    """True if the prompt is a message: by the option, or because the run was trained on conversations."""
    prepared = run_dir.prepared_data()
    chosen = args.chat
    if chosen is None:
        chosen = args.system is not None or (prepared is not None and prepared.mode == "chat")
    if args.system is not None and not chosen:
        raise ConfigError(
            "--system cannot be used with --no-chat", where="--system", remedy="remove one of them"
        )
    return bool(chosen)


def _message_text(tokenizer: Tokenizer, folder: Path, end: int, args: argparse.Namespace) -> str:
    """Return the message rendered with the chat template, up to the beginning of the answer.

    Args:
        tokenizer: the run's tokenizer.
        folder: folder with the chat template and the special tokens.
        end: id of the end-of-text token.
        args: the command-line arguments.
    """
    from headwater.data.modes.chat import PLAIN_TEMPLATE, find_template, render, template_tokens

    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    named = {key: special_token(folder, key) for key in ("bos_token", "eos_token")}
    return render(
        find_template(folder) or PLAIN_TEMPLATE,
        [*system, {"role": "user", "content": args.prompt}],
        prompt=True,
        **template_tokens(tokenizer, end) | {key: token for key, token in named.items() if token is not None},
    )


def _check_vocabulary(prompt: torch.Tensor, size: int) -> None:
    if prompt.numel() and int(prompt.max()) >= size:
        raise DataError(
            f"expected token ids < vocab_size {size}, got {int(prompt.max())}",
            where="--tokenizer",
            remedy="name the tokenizer with which the model was trained",
        )
