"""Random inputs that fit a model's forward, guessed from signature and configuration, best guess first."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.transformers_walk.shrink import VOCABULARY

Draw = Callable[[torch.Generator], Any]
"""A function that draws the value of one input from a generator."""

BATCH = 2
TEXT = 12
TARGET = 6
FRAMES = 4

_ONE_LABEL = ("SequenceClassification", "ImageClassification", "VideoClassification", "MultipleChoice",
              "AudioClassification", "NextSentencePrediction", "XVector")  # fmt: skip
_FEW_CLASSES = ("TokenClassification", "SemanticSegmentation")


def floats(*shape: int) -> Draw:
    """Return a function that draws standard normal numbers."""
    return lambda generator: torch.randn(*shape, generator=generator)


def integers(low: int, high: int, *shape: int) -> Draw:
    """Return a function that draws integers in [low, high)."""
    return lambda generator: torch.randint(low, high, shape, generator=generator)


def always(value: Any) -> Draw:
    """Return a function that returns the same value in every step."""
    return lambda generator: value


def ones(*shape: int) -> Draw:
    return always(torch.ones(shape, dtype=torch.long))


Inputs = dict[str, Draw]
"""Inputs of a forward by name."""


def candidates(model: PreTrainedModel, given: Mapping[str, Draw]) -> Iterator[Callable[[], Inputs]]:
    """Yield makers of inputs to try: with images, sound and labels, without labels, and text alone.

    Args:
        model: a model of the library, with its weights.
        given: known inputs; nothing is guessed for these names.
    """
    guess = _Guess(model, given)
    media = [name for name in _MEDIA if name in guess.names and name not in given]
    required = [name for name in guess.required if name not in given]
    text = ["input_ids"] if "input_ids" in guess.names else []
    for chosen in ([*text, *media], media, []):
        names = [name for name in dict.fromkeys([guess.main, *required, *chosen]) if name not in given]
        options = [guess.options(name) for name in names]
        for values in itertools.product(*options):
            inputs = {n: v for n, v in zip(names, values, strict=True) if v is not None} | dict(given)
            for targets in guess.targets(inputs):
                yield functools.partial(guess.completed, inputs, targets)


_MEDIA = ("pixel_values", "input_features", "input_values", "pixel_values_videos")


class _Guess:
    def __init__(self, model: PreTrainedModel, given: Mapping[str, Draw]) -> None:
        self.model = model
        self.given = given
        self.config = model.config
        self.kind = type(model).__name__
        parameters = list(inspect.signature(model.forward).parameters.values())
        self.names = {p.name for p in parameters}
        self.required = [
            p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        main = model.main_input_name
        self.main: str = main if isinstance(main, str) else main[0]
        if self.main not in self.names:
            self.main = next(
                (n for n in ("hidden_states", *_MEDIA, "input_ids") if n in self.names), parameters[0].name
            )
        self.special = _special_tokens(self.config)

    def find(self, *names: str, default: Any = None) -> Any:
        return find(self.config, names, default)

    # makers of one input

    def options(self, name: str) -> list[Draw | None]:
        maker = getattr(self, f"_{name}", None)
        return maker() if maker is not None else [None]

    def text(self, *shape: int) -> Draw:
        allowed = torch.tensor(
            [
                token
                for token in range(4, self.find("vocab_size", default=VOCABULARY))
                if token not in self.special
            ][:96]
        )
        return lambda generator: allowed[torch.randint(0, len(allowed), shape, generator=generator)]

    def _input_ids(self) -> list[Draw | None]:
        text = self.text(BATCH, 2, TEXT) if "MultipleChoice" in self.kind else self.text(BATCH, TEXT)
        end = self.find("eos_token_id")
        if not isinstance(end, int):
            return [text]
        return [
            lambda generator: torch.cat(
                [text(generator)[..., :-1], torch.full((*text(generator).shape[:-1], 1), end)], dim=-1
            )
        ]

    def _image_shape(self) -> tuple[int, int, int]:
        size = self.find("image_size", "img_size", "input_size", "crop_size", default=32)
        height, width = (
            size[-2:] if isinstance(size, Sequence) else (size, size) if isinstance(size, int) else (32, 32)
        )
        channels = self.find("num_channels", "in_channels", "in_chans", "num_image_channels", default=3)
        return (channels if isinstance(channels, int) else 3), height, width

    def _pixel_values(self) -> list[Draw | None]:
        if self.names & {"image_grid_thw", "grid_thw"}:
            return self._patches()
        image = self._image_shape()
        frames = self.find("num_frames", default=FRAMES)
        flat: list[Draw | None] = [
            floats(BATCH, *image),
            floats(BATCH, 1, *image),
            floats(BATCH, frames, *image),
        ]
        return flat[::-1] if "Video" in self.kind or self.find("num_frames") else flat

    def _pixel_values_videos(self) -> list[Draw | None]:
        if self.main != "pixel_values_videos":
            return [None]
        return [
            floats(BATCH, self.find("num_frames", "frames_per_clip", default=FRAMES), *self._image_shape())
        ]

    def _patches(self) -> list[Draw | None]:
        patch = self.find("patch_size", default=14)
        times = self.find("temporal_patch_size", default=1)
        merge = self.find("spatial_merge_size", "merge_size", default=2)
        self.grid = (1, 2 * merge, 2 * merge)
        channels = self._image_shape()[0]
        tokens = BATCH * math.prod(self.grid)
        return [
            floats(tokens, channels * times * patch * patch),
            floats(tokens, channels, patch, patch),
            floats(1, tokens, channels, patch, patch),
        ]

    _hidden_states = _patches

    def _grids(self) -> Draw:
        return always(torch.tensor([self.grid] * BATCH))

    def _grid_thw(self) -> list[Draw | None]:
        return [self._grids()]

    _image_grid_thw = _grid_thw

    def _frames(self) -> int:
        positions: int = self.find("max_source_positions", default=50)
        return 2 * positions

    def _input_features(self) -> list[Draw | None]:
        width = self.find(
            "feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel",
            "n_mels", "input_dim", "mel_dim", "input_size", default=80,
        )  # fmt: skip
        return [floats(BATCH, width, self._frames()), floats(BATCH, self._frames(), width)]

    def _input_features_mask(self) -> list[Draw | None]:
        return [ones(BATCH, self._frames())]

    def _input_values(self) -> list[Draw | None]:
        mel = self.find("num_mel_bins", default=80)
        length = self.find("max_length", default=64)
        return [floats(BATCH, 8000), floats(BATCH, 1, 8000), floats(BATCH, length, mel)]

    def _inputs(self) -> list[Draw | None]:
        return self._input_ids()

    def _past_values(self) -> list[Draw | None]:
        length = self.find("context_length", default=16)
        return [
            floats(BATCH, length),
            floats(BATCH, length, self.find("num_input_channels", "input_size", default=1)),
        ]

    # inputs that depend on others

    def targets(self, inputs: Inputs) -> list[Inputs]:
        """Return the targets to try: labels, the first inputs of a decoder, or none."""
        decoder = (
            [{"decoder_input_ids": self.text(BATCH, TARGET)}] if "decoder_input_ids" in self.names else []
        )
        labels = self._labels(inputs)
        return [*([labels] if labels else []), *decoder, {}]

    def completed(self, inputs: Inputs, targets: Inputs) -> Inputs:
        if "image_grid_thw" in self.names and "pixel_values" in inputs:
            inputs = inputs | {"image_grid_thw": self._grids()}
        if "return_loss" in self.names:
            inputs = inputs | {"return_loss": always(True)}
        if "input_ids" not in inputs or "input_ids" in self.given:
            return inputs | targets
        full = self._with_placeholders(inputs)
        return full | {
            name: full["input_ids"] if draw is inputs["input_ids"] else draw for name, draw in targets.items()
        }

    def _with_placeholders(self, inputs: dict[str, Draw]) -> dict[str, Draw]:
        """Return the inputs, with a placeholder token in the text for each feature of an image or sound."""
        spans = []
        for what, name in (("image", "pixel_values"), ("audio", "input_features"), ("audio", "input_values")):
            token = self.find(f"{what}_token_id", f"{what}_token_index")
            if name in inputs and isinstance(token, int):
                count = self._count(f"get_{what}_features", inputs)
                if count:
                    spans.append((token, count))
        if not spans:
            return inputs
        prefix = torch.cat([torch.full((BATCH, count), token) for token, count in spans], dim=1)
        text = inputs["input_ids"]
        kinds = torch.cat([(prefix == spans[0][0]).long(), torch.zeros(BATCH, TEXT, dtype=torch.long)], dim=1)
        types = {
            name: always(kinds) for name in ("token_type_ids", "mm_token_type_ids") if name in self.names
        }
        return inputs | types | {"input_ids": lambda generator: torch.cat([prefix, text(generator)], dim=1)}

    def _count(self, method: str, inputs: dict[str, Draw]) -> int:
        """Return the number of features of a sample, by a method of the model."""
        function = getattr(self.model, method, None)
        if function is None:
            return 0
        names = set(inspect.signature(function).parameters)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            out = function(
                **{
                    name: draw(generator)
                    for name, draw in inputs.items()
                    if name in names and name != "input_ids"
                }
            )
        out = getattr(out, "pooler_output", out)
        features = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return sum(math.prod(tensor.shape[:-1]) for tensor in features) // BATCH

    def _labels(self, inputs: dict[str, Draw]) -> dict[str, Draw]:
        labels: dict[str, Draw] = {}
        classes = self.find("num_labels", default=2)
        if "labels" in self.names:
            labels["labels"] = self._label(inputs, classes)
        if "start_positions" in self.names:
            labels |= {name: integers(0, TEXT, BATCH) for name in ("start_positions", "end_positions")}
        if "next_sentence_label" in self.names:
            labels["next_sentence_label"] = integers(0, 2, BATCH)
        return labels

    def _label(self, inputs: dict[str, Draw], classes: int) -> Draw:
        if any(word in self.kind for word in _ONE_LABEL):
            return integers(0, 2, BATCH)
        if "SemanticSegmentation" in self.kind:
            return integers(0, 2, BATCH, *self._image_shape()[1:])
        if "TokenClassification" in self.kind:
            return integers(0, 2, BATCH, TEXT)
        if "input_ids" in inputs and "decoder_input_ids" not in self.names:
            return inputs["input_ids"]
        return self.text(BATCH, TARGET)


def find(config: PreTrainedConfig, names: Sequence[str], default: Any = None) -> Any:
    """Return the first attribute of that name that is set, in the configuration or in nested ones."""
    layer = [config]
    while layer:
        for part in layer:
            for name in names:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        layer = [
            value for part in layer for value in vars(part).values() if isinstance(value, PreTrainedConfig)
        ]
    return default


def _special_tokens(config: PreTrainedConfig) -> set[int]:
    tokens = set()
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            tokens |= _special_tokens(value)
        elif "token" in name and isinstance(value, (int, list, tuple)):
            tokens |= {leaf for leaf in tree_leaves(value) if isinstance(leaf, int)}
    return tokens
