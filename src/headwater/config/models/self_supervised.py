"""Self-supervised learning from images, with a student and a teacher that is the student's moving average."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Section
from headwater.config.models.common import InitializerConfig, Rate
from headwater.config.models.vision import ImageEncoderSection, Size
from headwater.optim.schedules.base import cosine

_VIEW = re.compile(r"ssl_transform\.output\('(global_view|local_view|collated_masks)'\)")
_OUTPUT = re.compile(r"(image_model_trunks|heads)\.output\((\d+), *(\d+), *(\d+)\)")
_MODEL = re.compile(r"(image_model_trunks|heads)\.model\((\d+)\)")

Source = tuple[str] | tuple[str, int, int, int]
"""A tensor of the batch: its name. Or an output: name of a part, and numbers of model, call and output."""


def source_of(reference: str) -> Source:
    """Parse an entry of `forward_args`.

    Raises:
        ValueError: if it is not a valid reference.
    """
    if found := _VIEW.fullmatch(reference):
        return (found[1],)
    if found := _OUTPUT.fullmatch(reference):
        return found[1], int(found[2]), int(found[3]), int(found[4])
    raise ValueError(
        f"expected ssl_transform.output('global_view') or another view, image_model_trunks.output(model, "
        f"call, output) or heads.output(model, call, output), found {reference!r}"
    )


Call = Annotated[tuple[str | None, ...], AsTuple]
Calls = Annotated[tuple[Call, ...], Field(min_length=1), AsTuple]


class CalledSection(Section):
    """A module, and the arguments with which it is called.

    Attributes:
        forward_args: the arguments of each call.
        stop_grad: do not propagate gradients through the module.
    """

    forward_args: Calls
    stop_grad: bool = False


class InterpolationConfig(Section):
    """The interpolation of position embeddings for a view whose size is not that of the model's images.

    Attributes:
        antialias: use antialiasing when the number of positions decreases.
        interpolate_offset: number added to rows and columns before the scale is computed (the code published
            with arXiv:2304.07193).
        local_patch_dims: rows and columns of patches of the local views, for the plan; half of those of the
            global views if absent.
    """

    antialias: bool = False
    interpolate_offset: float = Field(default=0.0, ge=0)
    local_patch_dims: Size | None = None


class ViewEncoderConfig(ImageEncoderSection):
    """The vision transformer of a student or a teacher (arXiv:2304.07193).

    Attributes:
        use_encoder_pooler_layer: only false is supported.
        stochastic_depth_mode: `row` skips parts for each view separately; the only mode.
        interpolate_position_embedding: interpolation of position embeddings for views of another size.
        use_masked_patches: replace masked patches by a trained vector.
        stochastic_depth_drop_prob: probability that a part of a block is skipped for a view
            (arXiv:1603.09382).
        stochastic_depth_drop_prob_schedule: the same probability in all blocks (`constant`), or growing
            linearly from 0 (`linear`).
        projection_initializer: initializer of the patch projection.
        position_embedding_initializer: initializer of the position embeddings.
        cls_token_initializer: initializer of the class token and the mask token.
        default_initializer: initializer of all other matrices.
    """

    name: Literal["MultiImageViTModel"]
    prepend_cls_token: Literal[True] = True
    position_embedding_type: Literal["learned"] = "learned"
    norm_first: Literal[True] = True
    use_post_embed_layer_norm: Literal[False] = False
    use_encoder_pooler_layer: Literal[False] = False
    interpolate_position_embedding: InterpolationConfig = InterpolationConfig()
    use_masked_patches: bool = False
    stochastic_depth_drop_prob: Rate = 0.0
    stochastic_depth_mode: Literal["row"] = "row"
    stochastic_depth_drop_prob_schedule: Literal["constant", "linear"] = "constant"
    projection_initializer: InitializerConfig | None = None
    position_embedding_initializer: InitializerConfig | None = None
    cls_token_initializer: InitializerConfig | None = None
    default_initializer: InitializerConfig | None = None

    @property
    def matrix_init(self) -> InitializerConfig:
        return self.default_initializer or super().matrix_init

    def drop_rate(self, block: int) -> float:
        """Return the probability that a part of a block, numbered from 0, is skipped."""
        if self.stochastic_depth_drop_prob_schedule == "constant":
            return self.stochastic_depth_drop_prob
        return self.stochastic_depth_drop_prob * block / max(1, self.num_hidden_layers - 1)


class TrunkConfig(CalledSection):
    """A vision transformer. The three arguments of a call: the views, null, and the masks of patches."""

    image_model: ViewEncoderConfig


class DinoHeadConfig(Section):
    """A head that computes scores of prototypes, with a bottleneck before its last layer (arXiv:2104.14294).

    Attributes:
        input_size: width of the input.
        hidden_size: width of the hidden layers.
        bottleneck_size: width before the last layer.
        output_size: number of prototypes.
        num_layers: number of layers before the last one.
        norm_last_layer: true for prototypes of norm 1; otherwise the norm of each is trained.
        initializer: initializer of the matrices.
    """

    name: Literal["DinoHead"]
    input_size: int = Field(ge=1)
    hidden_size: int = Field(default=2048, ge=1)
    bottleneck_size: int = Field(default=256, ge=1)
    output_size: int = Field(ge=1)
    num_layers: int = Field(default=3, ge=1)
    norm_last_layer: bool = True
    initializer: InitializerConfig = InitializerConfig(name="truncated_normal", std=0.02)


class HeadConfig(CalledSection):
    """A head, which converts outputs of a trunk to scores."""

    head_model: DinoHeadConfig


class DistillationConfig(Section):
    """The cross-entropy of the student's scores with the teacher's centred scores (arXiv:2104.14294).

    Attributes:
        name: `DinoDistillationLoss` for whole views (arXiv:2104.14294, section 3.1), or `iBOTPatchLoss` for
            masked patches (arXiv:2111.07832).
        input_size: number of scores.
        student_temp: temperature of the student's scores.
        teacher_temp: temperature of the teacher's scores after the warm-up.
        warmup_teacher_temp: temperature of the teacher's scores at the first step.
        warmup_teacher_temp_steps: number of steps of the warm-up, in which the temperature changes linearly.
        center_momentum: momentum of the moving average that is subtracted from the teacher's scores.
        teacher_temp_scheduler: `linear_cosine` is the only schedule of the teacher's temperature.
    """

    name: Literal["DinoDistillationLoss", "iBOTPatchLoss"]
    input_size: int = Field(ge=1)
    student_temp: float = Field(default=0.1, gt=0)
    teacher_temp: float = Field(default=0.07, gt=0)
    warmup_teacher_temp: float = Field(default=0.04, gt=0)
    warmup_teacher_temp_steps: int = Field(default=0, ge=0)
    center_momentum: float = Field(default=0.9, ge=0, le=1)
    teacher_temp_scheduler: Literal["linear_cosine"] = "linear_cosine"
    total_steps: Annotated[Any, NoEffect("the temperature stays the same after the warm-up")] = None


class KoLeoConfig(Section):
    """A loss that spreads the features of a batch apart from each other (arXiv:1806.03198, equation 1).

    Attributes:
        loss_weight: factor on the loss.
    """

    name: Literal["KoLeoLoss"]
    loss_weight: float = Field(default=0.1, gt=0)


class LossConfig(CalledSection):
    """A term of the loss.

    Attributes:
        loss: the function, which its key `name` selects.
    """

    loss: Annotated[DistillationConfig | KoLeoConfig, Field(discriminator="name")]


class CopyConfig(Section):
    """A copy of the initial weights of a model to another one.

    Attributes:
        source: the model to copy from, such as `heads.model(0)`.
        target: the model to copy to.
    """

    source: Annotated[str, Field(pattern=_MODEL.pattern)]
    target: Annotated[str, Field(pattern=_MODEL.pattern)]

    @property
    def prefixes(self) -> tuple[str, str]:
        """Prefixes of the names of the parameters: those of the source, and those of the target."""
        first, second = (_MODEL.fullmatch(each) for each in (self.source, self.target))
        assert first is not None and second is not None, "the fields have this pattern"
        return f"{first[1]}.model.{first[2]}.", f"{second[1]}.model.{second[2]}."


class MomentumConfig(Section):
    """The momentum of a moving average: half a cosine from start to end over `total_steps` steps.

    Attributes:
        ema_decay_start: momentum of the first step.
        ema_decay_end: momentum after `total_steps` steps.
        total_steps: number of steps of the change.
    """

    ema_decay_start: float = Field(ge=0, le=1)
    ema_decay_end: float = Field(default=1.0, ge=0, le=1)
    total_steps: int = Field(ge=1)


class AverageConfig(CopyConfig):
    """A model that is the exponential moving average of another one.

    Attributes:
        scheduler_name: `cosine` is the only schedule of the momentum.
        scheduler_params: the momentum.
    """

    scheduler_name: Literal["cosine"] = "cosine"
    scheduler_params: MomentumConfig

    def momentum(self, step: int) -> float:
        """Return the weight of the old average in the update after step `step`, counted from 1."""
        params = self.scheduler_params
        done = min((step - 1) / params.total_steps, 1.0)
        return cosine(params.ema_decay_start, params.ema_decay_end, done)


class DinoConfig(Section):
    """Self-distillation without labels (DINOv2, arXiv:2304.07193).

    Attributes:
        image_model_trunks: vision transformers, in the order of their calls.
        heads: heads, in the order of their calls.
        losses: terms of the loss, which are added.
        copy_init_weights: pairs of models with equal initial weights.
        ema: teachers that are the moving averages of their students.
        freeze: regular expressions; parameters whose names match one of them are not trained.
    """

    name: Literal["dino"]
    image_model_trunks: Annotated[tuple[TrunkConfig, ...], Field(min_length=1), AsTuple]
    heads: Annotated[tuple[HeadConfig, ...], AsTuple] = ()
    losses: Annotated[tuple[LossConfig, ...], Field(min_length=1), AsTuple]
    copy_init_weights: Annotated[tuple[CopyConfig, ...], AsTuple] = ()
    ema: Annotated[tuple[AverageConfig, ...], AsTuple] = ()
    freeze: Annotated[tuple[str, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _arguments_exist(self) -> Self:
        done: dict[str, list[int]] = {"image_model_trunks": [], "heads": []}
        outputs = {"image_model_trunks": 2, "heads": 1}
        for part, called in self._called():
            for reference in (each for call in called.forward_args for each in call if each is not None):
                source = source_of(reference)
                if len(source) == 1:
                    continue
                name, model, call, output = source
                calls = done[name]
                if model >= len(calls) or call >= calls[model] or output >= outputs[name]:
                    raise ValueError(f"{part} uses {reference}, which no earlier call computes")
            # After the check: a module cannot take its own outputs as inputs.
            if part in done:
                done[part].append(len(called.forward_args))
        return self

    @model_validator(mode="after")
    def _copies_exist(self) -> Self:
        models = {"image_model_trunks": self.image_model_trunks, "heads": self.heads}
        for pair in (*self.copy_init_weights, *self.ema):
            sections = []
            for prefix in pair.prefixes:
                part, _, number, _ = prefix.split(".")
                if int(number) >= len(models[part]):
                    count = len(models[part])
                    raise ValueError(f"{part}.model({number}) does not exist; use one below {count}")
                sections.append((part, models[part][int(number)]))
            if sections[0][0] != sections[1][0]:
                raise ValueError(f"expected {pair.source} and {pair.target} to have the same settings")
        return self

    def _called(self) -> Iterator[tuple[str, CalledSection]]:
        """Yield the name of the part and the section of every module, in the order of their calls."""
        yield from (("image_model_trunks", each) for each in self.image_model_trunks)
        yield from (("heads", each) for each in self.heads)
        yield from (("losses", each) for each in self.losses)
