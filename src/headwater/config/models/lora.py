"""Low-rank adapters: a model is fine-tuned by a few parameters beside each matrix."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headwater.config.base import NoEffect, OneOrMore, Section
from headwater.config.models.common import Rate


class LoRAConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): `W` acts as `W + alpha/r · B·A`; only A and B are trained.

    Attributes:
        r: rank, rows of A.
        alpha: numerator of the factor on what is added.
        dropout: rate on what A reads.
        target_modules: patterns of names of linear layers: ours, those of the transformers library for the
            same family (`q_proj`, `c_attn`, …), or those of the public Model Zoo; a name without dots is the
            last part of one. By default every projection of the attention.
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
    fan_in_fan_out: Annotated[bool, NoEffect("weights are kept as torch keeps them")] = False
    merge_weights: Annotated[bool, NoEffect("adapters are merged when the model is exported")] = False
