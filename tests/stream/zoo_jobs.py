"""Tiny models of the transformers library, one for each distinct way of reading weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from harness import Job, token_batch
from torch import nn

SMALL = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SMALL, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "use_cache": False}
ENCODER = {
    **SMALL,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def _images(step: int, index: int) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(100 * step + index))


def _speech(step: int, index: int) -> torch.Tensor:
    return torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(100 * step + index))


def language_model(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def classifier(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=images, labels=torch.tensor([0, 1])).loss


def speech_model(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    return model(input_features=features, labels=torch.arange(3, 15).reshape(2, 6)).loss


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(**SMALL, n_embd=32, n_layer=3, n_head=4, n_positions=16, use_cache=False)
    )


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, intermediate_size=48, num_key_value_heads=2))


def _gemma() -> nn.Module:
    return hf.GemmaForCausalLM(
        hf.GemmaConfig(**DECODER, intermediate_size=48, num_key_value_heads=1, head_dim=8)
    )


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **DECODER, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return hf.MixtralForCausalLM(config)


def _mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=3, state_size=4, use_cache=False)
    )


def _bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(**SMALL, hidden_size=32, n_layer=3, n_head=4, use_cache=False))


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**ENCODER))


def _albert() -> nn.Module:
    return hf.AlbertForMaskedLM(hf.AlbertConfig(**ENCODER, embedding_size=16))


def _mobilebert() -> nn.Module:
    config = hf.MobileBertConfig(
        **ENCODER,
        embedding_size=16,
        true_hidden_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
    )
    return hf.MobileBertForMaskedLM(config)


def _squeezebert() -> nn.Module:
    groups = {f"{name}_groups": 2 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}
    return hf.SqueezeBertForMaskedLM(hf.SqueezeBertConfig(**ENCODER, embedding_size=32, **groups))


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = hf.BartConfig(
        **SMALL, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        use_cache=False,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        **SMALL, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=12,
        max_target_positions=16, decoder_start_token_id=1, use_cache=False, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=8, num_labels=2,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=2)
    return hf.ResNetForImageClassification(config)


_MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable, Callable]] = {
    maker.__name__[1:]: (maker, token_batch, language_model)
    for maker in (
        _gpt2, _llama, _gemma, _mixtral, _mamba, _bloom, _bert, _albert, _mobilebert, _squeezebert, _t5,
        _bart,
    )
} | {
    "whisper": (_whisper, _speech, speech_model),
    "vit": (_vit, _images, classifier),
    "resnet": (_resnet, _images, classifier),
}  # fmt: skip

NAMES = sorted(_MAKERS)


def zoo_job(name: str) -> Job:
    """Return the job of one model."""
    return Job(*_MAKERS[name])
