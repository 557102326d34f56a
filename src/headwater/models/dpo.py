"""Direct preference optimization: a language model and its frozen reference (arXiv:2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.preference import DPOConfig
from headwater.models import decoder_parameters
from headwater.models.decoder import Decoder
from headwater.models.evaluation import Accuracy


class DPO(nn.Module):
    """A policy that learns which of two answers is preferred. `forward` returns the training loss.

    The chosen and rejected answers of all pairs form one batch, so that the weights are streamed only once.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights; policy and reference begin with the same weights.
    """

    def __init__(self, config: DPOConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.policy = Decoder(config.policy_model, seed=seed)
        self.reference: Decoder | None = None
        if not config.dpo.reference_free:
            self.reference = Decoder(config.policy_model, seed=seed)
            self.reference.requires_grad_(False)
        self.scored = {"accuracy": Accuracy("accuracy")} if config.compute_eval_metrics else {}
        # A new module is in training mode without a call of `train`, which keeps the reference in eval mode.
        self.train()

    def train(self, mode: bool = True) -> DPO:
        """Set the training mode; the reference always stays in eval mode.

        So does the policy with `disable_dropout`: dropout would change the likelihoods that are compared.
        """
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        if self.config.dpo.disable_dropout:
            self.policy.eval()
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the DPO loss, a scalar in fp32: the mean over pairs of a chosen and a rejected answer.

        Args:
            batch: `input_ids` and `labels` [pairs, seq] with the prefixes `chosen_` and `rejected_`. The ids
                are prompt and answer, padded on the right. The labels are the same tokens in the answer, and
                -100 elsewhere.
        """
        tokens, labels = (
            torch.cat([batch[f"{side}_{name}"] for side in ("chosen", "rejected")])
            for name in ("input_ids", "labels")
        )
        tokens, labels = tokens[:, :-1], labels[:, 1:]
        weights = (labels >= 0).float()
        labels = labels.clamp_min(0)
        rewards = torch.zeros(len(tokens), device=tokens.device)
        if self.reference is not None:
            with torch.no_grad():
                rewards = -self._likelihoods(self.reference, self.reference.hidden(tokens), labels, weights)
        hidden = self.policy.hidden(tokens)
        with torch.no_grad():
            rewards = rewards + self._likelihoods(self.policy, hidden, labels, weights)
        mean = self.config.dpo.loss_type == "ipo"
        scale = 1 / weights.sum(-1).clamp_min(1) if mean else torch.ones_like(rewards)
        chosen, rejected = (rewards * scale).chunk(2)
        if not self.training and "accuracy" in self.scored:
            self.scored["accuracy"].add(chosen > rejected)
        losses, slopes = self._losses(chosen - rejected)
        # The loss depends on the logits only through the summed cross-entropies of the answers. So the
        # gradient of the loss is that of these sums, each weighted with the derivative of the loss by the
        # sum. The surrogate below has this gradient, and its value is replaced by that of the loss.
        slopes = torch.cat([-slopes, slopes]) * scale / len(losses)
        surrogate = self.policy.head(hidden, labels, slopes.unsqueeze(-1) * weights)
        return surrogate - surrogate.detach() + losses.mean()  # type: ignore[no-any-return]

    @staticmethod
    def _likelihoods(model: Decoder, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the log-likelihood of each answer, [2 · pairs], without gradients."""
        return -(model.head(hidden, labels) * weights).sum(-1)  # type: ignore[no-any-return]

    def _losses(self, margin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each pair, and the derivative of the loss by the margin, both [pairs].

        Args:
            margin: log-likelihood ratio of policy and reference for the chosen answer, minus the same for the
                rejected answer, [pairs].
        """
        beta = self.config.dpo.beta
        match self.config.dpo.loss_type:
            case "sigmoid":
                return -F.logsigmoid(beta * margin), -beta * torch.sigmoid(-beta * margin)
            case "hinge":
                return F.relu(1 - beta * margin), -beta * (beta * margin < 1).to(margin.dtype)
            case "ipo":
                excess = margin - 1 / (2 * beta)
                return excess.square(), 2 * excess


def init_parameter(name: str, shape: Sequence[int], config: DPOConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU; the same for policy and reference."""
    return decoder_parameters.init_parameter(_below(name), shape, config.policy_model, seed)


def learning_rate_scale(name: str, config: DPOConfig) -> float:
    """Return the factor on the learning rate of parameter `name`; 1 without muP."""
    return decoder_parameters.learning_rate_scale(_below(name), config.policy_model)


def pretrained_names(name: str, config: DPOConfig) -> tuple[str, ...]:
    """Return the names of a parameter in checkpoints of this model and of the policy alone."""
    below = _below(name)
    return (name, f"policy.{below}", *decoder_parameters.pretrained_names(below))


def _below(name: str) -> str:
    """Return a parameter's name without its first part, which is the name of the decoder it is in."""
    return name.partition(".")[2]
