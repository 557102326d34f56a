"""Params files of a family: models of several sizes, trained by the same recipe."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from headwater.config.files import find_params, shipped_params
from headwater.config.models.decoder import DecoderConfig
from headwater.config.run import RunConfig, load_params
from headwater.core.cleanup import on_failure
from headwater.core.errors import ConfigError
from headwater.core.files import check_place, disk_errors, make_folder, replace_file
from headwater.scaling.compute import training_flops
from headwater.scaling.sizes import decoder_of, size_of
from headwater.trainer.zoo_job import count_parameters, fit_section

Parametrization = Literal["mup", "standard"]

_RATE_EXPONENT = -0.125
_WARMUP_SHARE = 0.1
_FINAL_RATE = 0.1
_CHECKPOINTS = 4
"""Checkpoints of a run, so that a killed run loses at most a quarter of its steps."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The settings of a family.

    Attributes:
        base: params file, or the name of a shipped one. It sets everything that the sizes have in common:
            data, batch, optimizer, precision, vocabulary. Its learning rate fits the width in it.
        widths: `hidden_size` of each size, multiples of the base's head size.
        depths: `num_hidden_layers` of each size, or a single number for all.
        tokens_per_parameter: tokens of a run for each of its parameters.
        parametrization: how the learning rate of the base is transferred; see `transferred_rate`.
        learning_rate: highest learning rate of the base's model, instead of that in its file.
    """

    base: str
    widths: Sequence[int]
    depths: Sequence[int]
    tokens_per_parameter: float
    parametrization: Parametrization = "mup"
    learning_rate: float | None = None


def write_family(family: Family, folder: Path) -> list[Path]:
    """Write a params file for each size and return their paths. Runs work in folders beside the files.

    Raises:
        ConfigError: if the settings do not fit together, the base has no data for the evaluation at the end
            of a run, or the folder has params files already.
        RunError: if something else lies at the path of the folder, or this user may not write there.
        StoreError: if the system refuses to write.
    """
    if any(folder.glob("*.yaml")):
        raise ConfigError(
            "expected a new folder, found params files in it",
            where=str(folder),
            remedy="name another folder, or remove this one",
        )
    base = load_params(find_params(family.base))
    training_flops(decoder_of(base), 1, 1)  # refuses models without a formula before anything is written
    _check_evaluation(base)
    trees = {
        f"w{width}_d{depth}": _params(family, base, width, depth, folder) for width, depth in _shapes(family)
    }
    check_place(folder, expected="a folder")
    with disk_errors(folder):
        make_folder(folder)
    files = [folder / f"{name}.yaml" for name in trees]
    # Files of a family that is not valid are removed, because the corrected command needs a new folder.
    with on_failure(lambda: _remove(files)):
        for file, tree in zip(files, trees.values(), strict=True):
            text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
            header = f"# A size of a family: {family.parametrization} parametrization, "
            header += f"{family.tokens_per_parameter:g} tokens per parameter.\n"
            replace_file(file, f"{header}{text}".encode())
            load_params(file)
    return files


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def transferred_rate(family: Family, base: DecoderConfig, model: DecoderConfig, rate: float) -> float:
    """Return the highest learning rate of a size, from that of the base.

    With maximal update parametrization the rate is the same for every width, because the model divides the
    rates of its matrices by their growth (Yang et al., arXiv:2203.03466, table 8). Depth is not part of muP.
    With standard parametrization the rate falls as compute^-0.125 (DeepSeek LLM, arXiv:2401.02954, equation
    1), where the base is trained with as many tokens per parameter as the sizes.

    Args:
        family: the settings.
        base: the model of the base.
        model: the model of the size.
        rate: the highest learning rate of the base.
    """
    if family.parametrization == "mup":
        return rate
    ours, theirs = _compute(family, model), _compute(family, base)
    return rate * float((ours / theirs) ** _RATE_EXPONENT)


def _check_evaluation(base: RunConfig) -> None:
    """Raise if runs of the base cannot evaluate their last step, from which the law gets their losses."""
    if not fit_section(base).val_dataloader:
        raise ConfigError(
            "expected data for an evaluation at the end of each run, found no val_dataloader",
            where=f"{base.source}: trainer.fit",
            remedy="add fit.val_dataloader: data_dir and batch_size of samples that are not trained on",
        )


def _shapes(family: Family) -> list[tuple[int, int]]:
    depths = list(family.depths) * (len(family.widths) if len(family.depths) == 1 else 1)
    if len(depths) != len(family.widths):
        raise ConfigError(
            f"expected one depth for each of {len(family.widths)} widths, or one for all, got {len(depths)}",
            where="--depths",
            remedy="write as many depths as widths",
        )
    shapes = sorted(zip(family.widths, depths, strict=True))
    for first, second in itertools.pairwise(shapes):
        if first == second:
            raise ConfigError(
                f"expected different sizes, got width {first[0]} with depth {first[1]} twice",
                where="--widths",
                remedy="remove one of them",
            )
    rate = family.learning_rate
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(
            f"expected a positive, finite learning rate, got {rate:g}",
            where="--learning_rate",
            remedy="write the highest rate for the base's own size, or leave it out to use that of its file",
        )
    has_tokens = 0 < family.tokens_per_parameter < math.inf
    if not shapes or min(min(shape) for shape in shapes) < 1 or not has_tokens:
        raise ConfigError(
            "expected positive, finite widths, depths and tokens per parameter",
            where="command line",
            remedy="write positive numbers",
        )
    return shapes


def _params(family: Family, base: RunConfig, width: int, depth: int, folder: Path) -> dict[str, Any]:
    """Return the params of a size as plain values."""
    small = decoder_of(base)
    changes = _model_changes(family, small, width, depth)
    model = DecoderConfig.model_validate({**small.model_dump(exclude_unset=True), **changes})
    batch_size = fit_section(base).train_dataloader.batch_size
    batch_tokens = batch_size * model.max_position_embeddings
    steps = math.ceil(family.tokens_per_parameter * count_parameters(model) / batch_tokens)
    rate = size_of(base).learning_rate if family.learning_rate is None else family.learning_rate
    peak = transferred_rate(family, small, model, rate)
    warmup = max(1, round(_WARMUP_SHARE * steps))
    rise = {"initial_learning_rate": 0.0, "end_learning_rate": peak, "total_iters": warmup}
    fall = {
        "initial_learning_rate": peak,
        "end_learning_rate": _FINAL_RATE * peak,
        "total_iters": max(1, steps - warmup),
    }
    schedulers = [{"LinearLR": rise}, {"CosineDecayLR": fall}]
    shipped = family.base.removesuffix(".yaml") in shipped_params() and not Path(family.base).is_file()
    return {
        "extends": family.base if shipped else str(base.source.absolute()),
        "trainer": {
            "init": {
                "model_dir": str((folder / f"w{width}_d{depth}").absolute()),
                "model": changes,
                "schedulers": [{"SequentialLR": {"schedulers": schedulers}}],
                "loop": {"max_steps": steps, "num_epochs": None, "num_steps": None, "eval_frequency": 1.0},
                "checkpoint": {"steps": math.ceil(steps / _CHECKPOINTS), "keep_n": 1},
            }
        },
    }


def _model_changes(family: Family, base: DecoderConfig, width: int, depth: int) -> dict[str, Any]:
    """Return the keys of the model in which a size differs from the base."""
    if base.attention_inner_dim is not None or width % base.head_size:
        raise ConfigError(
            f"expected widths that are multiples of the base's head size {base.head_size}, and no "
            f"attention_inner_dim in the base; got width {width}",
            where="--widths",
            remedy="write such widths, or a base with another number of heads",
        )
    changes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_heads": width // base.head_size,
        "filter_size": base.ffn_size * width // base.hidden_size,
    }
    if base.mup_base_hidden_size is not None:
        return changes
    # An initializer of output layers has the factor for the base's depth, which the sizes do not share.
    changes["output_layer_initializer"] = None
    if family.parametrization == "mup":
        changes |= {
            "mup_base_hidden_size": base.hidden_size,
            "mup_base_filter_size": base.ffn_size,
            "scale_qk_dot_by_d": True,
            # Both factors together are those of the base, so a size of the base's width equals the base.
            "attention_logits_alpha": base.attention_logits_alpha * math.sqrt(base.head_size),
        }
    return changes


def _compute(family: Family, model: DecoderConfig) -> float:
    tokens = round(family.tokens_per_parameter * count_parameters(model))
    return training_flops(model, model.max_position_embeddings, tokens)
