"""`headwater generate`: generate text with a trained model whose weights are streamed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from headwater.cli.arguments import read_folder
from headwater.cli.retrieved import (
    add_index_arguments,
    add_machine_options,
    check_index_arguments,
    headlines,
    machine_changes,
    read_template,
)
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.core.patience import print_notice
from headwater.data.codec import check_unicode
from headwater.evaluation.passes import check_ids
from headwater.generation.beams import BeamSearch
from headwater.generation.fill_mask import Filling
from headwater.generation.requests import GenerationRequest
from headwater.generation.sampling import Sampling
from headwater.retrieval.index import Hit
from headwater.retrieval.prompt import fitted
from headwater.trainer.inference import Inference, open_batcher, open_filler
from headwater.trainer.retrieval import open_retriever
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tokenizer import model_codec
from headwater.trainer.zoo_job import language_model, masked_model

NEW_TOKENS = 100
"""Most tokens to generate if the user sets no number and they fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater generate`."""
    parser.usage = "headwater generate [-h] --model_dir DIR --prompt TEXT [--option VALUE ...]"
    parser.description = (
        "Continue a text, or answer a message, with the newest checkpoint of a run. A BERT fills in the mask "
        "tokens of the text instead, and prints the --top_k most likely tokens (5)."
    )
    parser.add_argument(
        "--model_dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of the run, or of the transformers library",
    )
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
        metavar="N",
        help="largest number of tokens to generate; 0 prints the prompt (100, or as many as fit)",
    )
    _add_sampling(parser)
    add_index_arguments(parser)
    parser.add_argument("--checkpoint_path", type=Path, metavar="PATH", help="checkpoint to use (the newest)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json (the one in the folder of the run)"
    )
    parser.add_argument(
        "--end_of_text", metavar="TOKEN", help="end-of-text token (those in generation_config.json)"
    )
    add_machine_options(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose tokens, and the part of the text to print."""
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
    parser.add_argument(
        "--do_sample",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw tokens; otherwise always choose the most likely one",
    )
    parser.add_argument(
        "--no_repeat_ngram_size",
        type=int,
        default=0,
        metavar="N",
        help="never write a sequence of N tokens twice; 0: no limit (%(default)s)",
    )
    parser.add_argument(
        "--num_beams",
        type=int,
        default=1,
        metavar="N",
        help="search with N beams, which draws no tokens; 1: no beam search (%(default)s)",
    )
    parser.add_argument(
        "--early_stopping",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="end a beam search as soon as N texts have ended",
    )
    parser.add_argument(
        "--length_penalty",
        type=float,
        default=1.0,
        metavar="P",
        help="divide the score of a beam by its length to this power (%(default)s)",
    )
    parser.add_argument(
        "--return_full_text",
        action=argparse.BooleanOptionalAction,
        help="print the prompt before its continuation (default unless it is a message)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt with its continuation, or the answer to a message; return the exit code."""
    check_index_arguments(args)
    for option in ("prompt", "system"):
        check_unicode(getattr(args, option) or "", f"--{option}")
    config = read_folder(args.model_dir, args.overrides)
    print(continued(config, args) if masked_model(config) is None else filled(config, args))
    return 0


def filled(config: RunConfig, args: argparse.Namespace) -> str:
    """Return a line for each likely token at each masked place of the prompt: probability, token, whole text.

    Args:
        config: the run of a model that predicts masked tokens.
        args: the arguments that `add_arguments` adds.

    Raises:
        ConfigError: if an argument is out of range, or is for models that continue texts.
        CheckpointError: if the run has no checkpoint.
        DataError: if the tokenizer is missing, the prompt has no mask token, or it does not fit the model.
    """
    for option in ("chat", "system", "end_of_text", "index"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} has no effect on a {config.init.model.name}, which fills in mask tokens",
                where=f"--{option}",
                remedy="remove it",
            )
    inference = Inference(1, checkpoint=args.checkpoint_path)
    with open_filler(config, inference, args.tokenizer) as filler:
        places = filler.fill([filler.read(args.prompt)], 5 if args.top_k is None else args.top_k)[0]

    def line(each: Filling) -> str:
        return f"{each.score:.4f}  {each.token_str}  {each.sequence}"

    return "\n\n".join("\n".join(map(line, place)) for place in places)


def continued(config: RunConfig, args: argparse.Namespace) -> str:
    """Return the prompt with its continuation, or only the answer to a chat message.

    Args:
        config: the run.
        args: the arguments that `add_arguments` adds.

    Raises:
        ConfigError: if an argument is out of range, or the tokenizers library is not installed.
        CheckpointError: if the run has no checkpoint.
        DataError: if the tokenizer is missing, the prompt does not fit the model, or the index is unsuitable.
    """
    codec = model_codec(config, args.tokenizer, args.end_of_text)
    is_message = _is_message(RunDir(config.init.model_dir), args)

    def tokens_of(text: str) -> list[int]:
        return codec.answer_prompt(_messages(args, text)) if is_message else codec.encode(text)

    asked = prompt = tokens_of(args.prompt)
    check_ids([prompt], language_model(config).vocab_size)
    temperature = args.temperature if args.do_sample else 0.0
    sampling = Sampling(temperature, args.top_k, args.top_p, args.seed, args.no_repeat_ngram_size)
    is_full = not is_message if args.return_full_text is None else args.return_full_text
    beams = _beams(args)
    template = read_template(args)
    hits: Sequence[Hit] = _found(args)
    inference = Inference(1 if beams is None else beams.num_beams, checkpoint=args.checkpoint_path)
    with open_batcher(config, inference) as (_, batcher):
        most = args.max_new_tokens
        if hits:
            prompt, hits = _with_passages(
                hits,
                lambda some: tokens_of(template.prompt(some, args.prompt)),
                batcher.room.max_length + 1,
                most,
            )
            check_ids([prompt], language_model(config).vocab_size)
        if most is None:
            # If the model has no room for a further token, `add` raises an error that explains this.
            most = min(NEW_TOKENS, batcher.room.after(len(prompt)) or NEW_TOKENS)
        ends = frozenset(codec.ends)
        generation = batcher.add(GenerationRequest(tuple(prompt), most, sampling, ends, beams=beams))
        batcher.run()
    text = codec.decode([*asked, *generation.output] if is_full else generation.output)
    return "\n".join([text, "", "passages:", *headlines(hits)]) if hits else text


def _found(args: argparse.Namespace) -> Sequence[Hit]:
    """Return the passages that fit the prompt, the best one first; none without an index."""
    if args.index is None:
        return ()
    # The encoder is closed before the model is opened, so the two are not in memory together.
    changes = machine_changes(args.overrides)
    with open_retriever(args.index, encoder_dir=args.encoder_dir, changes=changes, batch_size=1) as retriever:
        return retriever.retrieve([args.prompt], args.passages)[0]


def _with_passages(
    hits: Sequence[Hit], tokens_of: Callable[[Sequence[Hit]], list[int]], room: int, new_tokens: int | None
) -> tuple[list[int], Sequence[Hit]]:
    """Return the tokens of the prompt with the passages that fit, and these passages; see `fitted`.

    Args:
        hits: the passages, the best one first.
        tokens_of: returns the tokens of a prompt with some of them.
        room: tokens for the prompt and the new tokens.
        new_tokens: tokens to generate; by default 100, or fewer if the best passage leaves less room.
    """
    if new_tokens is None:
        new_tokens = max(1, min(NEW_TOKENS, room - len(tokens_of(hits[:1]))))
    found = fitted(hits, tokens_of, room - new_tokens)
    if len(found.hits) < len(hits):
        print_notice(
            f"note: {len(found.hits)} of {len(hits)} passages fit into the context of the model together "
            "with the prompt and the new tokens; the others are left out"
        )
    return found.tokens, found.hits


def _beams(args: argparse.Namespace) -> BeamSearch | None:
    """Return the settings of the beam search, or `None` without one."""
    if args.num_beams == 1:
        return None
    return BeamSearch(args.num_beams, args.early_stopping, args.length_penalty, args.no_repeat_ngram_size)


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


def _messages(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """Return the system message, if there is one, and a text as a message of the user."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]
