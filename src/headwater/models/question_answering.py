"""Answers that are a stretch of a text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.config.models import QuestionAnsweringConfig
from headwater.models.bert import EncoderModel
from headwater.models.evaluation import F1, Scored
from headwater.models.layers.linear import Linear


class QuestionAnswering(EncoderModel):
    """Where an answer begins and ends (arXiv:1810.04805, section 4.2).

    `start_positions` and `end_positions` [batch] are its first and last token, 0 where the text does not hold
    it. Of the answers that are there, `accuracy` is the share found to the token, and `f1` tells how well the
    tokens of all together are found.
    """

    config: QuestionAnsweringConfig

    def __init__(self, config: QuestionAnsweringConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__(config)
        self.output = Linear(config.hidden_size, 2)
        self.f1 = F1("f1") if config.compute_eval_metrics else None
        if config.compute_eval_metrics:
            self.scored["accuracy"] = Scored("accuracy")
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        starts, ends = self.logits(batch)
        begin, end = batch["start_positions"].long(), batch["end_positions"].long()
        if not self.training and self.f1 is not None:
            _, *found = best_spans(starts, ends, answerable(batch), self.config.max_answer_length)
            self.scored["accuracy"].add((found[0] == begin) & (found[1] == end), begin > 0)
            places = torch.arange(starts.shape[1], device=starts.device)
            inside, right = (
                ((places >= first.unsqueeze(1)) & (places <= last.unsqueeze(1))).long()
                for first, last in (found, (begin, end))
            )
            self.f1.add(inside, right, (begin > 0).unsqueeze(1).expand_as(starts))
        return (F.cross_entropy(starts, begin) + F.cross_entropy(ends, end)) / 2

    def logits(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of begin and end, [batch, seq] each, fp32."""
        begin, end = self.output(self.encode(batch)).float().unbind(-1)
        return begin, end

    def answers(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The best answers: their scores, first and last tokens, [batch] each; see `best_spans`."""
        return best_spans(*self.logits(batch), answerable(batch), self.config.max_answer_length)


def answerable(batch: Mapping[str, Tensor]) -> Tensor:
    """Which tokens may be an answer's [batch, seq]: those of the second text but the last, a separator."""
    after = F.pad(batch["attention_mask"][:, 1:], (0, 1))
    return batch["token_type_ids"].bool() & after.bool()


def best_spans(starts: Tensor, ends: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stretches with the highest sum of the logits of begin and end (arXiv:1810.04805, section 4.2).

    Args:
        starts: logits of the first token [batch, seq].
        ends: logits of the last token [batch, seq].
        allowed: tokens that may be either [batch, seq].
        longest: tokens of a stretch at most.

    Returns:
        Sums of logits, first and last tokens, [batch] each.
    """
    starts, ends = (each.masked_fill(~allowed.to(each.device), -torch.inf) for each in (starts, ends))
    following = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    best_end, further = following.max(-1)
    score, begin = (starts + best_end).max(-1)
    return score, begin, begin + further.gather(1, begin.unsqueeze(1)).squeeze(1)
