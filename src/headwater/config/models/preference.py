"""Preference training of language models."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headwater.config.base import NoEffect, Section
from headwater.config.models.decoder import DecoderConfig


class PreferenceLossConfig(Section):
    """The loss of preference training.

    Attributes:
        beta: strength of the penalty for a deviation of the policy from the reference.
        loss_type: `sigmoid` (arXiv:2305.18290, equation 7), `hinge` (arXiv:2309.06657, section 3.2) or `ipo`
            (arXiv:2310.12036, equation 17).
        reference_free: train without a reference, as if it found all answers equally likely.
        disable_dropout: disable dropout in the policy, also if its section enables it.
    """

    beta: float = Field(default=0.1, gt=0)
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    reference_free: bool = False
    disable_dropout: bool = True


class DPOConfig(Section):
    """Direct preference optimization of a language model (arXiv:2305.18290).

    The policy is trained. The reference is a frozen copy of the initial policy.

    Attributes:
        policy_model: the model section of any decoder.
        dpo: the loss.
        compute_eval_metrics: compute how often the policy prefers the chosen answer, in evaluations.
    """

    name: Literal["dpo"]
    policy_model: DecoderConfig
    dpo: PreferenceLossConfig = PreferenceLossConfig()
    compute_eval_metrics: bool = True
    fp16_type: Annotated[str | None, NoEffect("the precision of the run is used")] = None

    @model_validator(mode="after")
    def _without_experts(self) -> Self:
        if self.policy_model.moe is not None:
            raise ValueError(
                "policy_model must not have moe: the loss does not include the load balancing of experts"
            )
        return self
