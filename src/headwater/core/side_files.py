"""Files beside the weights of a Hugging Face folder: tokenizer, chat template, generation settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headwater.core.errors import ConfigError
from headwater.core.files import disk_errors, replace_file, why_unreadable

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

SIDE_FILES = (
    TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    CHAT_TEMPLATE_FILE, GENERATION_FILE, "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Names of the files, as the transformers library writes them."""


def side_files(folder: Path) -> list[Path]:
    """Return the files of a folder that belong beside its weights."""
    return [path for path in (folder / name for name in SIDE_FILES) if path.is_file()]


def copy_side_files(source: Path, target: Path, *, but: Iterable[str] = ()) -> None:
    """Copy the side files of one folder to another.

    Args:
        source: the folder with the files.
        target: an existing folder.
        but: names of files that are not copied.

    Raises:
        StoreError: if a file cannot be read or written.
    """
    for path in side_files(source):
        copy = target / path.name
        if path.name not in but and path.resolve() != copy.resolve():
            copy_file(path, copy)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically: `target` is never incomplete, even if the process is killed.

    Raises:
        StoreError: if `source` cannot be read or `target` cannot be written.
    """
    with disk_errors(source):
        content = source.read_bytes()
    replace_file(target, content)


def end_tokens(folder: Path) -> list[int]:
    """Return the ids of the tokens that end a generated text, from `generation_config.json`.

    Raises:
        ConfigError: if the file is damaged.
    """
    found = _read(folder / GENERATION_FILE).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(
            f"expected eos_token_id to be a token id or a list of them, found {found!r}",
            where=str(folder / GENERATION_FILE),
            remedy="correct the file",
        )
    return ids


def special_token(folder: Path, name: str) -> str | None:
    """Return the text of a special token such as `eos_token`; `None` if the tokenizer's files do not name it.

    Raises:
        ConfigError: if the file is damaged.
    """
    found = _read(folder / _TOKENIZER_CONFIG_FILE).get(name)
    text = found.get("content") if isinstance(found, dict) else found
    return text if isinstance(text, str) else None


def keep_generation_tokens(config: dict[str, Any], folder: Path) -> None:
    """Write the special tokens of a `config.json` to `generation_config.json`, unless that file exists."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {key: config[key] for key in keys if config.get(key) is not None}
    path = folder / GENERATION_FILE
    if found and not path.exists():
        replace_file(path, f"{json.dumps(found, indent=2)}\n".encode())


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the file cannot be read: {why_unreadable(error)}", where=str(path), remedy="copy it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"expected a mapping, found {type(content).__name__}", where=str(path), remedy="copy it again"
        )
    return content
