"""Models that learn from images without labels: a student beside a teacher that follows it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import AsTuple, NoEffect, Section
from headwater.config.models.common import InitializerConfig, Rate
from headwater.config.models.vision import ImageEncoderSection, Size

_VIEW = re.compile(r"ssl_transform\.output\('(global_view|local_view|collated_masks)'\)")
_OUTPUT = re.compile(r"(image_model_trunks|heads)\.output\((\d+), *(\d+), *(\d+)\)")
_MODEL = re.compile(r"(image_model_trunks|heads)\.model\((\d+)\)")

Source = tuple[str] | tuple[str, int, int, int]
"""A tensor of the batch by its name; or a part, the number of a model, of its call and of the output."""


def source_of(reference: str) -> Source:
    """What an entry of `forward_args` names.

    Raises:
        ValueError: if it names nothing.
    """
    if found := _VIEW.fullmatch(reference):
        return (found[1],)
    if found := _OUTPUT.fullmatch(reference):
        return found[1], int(found[2]), int(found[3]), int(found[4])
    raise ValueError(
        f"{reference!r} is neither ssl_transform.output('global_view') or another view nor "
        "image_model_trunks.output(model, call, output) or heads.output(model, call, output)"
    )


Call = Annotated[tuple[str | None, ...], AsTuple]
Calls = Annotated[tuple[Call, ...], Field(min_length=1), AsTuple]


class CalledSection(Section):
    """A module with what it is called with.

    Attributes:
        forward_args: for each call its arguments.
        stop_grad: nothing is learnt through it.
    """

    forward_args: Calls
    stop_grad: bool = False


class InterpolationConfig(Section):
    """How positions are told in views that are not as large as the model's images.

    Attributes:
        antialias: smooth where there are fewer.
        interpolate_offset: added to rows and columns before the scale is taken (the code published with
            arXiv:2304.07193).
        local_patch_dims: rows and columns of patches of the small views, by which a plan is made; half of
            those of the whole ones where absent.
    """

    antialias: bool = False
    interpolate_offset: float = Field(default=0.0, ge=0)
    local_patch_dims: Size | None = None


class ViewEncoderConfig(ImageEncoderSection):
    """The vision transformer under a student or teacher (arXiv:2304.07193).

    Attributes:
        interpolate_position_embedding: of views of another size.
        use_masked_patches: a trained vector stands for masked patches.
        stochastic_depth_drop_prob: how often a part of a block is left out (arXiv:1603.09382), for each view.
        stochastic_depth_drop_prob_schedule: the same in all blocks, or growing from 0 on.
        projection_initializer: of the patches' projection.
        position_embedding_initializer: of the positions.
        cls_token_initializer: of the token before the patches, and of that for masked ones.
        default_initializer: of every other matrix.
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
        """How often a part of a block is left out."""
        if self.stochastic_depth_drop_prob_schedule == "constant":
            return self.stochastic_depth_drop_prob
        return self.stochastic_depth_drop_prob * block / max(1, self.num_hidden_layers - 1)


class TrunkConfig(CalledSection):
    """A vision transformer. Its arguments are views, nothing, and which patches are masked."""

    image_model: ViewEncoderConfig


class DinoHeadConfig(Section):
    """Scores of prototypes, by layers with a narrow one before the last (arXiv:2104.14294, appendix C).

    Attributes:
        input_size: width of what is read.
        hidden_size: width of the layers between.
        bottleneck_size: width before the last layer.
        output_size: prototypes.
        num_layers: before the last one.
        norm_last_layer: the prototypes are of length one; otherwise each has a length that is learnt.
        initializer: of the matrices.
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
    """What turns outputs of a trunk into scores."""

    head_model: DinoHeadConfig


class DistillationConfig(Section):
    """Cross entropy of the student's scores with the teacher's, centred and sharpened (arXiv:2104.14294).

    Attributes:
        name: of the whole views (arXiv:2104.14294, section 3.1), or of masked patches (arXiv:2111.07832).
        input_size: scores.
        student_temp: divides the student's.
        teacher_temp: divides the teacher's, after the warm-up.
        warmup_teacher_temp: likewise at the first step.
        warmup_teacher_temp_steps: steps in between, in a straight line.
        center_momentum: how slowly what is taken off the teacher's scores follows their mean.
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
    """Keeps the images of a batch apart from each other (arXiv:1806.03198, equation 1).

    Attributes:
        loss_weight: factor on the loss.
    """

    name: Literal["KoLeoLoss"]
    loss_weight: float = Field(default=0.1, gt=0)


class LossConfig(CalledSection):
    """A part of the loss; they are added."""

    loss: Annotated[DistillationConfig | KoLeoConfig, Field(discriminator="name")]


class CopyConfig(Section):
    """Two models that begin alike.

    Attributes:
        source: one of them, as `heads.model(0)`.
        target: the other.
    """

    source: Annotated[str, Field(pattern=_MODEL.pattern)]
    target: Annotated[str, Field(pattern=_MODEL.pattern)]

    @property
    def prefixes(self) -> tuple[str, str]:
        """What the names of the parameters of both begin with."""
        first, second = (_MODEL.fullmatch(each) for each in (self.source, self.target))
        assert first is not None and second is not None, "the pattern of the fields"
        return f"{first[1]}.model.{first[2]}.", f"{second[1]}.model.{second[2]}."


class MomentumConfig(Section):
    """From `ema_decay_start` to `ema_decay_end`, half a cosine over `total_steps`."""

    ema_decay_start: float = Field(ge=0, le=1)
    ema_decay_end: float = Field(default=1.0, ge=0, le=1)
    total_steps: int = Field(ge=1)


class AverageConfig(CopyConfig):
    """A model that follows another one: after each step, the average of both with a momentum.

    Attributes:
        scheduler_params: the momentum.
    """

    scheduler_name: Literal["cosine"] = "cosine"
    scheduler_params: MomentumConfig

    def momentum(self, step: int) -> float:
        """The share that stays after step `step`, counted from 1."""
        params = self.scheduler_params
        done = min((step - 1) / params.total_steps, 1.0)
        fall = params.ema_decay_end - params.ema_decay_start
        return params.ema_decay_end - fall * (1 + math.cos(math.pi * done)) / 2


class DinoConfig(Section):
    """Self-distillation without labels (DINOv2, arXiv:2304.07193).

    Attributes:
        image_model_trunks: vision transformers, in the order in which they are called.
        heads: likewise what turns their outputs into scores.
        losses: parts of the loss.
        copy_init_weights: models that begin alike.
        ema: teachers that follow their students.
        freeze: regular expressions; parameters whose names one of them matches are not trained.
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
                    raise ValueError(f"{reference} is not there yet when {part} is called with it")
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
                    raise ValueError(f"there is no {part}.model({number})")
                sections.append((part, models[part][int(number)]))
            if sections[0][0] != sections[1][0]:
                raise ValueError(f"{pair.source} and {pair.target} are not alike")
        return self

    def _called(self) -> Iterator[tuple[str, CalledSection]]:
        """Every module with the name of its part, in the order in which they are called."""
        yield from (("image_model_trunks", each) for each in self.image_model_trunks)
        yield from (("heads", each) for each in self.heads)
        yield from (("losses", each) for each in self.losses)
