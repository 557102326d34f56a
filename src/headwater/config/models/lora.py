"""Low-rank adapters (LoRA), which fine-tune a model with a few additional parameters per matrix."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headwater.config.base import NoEffect, OneOrMore, Section
from headwater.config.models.common import Rate


class LoRAConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): `W + alpha/r · B·A` replaces `W`; only A and B are trained.

    Attributes:
        r: rank: number of rows of A.
        alpha: numerator of the factor on `B·A`.
        dropout: dropout rate of the input of A.
        target_modules: patterns of names of linear layers, as in Headwater's models, in the transformers
            library's model of the same family (`q_proj`, `c_attn`, …) or in the Cerebras Model Zoo. A pattern
            without dots is compared with the last part of a name. By default all projections of the
            attention.
    """

    r: int = Field(ge=1)
    alpha: float = Field(default=1.0, gt=0)
    dropout: Rate = 0.0
    target_modules: Annotated[tuple[str, ...], OneOrMore] = (
        "proj_q_dense_layer",
        "proj_k_dense_layer",
        "proj_v_dense_layer",
        "proj_output_dense_layer",
    )
    fan_in_fan_out: Annotated[bool, NoEffect("weights always have torch's layout")] = False
    merge_weights: Annotated[bool, NoEffect("adapters are merged when the model is exported")] = False
