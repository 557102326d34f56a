"""What is trained on top of an encoder: BERT's pre-training, its fine-tunings, dense passage retrieval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models import (
    BertConfig,
    ClassifierConfig,
    DPRConfig,
    EncoderSection,
    ExtractiveSummarizationConfig,
    Nonlinearity,
    TokenClassifierConfig,
)
from headwater.core import whole_batch
from headwater.models.encoder import Encoder, encoder_initializer, encoder_learning_rate_scale
from headwater.models.evaluation import F1, Scored
from headwater.models.layers.feed_forward import NONLINEARITIES
from headwater.models.layers.initializers import draw, initialize
from headwater.models.layers.linear import Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.loss import linear_cross_entropy, plain_cross_entropy

IGNORED = -100
"""The label of what does not count."""


class Pooler(nn.Module):
    """What the first token says of the whole text: [batch, seq, hidden] -> [batch, hidden]."""

    def __init__(self, width: int, nonlinearity: Nonlinearity) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.nonlinearity = NONLINEARITIES[nonlinearity]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.nonlinearity(self.dense(hidden[:, 0]))


class MaskedTokenHead(nn.Module):
    """Guesses tokens: hidden states [..., hidden] -> logits [..., vocab], or the loss of targets."""

    def __init__(self, config: BertConfig, *, fused_loss: bool) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.nonlinearity = NONLINEARITIES[config.mlm_nonlinearity or config.encoder_nonlinearity]
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.output = TokenOutput(config, fused_loss=fused_loss)

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        return self.output(self.norm(self.nonlinearity(self.dense(hidden))), targets, row_weights)  # type: ignore[no-any-return]


class TokenOutput(Linear):
    """The last layer of `MaskedTokenHead`."""

    def __init__(self, config: BertConfig, *, fused_loss: bool) -> None:
        super().__init__(config.hidden_size, config.vocab_size)
        self.scale = config.logits_scale
        self.fused_loss = fused_loss

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        """Logits of `hidden` [..., hidden]; with targets and their weights [...] the loss."""
        if self.scale != 1:
            hidden = hidden * self.scale
        if targets is None or row_weights is None:
            return F.linear(hidden, self.weight, self.bias)
        cross_entropy = linear_cross_entropy if self.fused_loss else plain_cross_entropy
        return cross_entropy(
            hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), row_weights.flatten()
        )


class EncoderModel(nn.Module):
    """An encoder with something on top. `forward` gives the training loss.

    Args:
        config: the model section of a params file.

    Attributes:
        scored: what is counted in eval mode, by name.
    """

    def __init__(self, config: EncoderSection) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.scored: dict[str, Scored] = {}

    def encode(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Hidden states [batch, seq, hidden] of a batch; its keys are the arguments of `Encoder`."""
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "attention_span")
        return self.encoder(**{name: batch[name] for name in names if name in batch})  # type: ignore[no-any-return]

    def draw(self, seed: int) -> None:
        """Draw all weights, unless they are on the meta device."""
        initialize(self, lambda name, shape: init_parameter(name, shape, self.config, seed))


class Bert(EncoderModel):
    """BERT before it is fine-tuned (arXiv:1810.04805).

    Args:
        config: the model section of a params file.
        fused_loss: compute the loss of the tokens in chunks.
        seed: seed of the initial weights.
    """

    config: BertConfig

    def __init__(self, config: BertConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__(config)
        self.mlm = MaskedTokenHead(config, fused_loss=fused_loss)
        if config.share_embedding_weights:
            self.mlm.output.weight = self.encoder.embedding.weight
        self.pooler = None if config.disable_nsp else Pooler(config.hidden_size, config.pooler_nonlinearity)
        self.nsp = None if config.disable_nsp else Linear(config.hidden_size, 2)
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Training loss, a scalar in fp32.

        Args:
            batch: arguments of `Encoder`, and `masked_lm_positions`, `masked_lm_ids` and
                `masked_lm_weights` [batch, predictions]: where tokens were masked, which they were, and 1
                where that counts; `next_sentence_label` [batch], 1 where the second text does not follow the
                first.
        """
        hidden = self.encode(batch)
        weights = batch["masked_lm_weights"].float()
        loss = self.mlm(
            gather(hidden, batch["masked_lm_positions"]), batch["masked_lm_ids"], self._weights(weights)
        )
        if self.pooler is not None and self.nsp is not None:
            follows = self.nsp(self.pooler(hidden)).float()
            loss = loss + F.cross_entropy(follows, batch["next_sentence_label"].flatten())
        return loss  # type: ignore[no-any-return]

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, seq, vocab] of every token."""
        return self.mlm(self.encode(batch))  # type: ignore[no-any-return]

    def _weights(self, weights: Tensor) -> Tensor:
        config = self.config
        if config.mlm_loss_scaling == "batch_size":
            return weights * (config.mlm_loss_weight / len(weights))
        return weights * config.mlm_loss_weight / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def gather(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [batch, n, hidden] at positions [batch, n]."""
    return hidden.gather(1, positions.long().unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class Classifier(EncoderModel):
    """A class or a number for each text; `label` or `labels` [batch] beside the arguments of `Encoder`."""

    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__(config)
        self.pooler = Pooler(config.hidden_size, config.pooler_nonlinearity)
        self.dropout = nn.Dropout(config.task_dropout)
        self.output = Linear(config.hidden_size, config.num_labels)
        if config.compute_eval_metrics and config.problem_type == "single_label_classification":
            self.scored["accuracy"] = Scored("accuracy")
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch), batch["labels"]
        if self.config.problem_type == "regression":
            return F.mse_loss(logits.squeeze(-1), labels.float())
        if not self.training and "accuracy" in self.scored:
            self.scored["accuracy"].add(logits.argmax(-1) == labels)
        return F.cross_entropy(logits, labels.long())

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, labels], fp32."""
        return self.output(self.dropout(self.pooler(self.encode(batch)))).float()  # type: ignore[no-any-return]


class TokenClassifier(EncoderModel):
    """A class for each token; `labels` [batch, seq], `IGNORED` where there is none.

    Most tokens have class 0: nothing. So the accuracy says little, and `f1` is of the other classes.
    """

    config: TokenClassifierConfig

    def __init__(self, config: TokenClassifierConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.output_dropout)
        self.output = Linear(config.hidden_size, config.num_classes)
        self.f1 = F1("f1") if config.compute_eval_metrics else None
        if config.compute_eval_metrics:
            self.scored["accuracy"] = Scored("accuracy")
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch), batch["labels"].long()
        counted = _counted(self.config, batch)
        if not self.training and self.f1 is not None:
            found = logits.argmax(-1)
            self.scored["accuracy"].add(found == labels, counted)
            self.f1.add(found, labels, counted)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(~counted, IGNORED).flatten())
        return losses * self.config.loss_weight

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, seq, classes], fp32."""
        return self.output(self.dropout(self.encode(batch))).float()  # type: ignore[no-any-return]


class ExtractiveSummarizer(EncoderModel):
    """Which sentences make the summary.

    `cls_indices` [batch, sentences] are the tokens that begin the sentences, `cls_label` whether the sentence
    belongs to the summary, `cls_weights` 1 where there is a sentence. `best_sentence` is the share of the
    texts whose likeliest sentence belongs to it.
    """

    config: ExtractiveSummarizationConfig

    def __init__(
        self, config: ExtractiveSummarizationConfig, *, fused_loss: bool = True, seed: int = 0
    ) -> None:
        super().__init__(config)
        self.output = Linear(config.hidden_size, 1, bias=config.use_cls_bias)
        if config.compute_eval_metrics:
            self.scored = {name: Scored(name) for name in ("accuracy", "best_sentence")}
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch), batch["cls_label"].float()
        weights = batch["cls_weights"].float()
        if not self.training and self.scored:
            self.scored["accuracy"].add((logits > 0) == labels.bool(), weights.bool())
            best = logits.masked_fill(weights == 0, -torch.inf).argmax(-1, keepdim=True)
            self.scored["best_sentence"].add(labels.gather(1, best) > 0)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses * weights).sum() * (self.config.loss_weight / len(labels))

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [batch, sentences], fp32."""
        return self.output(gather(self.encode(batch), batch["cls_indices"])).squeeze(-1).float()  # type: ignore[no-any-return]


class DPR(nn.Module):
    """Questions and passages by their products: the passage of a question is told from all in the batch.

    Args:
        config: the model section of a params file.
        fused_loss: has no effect: there is no vocabulary to guess from.
        seed: seed of the initial weights.
    """

    def __init__(self, config: DPRConfig, *, fused_loss: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.questions = Encoder(config.q_encoder)
        self.contexts = Encoder(config.ctx_encoder)
        self.scored = {"accuracy": Scored("accuracy")}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Training loss, a scalar in fp32.

        Args:
            batch: `questions_…` [batch, seq] and `ctx_…` [batch, passages, seq] arguments of `Encoder`; the
                first passage of a question is its own, the others are wrong ones.
        """
        scores = self.scores(batch)
        own = torch.arange(len(scores), device=scores.device) * batch["ctx_input_ids"].shape[1]
        if not self.training:
            self.scored["accuracy"].add(scores.argmax(-1) == own)
        return F.cross_entropy(scores, own)

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Of every passage for every question, fp32: [batch, batch · passages]."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        of = {name: batch[f"questions_{name}"] for name in names if f"questions_{name}" in batch}
        questions = whole_batch.rows(self.questions(**of)[:, 0].float())
        of = {name: batch[f"ctx_{name}"].flatten(0, 1) for name in names if f"ctx_{name}" in batch}
        passages = whole_batch.rows(self.contexts(**of)[:, 0].float())
        return questions @ passages.mT / self.config.softmax_temperature


def _counted(config: TokenClassifierConfig, batch: Mapping[str, Tensor]) -> Tensor:
    """Which tokens' labels count: bool [batch, seq]."""
    counted = batch["labels"] != IGNORED
    return counted if config.include_padding_in_loss else counted & batch["attention_mask"].bool()


def num_labels(config: EncoderSection, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Labels over which the loss of a batch is a mean; `None` where it is one over the samples.

    Of masked words and next sentences it is a sum of two means; then that of the words counts.
    """
    if isinstance(config, TokenClassifierConfig):
        return _counted(config, batch).sum()
    if isinstance(config, BertConfig) and config.mlm_loss_scaling == "num_masked":
        return batch["masked_lm_weights"].sum()
    return None


_HEADS = r"(mlm\.(dense|output)|pooler\.dense|nsp|output)\.weight"
_TOWERS = {"questions": "q_encoder", "contexts": "ctx_encoder"}


def _part_of(name: str, config: EncoderSection | DPRConfig) -> tuple[str, EncoderSection]:
    """The name below the encoder of a parameter, and the encoder; the whole name where it is of a head."""
    first, _, rest = name.partition(".")
    if isinstance(config, DPRConfig):
        return rest, getattr(config, _TOWERS[first])
    return (rest if first == "encoder" else name), config


def init_parameter(name: str, shape: Sequence[int], config: EncoderSection | DPRConfig, seed: int) -> Tensor:
    """Initial value of the parameter called `name`, fp32 on the CPU; it depends on the arguments alone."""
    below, encoder = _part_of(name, config)
    initializer = encoder_initializer(below, encoder)
    if initializer is None and re.fullmatch(_HEADS, below):
        initializer = encoder.matrix_init
    assert initializer is not None, f"no initializer for parameter {name}"
    width = encoder.hidden_size
    value = draw(name, shape, initializer, seed, rows=(width,) * 3 if ".qkv." in name else ())
    if encoder.symmetric_attention_init and ".qkv." in name:
        value[width : 2 * width] = value[:width]
    return value


def learning_rate_scale(name: str, config: EncoderSection | DPRConfig) -> float:
    """Factor on the learning rate of the parameter called `name`: 1 without muP (arXiv:2203.03466)."""
    below, encoder = _part_of(name, config)
    if below == "mlm.dense.weight":
        return 1 / encoder.width_ratio
    return encoder_learning_rate_scale(below, encoder)
