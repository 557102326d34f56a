"""Model names told by folders: in the public Model Zoo the folder of a params file names its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater.config.document import Document, put
from headwater.config.models import MODELS
from headwater.config.origins import KeyPath, Origin
from headwater.config.overrides import SOURCE

_FOLDERS: Mapping[str, str] = {name: name for name in MODELS if name != "hf"} | {"gpt_neox": "gpt-neox"}
"""Name of the model by the folder's name."""

_TASKS: Mapping[tuple[str, str], str] = {
    ("bert", "classifier"): "bert/classifier",
    ("bert", "extractive_summarization"): "bert/extractive_summarization",
    ("bert", "qa"): "bert/qa",
    ("bert", "token_classifier"): "bert/token_classifier",
    ("esm2", "classification"): "esm2/classifier",
}
"""Name of the model by its folder and by the folder of a task below it."""


def model_of_folders(path: Path) -> tuple[str, str] | None:
    """Return the model that the folders of the params file `path` name, and the folders that name it.

    Returns `None` where no folder names a model, or several folders name different ones.
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
    """Return the params `document` with the model's name.

    Args:
        document: params in either form.
        path: their file, whose folders may tell the name. A name in the file comes before that.
        given: the name from the command line, which comes before any other.
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
    told = model_of_folders(path)
    if told is None or "model_name" in model:
        return document
    name, folder = told
    notice = f"{path}: the model is taken to be {name}, after the folder {folder}; --model NAME sets another"
    return put(document, key, name, Origin(str(path.parent), key)).with_notice(notice)
