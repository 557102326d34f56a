"""Models with an encoder: BERT's pretraining, its fine-tuned variants, dense passage retrieval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import Nonlinearity
from headwater.config.models.encoder import (
    BertConfig,
    ClassifierConfig,
    DPRConfig,
    EncoderSection,
    ExtractiveSummarizationConfig,
    TokenClassifierConfig,
)
from headwater.core import whole_batch
from headwater.core.batches import IGNORED
from headwater.models.encoder import Encoder, encoder_initializer, encoder_learning_rate_scale
from headwater.models.evaluation import F1, Accuracy
from headwater.models.layers.feed_forward import NONLINEARITIES
from headwater.models.layers.initializers import draw, initialize
from headwater.models.layers.linear import Linear
from headwater.models.layers.norm import LayerNorm
from headwater.models.loss import linear_cross_entropy


class Pooler(nn.Module):
    """Layer that makes one vector of a text's first token: [batch, seq, hidden] -> [batch, hidden]."""

    def __init__(self, width: int, nonlinearity: Nonlinearity) -> None:
        super().__init__()
        self.dense = Linear(width, width)
        self.nonlinearity = NONLINEARITIES[nonlinearity]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.nonlinearity(self.dense(hidden[:, 0]))


class MaskedTokenHead(nn.Module):
    """Head of masked language modelling: [..., hidden] -> logits [..., vocab]; with targets: -> the loss."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.nonlinearity = NONLINEARITIES[config.mlm_nonlinearity or config.encoder_nonlinearity]
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.output = TokenOutput(config)

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        return self.output(self.norm(self.nonlinearity(self.dense(hidden))), targets, row_weights)  # type: ignore[no-any-return]


class TokenOutput(Linear):
    """The last layer of `MaskedTokenHead`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size)
        self.scale = config.logits_scale

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, row_weights: Tensor | None = None
    ) -> Tensor:
        """Return the logits of `hidden` [..., hidden]. If targets and weights [...] are given: the loss."""
        if self.scale != 1:
            hidden = hidden * self.scale
        if targets is None or row_weights is None:
            return F.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(
            hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), row_weights.flatten()
        )


class EncoderModel(nn.Module):
    """Base of models with an encoder and a head. `forward` returns the training loss.

    Args:
        config: the model section of a params file.

    Attributes:
        scored: metrics that are updated in eval mode, by name.
    """

    def __init__(self, config: EncoderSection) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.scored: dict[str, Accuracy] = {}

    def encode(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden states [batch, seq, hidden] of a batch, whose keys are arguments of `Encoder`."""
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "attention_span")
        return self.encoder(**{name: batch[name] for name in names if name in batch})  # type: ignore[no-any-return]

    def draw(self, seed: int) -> None:
        """Draw all weights at random, unless they are on the meta device."""
        initialize(self, lambda name, shape: init_parameter(name, shape, self.config, seed))


class Bert(EncoderModel):
    """BERT for pretraining: masked language modelling and next sentence prediction (arXiv:1810.04805).

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    config: BertConfig

    def __init__(self, config: BertConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.mlm = MaskedTokenHead(config)
        if config.share_embedding_weights:
            # Before `draw`: a shared weight is drawn once, under the name that the encoder gives it.
            self.mlm.output.weight = self.encoder.embedding.weight
        self.pooler = None if config.disable_nsp else Pooler(config.hidden_size, config.pooler_nonlinearity)
        self.nsp = None if config.disable_nsp else Linear(config.hidden_size, 2)
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: the arguments of `Encoder`; `masked_lm_positions`, `masked_lm_ids` and
                `masked_lm_weights` [batch, predictions]: positions and original ids of the masked tokens, and
                1 for each that counts; and `next_sentence_label` [batch], 1 if the second text does not
                follow the first.
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
        """Return the logits [batch, seq, vocab] of all positions."""
        return self.mlm(self.encode(batch))  # type: ignore[no-any-return]

    @property
    def padding_id(self) -> int:
        """The token id that fills sequences."""
        return self.config.pad_token_id

    def logits_at(self, input_ids: Tensor, attention_mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return the logits [n, vocab] at `places` [n] of the sequences `rows` [n].

        Args:
            input_ids: token ids, [batch, seq].
            attention_mask: 0 for padding, [batch, seq].
            rows: numbers of sequences.
            places: positions in these sequences.
        """
        hidden = self.encode({"input_ids": input_ids, "attention_mask": attention_mask})
        return self.mlm(hidden[rows, places])  # type: ignore[no-any-return]

    def _weights(self, weights: Tensor) -> Tensor:
        config = self.config
        if config.mlm_loss_scaling == "batch_size":
            return weights * (config.mlm_loss_weight / len(weights))
        # Clamped: a batch without masked tokens has loss 0, not NaN.
        return weights * config.mlm_loss_weight / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def gather(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [batch, n, hidden] at `positions` [batch, n] of each sequence."""
    return hidden.gather(1, positions.long().unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class Classifier(EncoderModel):
    """A classifier or regressor of texts.

    A batch has the arguments of `Encoder`, and `labels` [batch].

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.pooler = Pooler(config.hidden_size, config.pooler_nonlinearity)
        self.dropout = nn.Dropout(config.task_dropout)
        self.output = Linear(config.hidden_size, config.num_labels)
        if config.compute_eval_metrics and config.problem_type == "single_label_classification":
            self.scored["accuracy"] = Accuracy("accuracy")
        self.draw(seed)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch), batch["labels"]
        if self.config.problem_type == "regression":
            return F.mse_loss(logits.squeeze(-1), labels.float())
        if not self.training and "accuracy" in self.scored:
            self.scored["accuracy"].add(logits.argmax(-1) == labels)
        return F.cross_entropy(logits, labels.long())

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [batch, labels], fp32."""
        return self.output(self.dropout(self.pooler(self.encode(batch)))).float()  # type: ignore[no-any-return]


class TokenClassifier(EncoderModel):
    """A classifier of tokens.

    A batch has the arguments of `Encoder`, and `labels` [batch, seq], `IGNORED` for a token without a class.
    Most tokens have class 0 ("no entity"), so that the accuracy says little. The metric `f1` therefore counts
    only the other classes.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    config: TokenClassifierConfig

    def __init__(self, config: TokenClassifierConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.output_dropout)
        self.output = Linear(config.hidden_size, config.num_classes)
        self.f1 = F1("f1") if config.compute_eval_metrics else None
        if config.compute_eval_metrics:
            self.scored["accuracy"] = Accuracy("accuracy")
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
        """Return the logits [batch, seq, classes], fp32."""
        return self.output(self.dropout(self.encode(batch))).float()  # type: ignore[no-any-return]


class ExtractiveSummarizer(EncoderModel):
    """A classifier of sentences: does a sentence belong to the summary?

    A batch has the arguments of `Encoder` and, each [batch, sentences], `cls_indices`: position of the first
    token of a sentence; `cls_label`: 1 if the sentence belongs to the summary; `cls_weights`: 1 for a
    sentence, 0 for padding. The metric `best_sentence` is the fraction of the texts whose highest-scoring
    sentence belongs to the summary.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    config: ExtractiveSummarizationConfig

    def __init__(self, config: ExtractiveSummarizationConfig, *, seed: int = 0) -> None:
        super().__init__(config)
        self.output = Linear(config.hidden_size, 1, bias=config.use_cls_bias)
        if config.compute_eval_metrics:
            self.scored = {name: Accuracy(name) for name in ("accuracy", "best_sentence")}
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
        """Return the logits [batch, sentences], fp32."""
        return self.output(gather(self.encode(batch), batch["cls_indices"])).squeeze(-1).float()  # type: ignore[no-any-return]


class DPR(nn.Module):
    """Dense passage retrieval (arXiv:2004.04906): an encoder of questions and one of passages.

    The score of a passage is the product of the two encodings. The loss is the cross-entropy of a question's
    own passage among all passages of the batch.

    Args:
        config: the model section of a params file.
        seed: seed of the initial weights.
    """

    def __init__(self, config: DPRConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.questions = Encoder(config.q_encoder)
        self.contexts = Encoder(config.ctx_encoder)
        self.scored = {"accuracy": Accuracy("accuracy")}
        initialize(self, lambda name, shape: init_parameter(name, shape, config, seed))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the training loss, a scalar in fp32.

        Args:
            batch: the arguments of `Encoder`, with the prefix `questions_` [batch, seq] and with the prefix
                `ctx_` [batch, passages, seq]. The first passage of a question is the right one, the others
                are hard negatives.
        """
        scores = self.scores(batch)
        own = torch.arange(len(scores), device=scores.device) * batch["ctx_input_ids"].shape[1]
        if not self.training:
            self.scored["accuracy"].add(scores.argmax(-1) == own)
        return F.cross_entropy(scores, own)

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the score of every passage for every question, fp32 [batch, batch · passages]."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        of = {name: batch[f"questions_{name}"] for name in names if f"questions_{name}" in batch}
        questions = whole_batch.rows(text_vectors(self.questions, **of))
        of = {name: batch[f"ctx_{name}"].flatten(0, 1) for name in names if f"ctx_{name}" in batch}
        passages = whole_batch.rows(text_vectors(self.contexts, **of))
        return questions @ passages.mT / self.config.softmax_temperature


def text_vectors(encoder: nn.Module, **batch: Tensor) -> Tensor:
    """Return the vector of each text, fp32 [batch, hidden]: the hidden state of its first token.

    Args:
        encoder: an encoder of `DPR`.
        batch: the arguments of `Encoder`.
    """
    return encoder(**batch)[:, 0].float()  # type: ignore[no-any-return]


def _counted(config: TokenClassifierConfig, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the labels that count in the loss, bool [batch, seq]."""
    counted = batch["labels"] != IGNORED
    return counted if config.include_padding_in_loss else counted & batch["attention_mask"].bool()


def num_labels(config: EncoderSection, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Return the number of labels over which the loss of a batch is a mean; `None`: a mean over samples.

    BERT's loss is the sum of a mean over masked tokens and a mean over samples; the masked tokens are
    counted.
    """
    if isinstance(config, TokenClassifierConfig):
        return _counted(config, batch).sum()
    if isinstance(config, BertConfig) and config.mlm_loss_scaling == "num_masked":
        return batch["masked_lm_weights"].sum()
    return None


_HEADS = r"(mlm\.(dense|output)|pooler\.dense|nsp|output)\.weight"
_TOWERS = {"questions": "q_encoder", "contexts": "ctx_encoder"}


def _part_of(name: str, config: EncoderSection | DPRConfig) -> tuple[str, EncoderSection]:
    """Return a parameter's name within its encoder (its full name, if it is in a head) and the section."""
    first, _, rest = name.partition(".")
    if isinstance(config, DPRConfig):
        return rest, getattr(config, _TOWERS[first])
    return (rest if first == "encoder" else name), config


def init_parameter(name: str, shape: Sequence[int], config: EncoderSection | DPRConfig, seed: int) -> Tensor:
    """Return the initial value of parameter `name`, fp32 on the CPU, determined by the arguments alone."""
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
    """Return the factor on the learning rate of parameter `name` (muP, arXiv:2203.03466); 1 without muP."""
    below, encoder = _part_of(name, config)
    if below == "mlm.dense.weight":
        return 1 / encoder.width_ratio
    return encoder_learning_rate_scale(below, encoder)


_PUBLIC_NAMES = {
    "encoder.embedding": "bert_encoder.embedding_layer.word_embeddings",
    "encoder.position_embedding": "bert_encoder.embedding_layer.position_embeddings.embed",
    "encoder.segment_embedding": "bert_encoder.embedding_layer.segment_embeddings",
    "encoder.embedding_norm": "bert_encoder.embed_ln_f",
    "pooler.dense": "bert_encoder.pooler.pooler.ffn.0.linear_layer",
    "nsp": "bert_cls_head.classifier.ffn.0.linear_layer",
    "mlm.dense": "bert_mlm_head.mlm_transform.ffn.ffn.0.linear_layer",
    "mlm.norm": "bert_mlm_head.mlm_transform.ln",
    "mlm.output": "bert_mlm_head.classifier.ffn.0.linear_layer",
}
_PUBLIC_BLOCK_NAMES = {
    "attention.output": "self_attn.proj_output_dense_layer",
    "attention_norm": "norm1",
    "ffn.input": "ffn.ffn.0.linear_layer",
    "ffn.output": "ffn.ffn.1.linear_layer",
    "ffn_norm": "norm2",
}
"""The Model Zoo's names of our modules: of BERT with its heads, and of a block."""


def public_parts(name: str, config: EncoderSection | DPRConfig) -> tuple[tuple[str, int], ...]:
    """Return the Model Zoo's names of the parameters stacked in ours, each with its number of rows (-1: all).

    The result is empty for other encoders than BERT, and for parameters whose names are not known.
    """
    if not isinstance(config, BertConfig) or config.name != "bert":
        return ()
    module, _, kind = name.rpartition(".")
    block = re.match(r"encoder\.blocks\.(\d+)\.(.*)", module)
    if block is None:
        return ((f"{_PUBLIC_NAMES[module]}.{kind}", -1),) if module in _PUBLIC_NAMES else ()
    layer, below = f"bert_encoder.transformer_encoder.layers.{block[1]}", block[2]
    if below == "attention.qkv":
        return tuple(
            (f"{layer}.self_attn.proj_{which}_dense_layer.{kind}", config.hidden_size) for which in "qkv"
        )
    return ((f"{layer}.{_PUBLIC_BLOCK_NAMES[below]}.{kind}", -1),) if below in _PUBLIC_BLOCK_NAMES else ()
