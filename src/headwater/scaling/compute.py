"""FLOPs of the training of a decoder."""

from __future__ import annotations

from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import ConfigError
from headwater.models.layers.feed_forward import GATED


def training_flops(model: DecoderConfig, sequence_length: int, tokens: int) -> float:
    """Return the FLOPs of a training run, without recomputed forwards.

    The formula is that of the Chinchilla paper (arXiv:2203.15556, appendix F), to which the model card of
    Cerebras-GPT refers. It counts the embedding as a matrix product, and attention without the causal mask.
    The backward counts as two forwards. The card does not state its formula. The FLOPs in its table are 7 to
    14 % higher.

    Args:
        model: the model.
        sequence_length: tokens of a sample.
        tokens: tokens of the whole run.

    Raises:
        ConfigError: if the model has a mixture of experts, which the formula does not cover.
    """
    if model.moe is not None:
        raise ConfigError(
            "expected a decoder without experts, because the formula for FLOPs does not cover experts",
            where="trainer.init.model.moe",
            remedy="remove the section moe",
        )
    width, inner = model.hidden_size, model.inner_size
    key_value = model.num_kv_heads * model.head_size
    feed_forward = 3 if model.nonlinearity in GATED else 2
    block = (
        2 * width * (inner + 2 * key_value)  # query, key, value
        + 2 * sequence_length * inner  # scores
        + 3 * model.num_heads * sequence_length  # softmax
        + 2 * sequence_length * inner  # sums of values
        + 2 * inner * width  # output of attention
        + 2 * feed_forward * width * model.ffn_size
    )
    embedding_and_logits = 2 * 2 * model.vocab_size * width
    return 3.0 * tokens * (embedding_and_logits + model.num_hidden_layers * block)
