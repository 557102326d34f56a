"""Model names from folder names: the Cerebras Model Zoo has its params files in a folder for each model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.config.document import Document, put
from headwater.config.models import MODELS
from headwater.config.origins import KeyPath, Origin
from headwater.config.overrides import SOURCE

_FOLDERS: Mapping[str, str] = {name: name for name in MODELS if name != "hf"} | {"gpt_neox": "gpt-neox"}
"""Name of the model, by name of the folder."""

_TASKS: Mapping[tuple[str, str], str] = {
    ("bert", "classifier"): "bert/classifier",
    ("bert", "extractive_summarization"): "bert/extractive_summarization",
    ("bert", "qa"): "bert/qa",
    ("bert", "token_classifier"): "bert/token_classifier",
    ("esm2", "classification"): "esm2/classifier",
}
"""Name of the model, by names of its folder and of the task's folder in it."""


def model_of_folders(path: Path) -> tuple[str, str] | None:
    """Return the model that the folders of a params file name, and a text with these folders.

    Return `None` if no folder names a model, or several folders name different models.
    """
    folders = path.absolute().parts[:-1]
    named = {folder for folder in folders if folder in _FOLDERS}
    if len(named) != 1:
        return None
    folder = named.pop()
    tasks = [task for task in folders[folders.index(folder) + 1 :] if (folder, task) in _TASKS]
    if tasks:
        return _TASKS[folder, tasks[-1]], f"{folder}/…/{tasks[-1]}"
    return _FOLDERS[folder], folder


def name_model(document: Document, path: Path, given: Any = None) -> Document:
    """Return the params with the name of the model added, if it can be determined.

    The name is taken from the command line, the file, or the folders of the file, in this order.

    Args:
        document: params in either form.
        path: file of the params.
        given: name on the command line, if there is one.
    """
    section: KeyPath = ("trainer", "init", "model") if "trainer" in document.tree else ("model",)
    key, model = (*section, "name"), document.get(section)
    if not isinstance(model, dict):
        return document
    if given is not None:
        return put(document, key, given, Origin(SOURCE, ("model",)))
    if "name" in model or "hf" in model:
        return document
    if "dpo" in model:
        return put(document, key, "dpo", document.origin((*section, "dpo")))
    found = model_of_folders(path)
    if found is None or "model_name" in model:
        return document
    name, folder = found
    notice = f"{path}: the model is assumed to be {name}, from the folder {folder}; --model NAME sets another"
    return put(document, key, name, Origin(str(path.parent), key)).with_notice(notice)
