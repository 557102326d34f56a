"""Attributes and inputs of some architectures that cannot be guessed, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.transformers_walk.catalogue import Entry
from benchmarks.transformers_walk.inputs import BATCH, TARGET, TEXT, Draw, always, floats, integers, ones

Attributes = Mapping[str, Any]
Inputs = Mapping[str, Draw]

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
"""Used instead of a backbone of another library."""

_RESNET_TOP = _RESNET | {"out_features": ["stage4"]}
_PYRAMID = {"decoder_in_channels": [64, 64, 64]}
_HIERA = {"hidden_size": 96}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}

_ATTRIBUTES: dict[str, Attributes] = {
    "align": {f"vision_config.{name}": value for name, value in _EFFICIENT.items()} | {"projection_dim": 320},
    "audioflamingo3_encoder": {"max_source_positions": 50},
    "bamba": _MAMBA,
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "use_auxiliary_head": False},
    "blip-2": {"image_token_index": 127},
    "chameleon": {"vocabulary_map": {"<image>": 127}},
    "conditional_detr": {"backbone_config": _RESNET_TOP},
    "dab-detr": {"backbone_config": _RESNET_TOP},
    "data2vec-vision": {"use_auxiliary_head": False},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "d_fine": _PYRAMID,
    "deformable_detr": {"backbone_config": _RESNET},
    "deimv2": _PYRAMID,
    "detr": {"backbone_config": _RESNET_TOP},
    "dots3_note": {"text_config.num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "efficientnet": _EFFICIENT,
    "emu3": {"vocabulary_map": {"<image>": 127}},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500000.0,
            "mrope_section": [3, 3, 2],
        }
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": _MAMBA,
    "grounding-dino": {"num_queries": 4},
    "hiera": {"decoder_hidden_size": 64, "decoder_depth": 1, "decoder_num_heads": 4},
    "instructblip": {"image_token_index": 127},
    "instructblipvideo": {"video_token_index": 127},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimi": {"vector_quantization_hidden_dimension": 64},
    "mm-grounding-dino": {"num_queries": 4},
    "molmo2": {"adapter_config.vision_feature_layer": [2, 1]},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "omdet-turbo": {"backbone_config": _RESNET},
    "perceiver": {"num_latents": 8, "num_cross_attention_heads": 1, "num_self_attention_heads": 4},
    "pp_doclayout_v2": _PYRAMID,
    "pp_doclayout_v3": _PYRAMID,
    "pp_doclayout_v4": _PYRAMID,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 3], "hash_seed": 0},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "rt_detr": _PYRAMID,
    "rt_detr_v2": _PYRAMID,
    "sam": {"vision_config.output_channels": 64},
    "sam2": {f"vision_config.backbone_config.{name}": value for name, value in _HIERA.items()},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": {f"backbone_config.{name}": value for name, value in _HIERA.items()},
    "sam_hq": {"vision_config.output_channels": 64},
    "t5": {"decoder_start_token_id": 0},
    "table-transformer": {"backbone_config": _RESNET_TOP},
    "vjepa2": {"frames_per_clip": 4},
    "xmod": {"default_language": "en_XX"},
}
"""Attributes by model type, and further ones by class."""

_SERIES: Inputs = {
    "past_values": floats(BATCH, 11),
    "past_time_features": floats(BATCH, 11, 0),
    "past_observed_mask": ones(BATCH, 11),
    "future_values": floats(BATCH, 4),
    "future_time_features": floats(BATCH, 4, 0),
}
_LINE: Inputs = {"pixel_values": floats(BATCH, 3, 48, 96)}
_QFORMER: Inputs = {"qformer_input_ids": integers(4, 90, BATCH, TEXT)}
_CODEBOOKS: Inputs = {"input_ids": integers(4, 90, 4 * BATCH, TEXT)}
_EVERY_TOKEN: Inputs = {"global_attention_mask": ones(BATCH, TEXT)}
_TILES: Inputs = {
    "pixel_values": floats(BATCH, 1, 4, 3, 32, 32),
    "aspect_ratio_ids": ones(BATCH, 1),
    "aspect_ratio_mask": ones(BATCH, 1, 4),
}

_PATCHES: Inputs = {
    "pixel_values": floats(BATCH, 16, 768),
    "pixel_attention_mask": ones(BATCH, 16),
    "spatial_shapes": always(torch.full((BATCH, 2), 4)),
}
_POINTS: Inputs = {"input_points": floats(BATCH, 1, 1, 2), "input_labels": ones(BATCH, 1, 1)}

_INPUTS: dict[str, Inputs] = {
    "autoformer": _SERIES,
    "bros": {"bbox": floats(BATCH, TEXT, 8)},
    "clap": {"input_features": floats(BATCH, 1, 64, 16)},
    "decision_transformer": {
        "states": floats(BATCH, 4, 17),
        "actions": floats(BATCH, 4, 4),
        "rewards": floats(BATCH, 4, 1),
        "returns_to_go": floats(BATCH, 4, 1),
        "timesteps": integers(0, 8, BATCH, 4),
        "attention_mask": ones(BATCH, 4),
    },
    "fastspeech2_conformer": {
        "spectrogram_labels": floats(BATCH, 2 * TEXT, 80),
        "duration_labels": always(torch.full((BATCH, TEXT), 2)),
        "pitch_labels": floats(BATCH, TEXT, 1),
        "energy_labels": floats(BATCH, TEXT, 1),
        "attention_mask": ones(BATCH, TEXT),
    },
    "informer": _SERIES,
    "instructblip": _QFORMER,
    "instructblipvideo": _QFORMER,
    "LongformerForMultipleChoice": {"global_attention_mask": ones(BATCH, 2, TEXT)},
    "LongformerForQuestionAnswering": _EVERY_TOKEN,
    "lxmert": {"visual_feats": floats(BATCH, 4, 64), "visual_pos": floats(BATCH, 4, 4)},
    "MimiDecoderModel": {"latents": floats(BATCH, 64, 8)},
    "mllama": _TILES,
    "mllama_vision_model": _TILES,
    "MusicgenForCausalLM": _CODEBOOKS,
    "MusicgenMelodyForCausalLM": _CODEBOOKS,
    "MusicgenMelodyModel": _CODEBOOKS,
    "MusicgenModel": _CODEBOOKS,
    "oneformer": {"task_inputs": integers(0, 100, BATCH, 77)},
    "pix2struct": {
        "flattened_patches": floats(BATCH, 8, 770),
        "decoder_input_ids": integers(4, 90, BATCH, TARGET),
    },
    "pp_ocrv5_mobile_rec": _LINE,
    "pp_ocrv5_server_rec": _LINE,
    "pp_ocrv6_medium_rec": _LINE,
    "pp_ocrv6_small_rec": _LINE,
    "pp_ocrv6_tiny_rec": _LINE,
    "sam": _POINTS,
    "sam2": _POINTS,
    "sam_hq": _POINTS,
    "siglip2": _PATCHES,
    "siglip2_vision_model": _PATCHES,
    "time_series_transformer": _SERIES,
    "udop": {"bbox": always(torch.zeros(BATCH, TEXT, 4))},
    "VideoMAEForPreTraining": {
        "bool_masked_pos": always(torch.arange(32).remainder(2).bool().expand(BATCH, 32))
    },
}
"""Inputs by name of the class or model type."""


def attributes_of(entry: Entry) -> Attributes:
    """Return attributes of the configuration of a class, by dotted path."""
    return {**_ATTRIBUTES.get(entry.model_type, {}), **_ATTRIBUTES.get(entry.class_name, {})}


def inputs_of(entry: Entry) -> Inputs:
    """Return inputs of the forward of a class."""
    return _INPUTS.get(entry.class_name, _INPUTS.get(entry.model_type, {}))
