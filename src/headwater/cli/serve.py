"""`headwater serve`: answer requests to language models over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headwater.cli.arguments import add_checkpoint_arguments, add_override_options, read_folder
from headwater.cli.files import read_text
from headwater.cli.retrieved import (
    MACHINE,
    OWN,
    add_index_arguments,
    check_index_arguments,
    machine_changes,
    read_template,
)
from headwater.config.run import RunConfig
from headwater.core.errors import ConfigError
from headwater.serving.filling import FillWorker, ServedFiller
from headwater.serving.passages import PassagePrompts
from headwater.serving.process import TOKEN, Address, listen, serve
from headwater.serving.service import Service
from headwater.serving.worker import Worker
from headwater.serving.writing import ServedModel
from headwater.trainer.checkpoint import CheckpointManager
from headwater.trainer.inference import PASS_TOKENS, Inference, open_batcher, open_filler
from headwater.trainer.retrieval import open_retriever
from headwater.trainer.tokenizer import model_codec
from headwater.trainer.zoo_job import masked_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headwater serve`."""
    parser.description = (
        "Answer requests in the JSON of OpenAI's API (/v1/completions, /v1/chat/completions) and of the "
        "Cerebras-GPT model card (/score). A small chat page is at /."
    )
    parser.usage = "headwater serve [-h] [NAME=]FOLDER ... [--option VALUE ...]"
    add_served_models(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: a free one (%(default)s)")
    parser.add_argument(
        "--token_file",
        type=Path,
        metavar="PATH",
        help=f"file with the token that requests must send (the variable {TOKEN}); needed unless --host is a "
        "loopback address",
    )
    parser.add_argument(
        "--drain_seconds",
        type=int,
        default=60,
        metavar="N",
        help="at SIGTERM, wait this long for requests that have begun (%(default)s)",
    )


def add_served_models(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name models and their memory."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]FOLDER",
        help="model_dir of a run, or a folder of the transformers library; the first is the default model",
    )
    parser.add_argument(
        "--model_dir", action="append", default=[], metavar="[NAME=]FOLDER", help="the same as [NAME=]FOLDER"
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--batch_size",
        type=int,
        default=8,
        metavar="N",
        help="texts of full length for which memory is reserved; shorter texts are computed together in a "
        "larger number, at most four times as many (%(default)s)",
    )
    parser.add_argument(
        "--pass_tokens",
        type=int,
        default=PASS_TOKENS,
        metavar="N",
        help="largest number of tokens that are read in one pass over the weights (%(default)s)",
    )
    parser.add_argument(
        "--max_sequence_length",
        type=int,
        metavar="N",
        help="largest number of tokens of a text (the model's positions)",
    )
    add_index_arguments(parser)
    add_override_options(parser, MACHINE, without=OWN)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT arrives; return the exit code."""
    check_packages()
    if args.drain_seconds < 0:
        raise ConfigError(
            f"expected at least 0, got {args.drain_seconds}", where="--drain_seconds", remedy="use 0 or more"
        )
    address = Address(args.host, args.port, *_token(args.token_file))
    with listen(address) as listener:
        host = f"[{address.host}]" if ":" in address.host else address.host
        place = f"http://{host}:{listener.getsockname()[1]}"
        with open_service(args) as service:
            print(f"serving {', '.join(service.models)} at {place}", flush=True)
            serve(service, listener, address.token, args.drain_seconds)
    print("the server has stopped", flush=True)
    return 0


def check_packages() -> None:
    """Check that the packages of the extra `serve` are installed.

    Raises:
        ConfigError: if one is missing.
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"serving needs the package {package}, which is not installed",
                remedy="pip install 'headwater[serve]'",
            )


@contextmanager
def open_service(args: argparse.Namespace) -> Iterator[Service]:
    """Open the models that the arguments name."""
    named = models_by_name([*args.models, *args.model_dir])
    if len(named) > 1 and (args.checkpoint_path or args.tokenizer or args.eos_id is not None):
        raise ConfigError(
            f"expected one model with --checkpoint_path, --tokenizer or --eos_id, got {len(named)} models",
            where="headwater serve",
            remedy="leave these options out, or serve one model",
        )
    for option in ("batch_size", "pass_tokens"):
        if getattr(args, option) < 1:
            found = getattr(args, option)
            raise ConfigError(
                f"expected at least 1, got {found}", where=f"--{option}", remedy="use 1 or more"
            )
    check_index_arguments(args)
    inference = Inference(args.batch_size, args.max_sequence_length, args.checkpoint_path)
    configs = {name: read_folder(folder, args.overrides) for name, folder in named.items()}
    _check_index_is_used(args, configs.values())
    with ExitStack() as opened:
        passages = opened.enter_context(_open_passages(args))
        models: dict[str, ServedModel | ServedFiller] = {}
        for name, config in configs.items():
            checkpoint = args.checkpoint_path or CheckpointManager(config.init.model_dir).newest_whole()
            source = f"{named[name].resolve()}, checkpoint {checkpoint and checkpoint.resolve()}"
            if masked_model(config) is not None:
                filler = opened.enter_context(open_filler(config, inference, args.tokenizer))
                filling = FillWorker(filler, f"headwater-serve-{name}")
                opened.callback(filling.close)
                models[name] = ServedFiller(name, filling, int(time.time()), source)
                continue
            codec = model_codec(config, args.tokenizer, args.eos_id)
            model, batcher = opened.enter_context(open_batcher(config, inference, args.pass_tokens))
            worker = Worker(batcher, f"headwater-serve-{name}")
            # The worker is closed before the engine, because its thread uses the engine.
            opened.callback(worker.close)
            if passages is not None:
                source = f"{source}, {passages.source}"
            models[name] = ServedModel(
                name, codec, model.vocab_size, worker, int(time.time()), source, passages
            )
        service = Service(models)
        opened.callback(service.close)
        yield service


def _check_index_is_used(args: argparse.Namespace, configs: Iterable[RunConfig]) -> None:
    """Check that a model uses the index, before the encoder of questions is opened.

    Raises:
        ConfigError: if there is an index, and all models fill in mask tokens.
    """
    if args.index is not None and all(masked_model(config) is not None for config in configs):
        raise ConfigError(
            "--index has no effect, because no served model writes texts",
            where="--index",
            remedy="remove it, or serve a model that writes texts",
        )


@contextmanager
def _open_passages(args: argparse.Namespace) -> Iterator[PassagePrompts | None]:
    """Open the index that the arguments name, if they do."""
    if args.index is None:
        yield None
        return
    template = read_template(args)
    changes = machine_changes(args.overrides)
    with open_retriever(args.index, encoder_dir=args.encoder_dir, changes=changes) as retriever:
        yield PassagePrompts(retriever, template, args.passages)


def models_by_name(words: list[str]) -> dict[str, Path]:
    """Return the folders of models by name. A word without `NAME=` has the name of its folder.

    Raises:
        ConfigError: if no model is named, or two have the same name.
    """
    if not words:
        raise ConfigError(
            "expected a model to serve, found none",
            where="headwater serve",
            remedy="name the model_dir of a run",
        )
    found: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        folder = Path(path).expanduser()
        name = name if equals else folder.resolve().name
        if not name or name in found:
            raise ConfigError(
                f"expected a different name for each model, got {name!r} for {folder}",
                where="headwater serve",
                remedy="write NAME=FOLDER",
            )
        if not name.isprintable():  # for example a byte that is not UTF-8, which no answer could contain
            raise ConfigError(
                f"expected a model name of printable characters, got {name!a}",
                where="headwater serve",
                remedy="write NAME=FOLDER",
            )
        found[name] = folder
    return found


def _token(path: Path | None) -> tuple[str | None, str]:
    """Return the token, or `None`, and the option or variable that it comes from."""
    if path is None:
        # An empty variable is returned too: the user wanted a token, so the server must not run without one.
        return os.environ.get(TOKEN), TOKEN
    return read_text(path, "the token", remedy="write a token into this file").strip(), "--token_file"
