"""Extractive question answering: an answer is a span of the context."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.config.models.encoder import QuestionAnsweringConfig
from headwater.models.bert import EncoderModel
from headwater.models.evaluation import F1, Accuracy
from headwater.models.layers.linear import Linear


class QuestionAnswering(EncoderModel):
    """An encoder that predicts the first and last token of an answer (arXiv:1810.04805, section 4.2).

    A batch has the arguments of `Encoder`, and `start_positions` and `end_positions` [batch]: the first and
    last token of the answer, or 0 if the context does not contain it. The metrics count only answers that the
    context contains: `accuracy` is the fraction of exactly predicted spans, `f1` the F1 score of their
    tokens.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    config: QuestionAnsweringConfig

    def __init__(self, config: QuestionAnsweringConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.output = Linear(config.hidden_size, 2)
        self.f1 = F1("f1") if config.compute_eval_metrics else None
        if config.compute_eval_metrics:
            self.scored["accuracy"] = Accuracy("accuracy")
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
        """Return the logits of the first and of the last token, [batch, seq] each, fp32."""
        begin, end = self.output(self.encode(batch)).float().unbind(-1)
        return begin, end

    def answers(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, first and last tokens of the best answers, [batch] each; see `best_spans`."""
        return best_spans(*self.logits(batch), answerable(batch), self.config.max_answer_length)


def answerable(batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask [batch, seq] of the tokens that may be in an answer: the context without separator."""
    after = F.pad(batch["attention_mask"][:, 1:], (0, 1))
    return batch["token_type_ids"].bool() & after.bool()


def best_spans(starts: Tensor, ends: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the spans with the highest sum of the logits of first and last token.

    See arXiv:1810.04805, section 4.2.

    Args:
        starts: logits of the first token, [batch, seq].
        ends: logits of the last token, [batch, seq].
        allowed: True for a token that may be in an answer, [batch, seq].
        longest: maximum length of a span in tokens.

    Returns:
        Sums of logits, first and last tokens, [batch] each.
    """
    starts, ends = (each.masked_fill(~allowed.to(each.device), -torch.inf) for each in (starts, ends))
    following = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    best_end, further = following.max(-1)
    score, begin = (starts + best_end).max(-1)
    return score, begin, begin + further.gather(1, begin.unsqueeze(1)).squeeze(1)
