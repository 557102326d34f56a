"""Models that are trained on preferences between answers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import NoEffect, Section
from headwater.config.models.decoder import DecoderConfig


class PreferenceLossConfig(Section):
    """How a preference becomes a loss.

    Attributes:
        beta: how dearly the policy pays for leaving the reference.
        loss_type: `sigmoid` (arXiv:2305.18290, equation 7), `hinge` (arXiv:2309.06657, section 3.2) or `ipo`
            (arXiv:2310.12036, equation 17).
        reference_free: there is no reference; it counts as one that finds all answers equally likely.
        disable_dropout: nothing is dropped in the policy, whatever its section says.
    """

    beta: float = Field(default=0.1, gt=0)
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    reference_free: bool = False
    disable_dropout: bool = True


class DPOConfig(Section):
    """Direct preference optimization of a language model (arXiv:2305.18290).

    The policy is trained; the reference is a frozen copy of what the policy was at the start.

    Attributes:
        policy_model: the model section of any decoder.
        dpo: the loss.
        compute_eval_metrics: how often the policy prefers the chosen answer, besides the loss.
    """

    name: Literal["dpo"]
    policy_model: DecoderConfig
    dpo: PreferenceLossConfig = PreferenceLossConfig()
    compute_eval_metrics: bool = True
    fp16_type: Annotated[str | None, NoEffect("the precision of the run holds")] = None

    @model_validator(mode="after")
    def _without_experts(self) -> Self:
        if self.policy_model.moe is not None:
            raise ValueError("policy_model has experts, whose balance has no place in this loss")
        return self
