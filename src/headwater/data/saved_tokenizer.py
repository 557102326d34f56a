"""Tokenizer of prepared data: it is loaded or trained, checked for the mode, and saved beside the samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.core.side_files import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, copy_side_files
from headwater.data.modes import Mode
from headwater.data.modes.chat import PLAIN_TEMPLATE
from headwater.data.settings import PrepareSettings
from headwater.data.staging import complete_file
from headwater.data.tokenizer import load_tokenizer


def save_tokenizer(folder: Path, settings: PrepareSettings, mode: Mode, texts: Iterator[str]) -> Tokenizer:
    """Return the tokenizer with the tokens that the mode needs, and save it with its side files.

    A tokenizer that a killed preparation saved in `folder` is loaded from there.

    Args:
        folder: folder of the prepared data.
        settings: settings of the preparation.
        mode: the mode of these settings.
        texts: all texts of the inputs; read only to train a tokenizer.

    Raises:
        DataError: if the tokenizer cannot be read, or lacks a token that the mode needs.
    """
    path = folder / TOKENIZER_FILE
    if path.exists():
        return load_tokenizer(path)
    source = settings.tokenizer
    tokenizer = load_tokenizer(source) if isinstance(source, Path) else source.train(texts)
    missing = [token for token in mode.needed_tokens if tokenizer.token_to_id(token) is None]
    if missing:
        raise DataError(
            f"mode {settings.mode} needs the tokens {', '.join(missing)}, which the tokenizer lacks",
            where=str(source) if isinstance(source, Path) else "--vocab_size",
            remedy="pass the tokenizer of the model that you train (--tokenizer); for BERT its vocab.txt",
        )
    added = mode.added_tokens
    # Some tokenizers spell such a token without bars, for example <fim_prefix>.
    if added and all(tokenizer.token_to_id(token.replace("|", "")) is None for token in added):
        tokenizer.add_special_tokens([t for t in added if tokenizer.token_to_id(t) is None])
    if isinstance(source, Path):
        copy_side_files(source if source.is_dir() else source.parent, folder, but=(TOKENIZER_FILE,))
    # The template is written after the side files, because these may include another template.
    template = settings.options.chat_template or (PLAIN_TEMPLATE if settings.mode == "chat" else None)
    if template is not None:
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    # The tokenizer is saved last: a preparation that finds it skips all of the above.
    with complete_file(path) as partial:
        tokenizer.save(str(partial))
    return tokenizer
