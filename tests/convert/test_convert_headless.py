"""Encoders as they are published without a head."""

import json

import pytest
import torch

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats import CONVERTERS, nearest_converter
from headwater.core.errors import CheckpointError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": 61, "max_position_embeddings": 24, **SIZES}
ESM = {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2}
BARE = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
    "bert-sequence-classifier": lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT, type_vocab_size=1)),
    "esm2": lambda: transformers.EsmModel(transformers.EsmConfig(**TEXT, **ESM)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=16, patch_size=8)),
}


@pytest.mark.parametrize("name", BARE)
def test_encoder_without_a_head_there_and_back(name, tmp_path):
    torch.manual_seed(0)
    theirs = BARE[name]()
    theirs.save_pretrained(tmp_path / "bare")
    format, _ = CONVERTERS[f"{name}-headless"]
    config, tensors = import_hf(tmp_path / "bare", format=format)
    ours = build_model(config)
    tensors = dict(tensors)
    assert all(parameter.isfinite().all() for parameter in tensors.values())
    ours.load_state_dict(tensors, strict=False)
    export_hf(dict(ours.named_parameters()), config, tmp_path / "back", format=format)
    named = json.loads((tmp_path / "back/config.json").read_text())["architectures"]
    assert named == [type(theirs).__name__]
    again, found = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    computed = ("pooler.", "contact_head.", "rotary_embeddings.")
    missing = {key for key in found["missing_keys"] if not key.startswith(computed)}
    assert not missing and not found["unexpected_keys"]
    for key, value in theirs.state_dict().items():
        if key not in found["missing_keys"]:
            assert torch.equal(again.state_dict()[key], value), key
    assert bool(found["missing_keys"]) == (not name.startswith("bert"))


def test_encoder_of_a_summarizer_there_and_back(tmp_path):
    torch.manual_seed(0)
    theirs = BARE["bert"]()
    theirs.save_pretrained(tmp_path / "bare")
    format, model = CONVERTERS["bert-summarization"]
    config, tensors = import_hf(tmp_path / "bare", format=format)
    assert config.name == model
    ours = build_model(config)
    ours.load_state_dict(dict(tensors), strict=False)
    export_hf(dict(ours.named_parameters()), config, tmp_path / "back", format=format)
    again, found = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not found["unexpected_keys"]
    assert {key.partition(".")[0] for key in found["missing_keys"]} <= {"pooler"}
    for key, value in theirs.state_dict().items():
        if not key.startswith("pooler."):
            assert torch.equal(again.state_dict()[key], value), key


def test_bare_encoder_is_answered_with_the_converter_that_takes_it(tmp_path):
    BARE["bert"]().save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="--model bert-headless, which draws one"):
        dict(import_hf(tmp_path / "bare", format=CONVERTERS["bert"][0])[1])


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("berd-headless", "bert-headless"),
        ("T5-headless", "t5"),
        ("Llama-Headless", "llama-headless"),
        ("gptneox", "gpt-neox"),
        ("zzz", None),
    ],
)
def test_nearest_converter_is_of_the_nearest_family(word, nearest):
    assert nearest_converter(word) == nearest
