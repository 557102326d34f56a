"""The two forms of a params file, and the translation of the older form into the newer one.

Older: sections `train_input`, `eval_input`, `model`, `optimizer` and `runconfig`.
Newer: one tree under `trainer`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from headwater.config.base import nearest
from headwater.config.document import Document, move, no_effect, put
from headwater.config.optimizers import ScheduleConfig
from headwater.config.origins import NOWHERE, KeyPath, Origins
from headwater.config.releases import update_release
from headwater.config.releases.models import nest_image_encoders
from headwater.config.releases.rules import Renamed
from headwater.core.errors import ConfigError

OLDER_SECTIONS = ("train_input", "eval_input", "model", "optimizer", "sparsity", "runconfig")

_INIT: KeyPath = ("trainer", "init")
_LOOP, _CHECKPOINT, _LOGGING, _PRECISION = ("loop",), ("checkpoint",), ("logging",), ("precision",)

RUNCONFIG_KEYS: dict[str, KeyPath] = {
    "model_dir": ("model_dir",),
    "seed": ("seed",),
    "target_device": ("backend", "backend_type"),
    "num_csx": ("backend", "cluster_config", "num_csx"),
    "compile_only": ("backend", "compile_only"),
    "validate_only": ("backend", "validate_only"),
    "compile_dir": ("backend", "compile_dir"),
    "skip_padding": ("backend", "skip_padding"),
    "max_steps": (*_LOOP, "max_steps"),
    "num_steps": (*_LOOP, "num_steps"),
    "num_epochs": (*_LOOP, "num_epochs"),
    "steps_per_epoch": (*_LOOP, "steps_per_epoch"),
    "eval_frequency": (*_LOOP, "eval_frequency"),
    "eval_steps": (*_LOOP, "eval_steps"),
    "save_initial_checkpoint": (*_CHECKPOINT, "save_initial_checkpoint"),
    "autoload_last_checkpoint": (*_CHECKPOINT, "autoload_last_checkpoint"),
    "disable_strict_checkpoint_loading": (*_CHECKPOINT, "disable_strict_checkpoint_loading"),
    "checkpoint_steps": (*_CHECKPOINT, "steps"),
    "max_checkpoints": (*_CHECKPOINT, "keep_n"),
    "log_steps": (*_LOGGING, "log_steps"),
    "logging": (*_LOGGING, "log_level"),
    "precision_opt_level": (*_PRECISION, "precision_opt_level"),
}
"""New path of each key of `runconfig`, below `trainer.init`."""

IGNORED_OF_SCHEDULES = {"alpha": "end_learning_rate sets the rate at the end of the schedule"}
_ELSEWHERE = ("checkpoint_path", "load_checkpoint_states", "op_profiler_config")
"""Keys of `runconfig` that are converted by code, because no single key of the newer form replaces them."""

OLDER_KEYS: dict[KeyPath, KeyPath] = {
    **{("trainer", "init", *path): ("runconfig", key) for key, path in RUNCONFIG_KEYS.items()},
    ("trainer", "fit", "ckpt_path"): ("runconfig", "checkpoint_path"),
    ("trainer", "fit", "train_dataloader", "batch_size"): ("train_input", "batch_size"),
    ("trainer", "fit", "train_dataloader", "data_dir"): ("train_input", "data_dir"),
    ("trainer", "init", "backend", "micro_batch_size"): ("train_input", "micro_batch_size"),
}
"""Path in the older form, by path in the newer form, without those of the optimizer and the model."""

MODEL_KEYS: dict[str, KeyPath] = {
    "mixed_precision": (*_PRECISION, "enabled"),
    "fp16_type": (*_PRECISION, "fp16_type"),
}
"""New paths, below `trainer.init`, of keys of `model` that the newer form has in other sections."""

OPTIMIZER_KEYS: dict[str, KeyPath] = {
    **{
        key: (*_PRECISION, key)
        for key in (
            "loss_scaling_factor", "initial_loss_scale", "steps_per_increase", "min_loss_scale",
            "max_loss_scale", "max_gradient_norm", "max_gradient_value",
        )
    },
    "log_summaries": (*_PRECISION, "log_loss_scale"),
    "grad_accum_steps": (*_LOOP, "grad_accum_steps"),
}  # fmt: skip
"""New paths, below `trainer.init`, of keys of `optimizer` that the newer form has in other sections."""

OPTIMIZER_NAMES = {"weight_decay_rate": "weight_decay", "lr": "learning_rate"}
BETAS = {"beta1": 0.9, "beta2": 0.999}
SCHEDULE_NAMES = {"steps": "total_iters", "decay_steps": "total_iters"}
SCHEDULES = {"cosine": "CosineDecay"}
"""Further names of schedules, in lower case."""
_KNOWN_SCHEDULES = {name.lower() for name in ScheduleConfig.attributes()}

MOVES: dict[KeyPath, KeyPath] = {
    (*_INIT, "backend", "num_csx"): (*_INIT, "backend", "cluster_config", "num_csx"),
    (*_INIT, "device"): (*_INIT, "backend", "backend_type"),
    (*_INIT, "model", "model_name"): (*_INIT, "model", "name"),
    (*_INIT, "model", "mixed_precision"): (*_INIT, *_PRECISION, "enabled"),
    (*_INIT, "model", "fp16_type"): (*_INIT, *_PRECISION, "fp16_type"),
}
"""Alternative paths of keys in the newer form, with the canonical paths."""


def canonical(document: Document) -> Document:
    """Return `document` in the newer form, with canonical keys.

    Raises:
        ConfigError: if it mixes the forms, or has an unknown section or an unknown key of the older form.
    """
    older = [key for key in document.tree if key in OLDER_SECTIONS]
    if older and "trainer" not in document.tree:
        document = update_release(document)
    if older and "trainer" in document.tree:
        raise ConfigError(
            f"the file mixes the older form ({', '.join(older)}) with the newer one (trainer)",
            where=str(document.origin((older[0],))),
            remedy="move all sections into trainer, or remove the section trainer",
        )
    for key in document.tree:
        if key != "trainer" and key not in OLDER_SECTIONS:
            _unknown(document, (), key, ("trainer", "extends", *OLDER_SECTIONS))
    if isinstance(document.tree.get("trainer"), list):
        raise ConfigError(
            "expected trainer to be a mapping, got a list of phases, which is not supported",
            where=str(document.origin(("trainer",))),
            remedy="write one file for each phase, and start it from the checkpoint of the previous phase",
        )
    if older:
        return _Translation(document, Document({"trainer": {"init": {}}}, notices=document.notices)).run()
    document = nest_image_encoders(document, (*_INIT, "model"))
    for second, first in MOVES.items():
        if isinstance(parent := document.get(second[:-1]), dict) and second[-1] in parent:
            document = Renamed(first).apply(document, second)
    return document


def _unknown(document: Document, path: KeyPath, key: str, valid: tuple[str, ...]) -> None:
    close = nearest(key, valid)
    raise ConfigError(
        f"unknown key {key!r}",
        where=str(document.origin((*path, key))),
        remedy=f"write {close!r}" if close else f"valid keys: {', '.join(sorted(valid))}",
    )


@dataclasses.dataclass
class _Translation:
    """A translation in progress: the document of the older form, and the part that is translated so far."""

    source: Document
    result: Document
    callbacks: dict[KeyPath, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def run(self) -> Document:
        sections = {
            "train_input": self._train_input,
            "eval_input": self._eval_input,
            "model": self._model,
            "optimizer": self._optimizer,
            "sparsity": self._sparsity,
            # Last: checkpoint_path goes to the sections that the inputs have made.
            "runconfig": self._runconfig,
        }
        for section, translate in sections.items():
            if section in self.source.tree:
                self._check_mapping((section,))
                translate()
        self._place_callbacks()
        self._full_precision_unless_mixed()
        return self.result

    def _full_precision_unless_mixed(self) -> None:
        """Disable mixed precision if `mixed_precision` is not set, as is the default of the older form."""
        precision = self.result.get((*_INIT, *_PRECISION))
        if isinstance(precision, dict) and "enabled" not in precision:
            origin = self.source.origin((next(iter(self.source.tree)),))
            self.result = put(self.result, (*_INIT, *_PRECISION, "enabled"), False, origin)

    def _check_mapping(self, path: KeyPath) -> None:
        value = self.source.get(path)
        if not isinstance(value, dict):
            raise ConfigError(
                f"expected a mapping of keys, found {value!r}",
                where=str(self.source.origin(path)),
                remedy=f"write keys under {path[-1]}",
            )

    def _place(self, old: KeyPath, new: KeyPath) -> None:
        """Copy the value at `old` to `new` below `trainer`, and record the lines in which it was written."""
        self.result = put(self.result, ("trainer", *new), self.source.get(old), self.source.origins.at(old))

    def _make(self, old: KeyPath, new: KeyPath, value: Any) -> None:
        """Put `value` at `new` below `trainer`, and record the line of the key `old` as its origin."""
        self.result = put(self.result, ("trainer", *new), value, self.source.origin(old))

    def _train_input(self) -> None:
        self._place(("train_input",), ("fit", "train_dataloader"))
        micro_batch = ("trainer", "fit", "train_dataloader", "micro_batch_size")
        self.result = move(self.result, micro_batch, (*_INIT, "backend", "micro_batch_size"))

    def _eval_input(self) -> None:
        self._place(("eval_input",), ("fit", "val_dataloader"))
        self._place(("eval_input",), ("validate", "val_dataloader"))
        self._place(("eval_input",), ("validate_all", "val_dataloaders"))

    def _model(self) -> None:
        self._place(("model",), ("init", "model"))
        for key, new in MODEL_KEYS.items():
            self.result = move(self.result, (*_INIT, "model", key), (*_INIT, *new))

    def _optimizer(self) -> None:
        keys = self.source.tree["optimizer"]
        if "optimizer_type" not in keys:
            raise ConfigError(
                "the key 'optimizer_type' is missing",
                where=str(self.source.origin(("optimizer",))),
                remedy="write for example optimizer_type: AdamW",
            )
        target = ("init", "optimizer", str(keys["optimizer_type"]))
        self._make(("optimizer", "optimizer_type"), target, {})
        for key in keys:
            if key in OPTIMIZER_KEYS:
                self._place(("optimizer", key), ("init", *OPTIMIZER_KEYS[key]))
            elif key == "learning_rate":
                self._schedules(keys[key])
            elif key not in ("optimizer_type", *BETAS):
                self._place(("optimizer", key), (*target, OPTIMIZER_NAMES.get(key, key)))
        if given := [key for key in BETAS if key in keys]:
            # Both defaults: the list needs two entries, and the file may set only one.
            self._make(("optimizer", given[0]), (*target, "betas"), list(BETAS.values()))
        for index, key in enumerate(BETAS):
            if key in keys:
                self._place(("optimizer", key), (*target, "betas", index))
        if keys.get("log_summaries") is True:
            self.callbacks["optimizer", "log_summaries"] = {"ComputeNorm": {}}
        if "adjust_learning_rate" in keys:
            # After the loop, because the key learning_rate may be the last one.
            self._scale_schedules()

    def _place_callbacks(self) -> None:
        """Add the callbacks that replace keys of the older form, in the order of these keys."""
        path: KeyPath = ("init", "callbacks")
        origins = Origins(
            inside={
                # The keys of the callback are written directly below the old key.
                index: Origins(self.source.origin(old), dict.fromkeys(callback, self.source.origins.at(old)))
                for index, (old, callback) in enumerate(self.callbacks.items())
            }
        )
        if self.callbacks:
            self.result = put(self.result, ("trainer", *path), list(self.callbacks.values()), origins)

    def _scale_schedules(self) -> None:
        """Wrap each schedule in a `ScalePerParamLR`, which the older form applies without naming it."""
        path: KeyPath = ("init", "schedulers")
        for index, schedule in enumerate(self.result.get(("trainer", *path)) or []):
            place: KeyPath = ("trainer", *path, index)
            origins = self.result.origins.at(place)
            # Emptied first, because `put` would keep the old name of the schedule beside the new one.
            self.result = put(self.result, place, {}, origins.here or NOWHERE)
            self.result = put(self.result, (*place, "ScalePerParamLR", "scheduler"), schedule, origins)

    def _sparsity(self) -> None:
        self._place(("sparsity",), ("init", "sparsity"))

    def _schedules(self, rate: Any) -> None:
        """Translate `learning_rate`: a number, a schedule, or a list of schedules that follow each other."""
        old: KeyPath = ("optimizer", "learning_rate")
        new: KeyPath = ("init", "schedulers")
        if not isinstance(rate, dict | list):
            self._make(old, new, [{"ConstantLR": {}}])
            self._place(old, (*new, 0, "ConstantLR", "learning_rate"))
            return
        entries = [(*old, index) for index in range(len(rate))] if isinstance(rate, list) else [old]
        empty: list[dict[str, Any]] = [{self._schedule_name(entry): {}} for entry in entries]
        if len(entries) == 1:
            self._make(old, new, empty)
        else:
            self._make(old, new, [{"SequentialLR": {"schedulers": empty}}])
            new = (*new, 0, "SequentialLR", "schedulers")
        for index, (entry, schedule) in enumerate(zip(entries, empty, strict=True)):
            target = (*new, index, next(iter(schedule)))
            self._make(entry, target, {})
            for key in self.source.get(entry):
                if key in IGNORED_OF_SCHEDULES:
                    why = no_effect(self.source.origin((*entry, key)), IGNORED_OF_SCHEDULES[key])
                    self.result = self.result.with_notice(why)
                elif key != "scheduler":
                    self._place((*entry, key), (*target, SCHEDULE_NAMES.get(key, key)))

    def _schedule_name(self, entry: KeyPath) -> str:
        keys = self.source.get(entry)
        if not isinstance(keys, dict) or "scheduler" not in keys:
            raise ConfigError(
                f"expected a schedule to be a mapping with the key scheduler, got {keys!r}",
                where=str(self.source.origin(entry)),
                remedy="write for example {scheduler: Linear, initial_learning_rate: 0.0, "
                "end_learning_rate: 0.001, total_iters: 100}",
            )
        written = str(keys["scheduler"])
        name = SCHEDULES.get(written.lower(), written)
        return f"{name}LR" if f"{name}LR".lower() in _KNOWN_SCHEDULES else name

    def _runconfig(self) -> None:
        for key in self.source.tree["runconfig"]:
            if key in RUNCONFIG_KEYS:
                self._place(("runconfig", key), ("init", *RUNCONFIG_KEYS[key]))
            elif key == "load_checkpoint_states":
                self._load_states()
            elif key == "op_profiler_config":
                old: KeyPath = ("runconfig", key)
                self.callbacks[old] = {"OpProfiler": self.source.get(old)}
            elif key == "checkpoint_path":
                for section in ("fit", "validate"):
                    if section in self.result.tree["trainer"]:
                        self._place(("runconfig", key), (section, "ckpt_path"))
            else:
                _unknown(self.source, ("runconfig",), key, (*RUNCONFIG_KEYS, *_ELSEWHERE))

    def _load_states(self) -> None:
        """Translate `load_checkpoint_states`: a list, or names separated by commas."""
        old: KeyPath = ("runconfig", "load_checkpoint_states")
        states = self.source.get(old)
        if isinstance(states, str):
            states = [name.strip() for name in states.split(",")]
        self.callbacks[old] = {"LoadCheckpointStates": {"load_checkpoint_states": states}}
