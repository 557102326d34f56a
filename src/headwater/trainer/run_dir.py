"""The files of a run, all below its model_dir."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from headwater.config.models.huggingface import CONFIG_FILE, HuggingFaceConfig
from headwater.core.errors import ConfigError
from headwater.core.files import check_replaceable, kind_of, replace_file, unencodable, why_unreadable
from headwater.core.side_files import SIDE_FILES, copy_file, copy_side_files
from headwater.plan.report import render_plan
from headwater.plan.types import Plan

if TYPE_CHECKING:
    from headwater.config.run import RunConfig
    from headwater.config.user import UserConfig

FACTS_FILE = "run.json"
"""The name of the file with the last step of a run and its planned memory; see `RunFacts`."""

STATISTICS_FILE = "statistics.json"
"""The name of the file that `headwater data` writes last into a folder of prepared data."""


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """Facts of training data that `headwater data` has prepared, from their statistics file.

    Attributes:
        mode: the kind of samples.
        end_of_text_id: id of the token that ends each text.
    """

    mode: str
    end_of_text_id: int


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of the files of a run. Checkpoints are found by `CheckpointManager`.

    Attributes:
        path: the model_dir.
    """

    path: Path

    @property
    def params(self) -> Path:
        """The params as resolved. This file alone suffices to resume the run and to use its model."""
        return self.path / "params.yaml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.txt"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def loss_curve(self) -> Path:
        return self.path / "loss_curve.png"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's events of training. Those of evaluations are in the folder `eval` beside it."""
        return self.path / "train"

    @property
    def profile(self) -> Path:
        """The folder of the profile of some steps."""
        return self.path / "profile"

    @property
    def performance(self) -> Path:
        """The mean speed of the last process, if the callback SavePerformanceData requests it."""
        return self.path / "performance.json"

    @property
    def model_config(self) -> Path:
        """The `config.json` of a model of the transformers library. Other runs do not have the file."""
        return self.path / CONFIG_FILE

    @property
    def statistics(self) -> Path:
        """The file with the statistics of the training data."""
        return self.path / "data_statistics.json"

    def check(self) -> None:
        """Raise if files of the run cannot be written. Called before the run does anything.

        Raises:
            ConfigError: if the path is not text in UTF-8, which TensorBoard's writer needs.
            RunError: if a folder has the name of a file.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise unencodable(error) from error
        # All files are checked now: a run of days must not fail when it writes its last file.
        for path in (
            self.params,
            self.plan,
            self.history,
            self.path / FACTS_FILE,
            self.loss_curve,
            self.statistics,
            self.model_config,
        ):
            check_replaceable(path)
        for name in SIDE_FILES:
            check_replaceable(self.path / name)

    def write_params(self, config: RunConfig) -> None:
        """Write the params as resolved, without `ckpt_path`: a resumed run uses its own checkpoints."""
        tree = resolved_params(config)
        tree["trainer"].get("fit", {}).pop("ckpt_path", None)
        _write_params(self.params, tree)

    def write_user_params(self, config: UserConfig) -> None:
        """Write the params of a run of the user's own model, in the older form, as `write_params` does."""
        keys = {key: value for key, value in config.params["runconfig"].items() if key != "checkpoint_path"}
        keys["model_dir"] = str(config.init.model_dir.absolute())
        _write_params(self.params, {**config.params, "runconfig": keys})

    def write_plan(self, plan: Plan) -> None:
        """Write the plan as `headwater plan` prints it."""
        text = io.StringIO()
        # A file has no width. With few columns the tables would break names into several lines.
        Console(file=text, width=120).print(render_plan(plan))
        replace_file(self.plan, text.getvalue().encode())

    def keep_files_of(self, folder: Path) -> None:
        """Copy the tokenizer's files and other side files, so that `folder` is not needed later."""
        copy_side_files(folder, self.path)

    def keep_data_files(self, folder: Path) -> None:
        """Copy the tokenizer's files and the statistics of prepared data."""
        self.keep_files_of(folder)
        source = folder / STATISTICS_FILE
        if source.is_file():
            copy_file(source, self.statistics)

    def prepared_data(self) -> PreparedData | None:
        """Return facts of the training data; `None` if `headwater data` did not prepare them.

        Raises:
            ConfigError: if the file is damaged.
        """
        if not self.statistics.is_file():
            return None
        try:
            found = json.loads(self.statistics.read_text(encoding="utf-8"))
            return PreparedData(str(found["mode"]), int(found["end_of_text_id"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"the statistics of the training data cannot be read: {why_unreadable(error)}",
                where=str(self.statistics),
                remedy="copy statistics.json of the prepared data to this name",
            ) from error

    def keep_library_model(self, model: HuggingFaceConfig) -> HuggingFaceConfig:
        """Copy the `config.json` and the side files of a model of the transformers library.

        Returns:
            A model section that names the copies.
        """
        source = model.hf / CONFIG_FILE
        # A run that continues uses its copy of the model. Such a copy must not be copied onto itself.
        if source.resolve() != self.model_config.resolve():
            copy_file(source, self.model_config)
            self.keep_files_of(model.hf)
        return model.model_copy(update={"hf": self.path})

    def require_params(self) -> Path:
        """Return the params file.

        Raises:
            ConfigError: if there is no such file, since the folder is not that of a run.
        """
        if not self.params.is_file():
            found = kind_of(self.path)
            if found == "a folder":
                what = "the folder is not the model_dir of a run: it has no params.yaml"
            else:
                what = f"expected the model_dir of a run, found {found or 'no folder'}"
            raise ConfigError(
                what,
                where=str(self.path),
                remedy="name the folder that headwater fit wrote",
            )
        return self.params


def _write_params(path: Path, tree: dict[str, Any]) -> None:
    replace_file(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode())


def resolved_params(config: RunConfig) -> dict[str, Any]:
    """Return all params that were set in files and on the command line, as plain values.

    Paths are absolute, so that the result can be read in any working directory.
    """
    plain: dict[str, Any] = _plain(given_params(config))
    return plain


def given_params(config: RunConfig) -> dict[str, Any]:
    """Return all params that were set in files and on the command line, as one tree in the newer form."""
    sections = {
        "init": config.init,
        "fit": config.fit,
        "validate": config.validation,
        "validate_all": config.validate_all,
    }
    return {
        "trainer": {
            key: section.model_dump(by_alias=True, exclude_unset=True)
            for key, section in sections.items()
            if section is not None
        }
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value.absolute()) if isinstance(value, Path) else value
