"""Encoders that are published without a head."""

import json

import pytest
import torch
from conversions import losses_of_a_step

from headwater.cli.main import main
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.folder import read_model_section
from headwater.convert.formats import CONVERTERS, nearest_converter
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.registry import build_model
from headwater.trainer.checkpoint_inspection import complete_checkpoints
from headwater.trainer.pretrained import checkpoint_weights

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
def test_encoder_without_a_head_round_trips(name, tmp_path):
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


def test_encoder_of_a_summarizer_round_trips(tmp_path):
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


def test_error_for_a_bare_encoder_names_the_headless_converter(tmp_path):
    BARE["bert"]().save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="--model bert-headless, which gives the head random"):
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


def test_published_encoder_is_imported_trained_and_exported(tmp_path, capsys):
    torch.manual_seed(0)
    theirs = BARE["bert"]().eval()
    theirs.save_pretrained(tmp_path / "bare")
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["checkpoint", "import", str(tmp_path / "bare"), "--model_dir", str(run)]) == 0
    assert "no head; initialised at random: mlm.dense.weight" in capsys.readouterr().err
    section = read_model_section(run / "params.yaml")
    (checkpoint,) = complete_checkpoints(run)
    ours = build_model(section).eval()
    ours.load_state_dict(dict(checkpoint_weights(checkpoint)), strict=False)
    ids = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
        found = ours.encode({"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1, :13], expected[1, :13], rtol=1e-5, atol=1e-5)

    assert main(["checkpoint", "export", "--model_dir", str(run), "--out", str(out)]) == 0
    again, info = transformers.BertModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in theirs.state_dict().items())

    masked = torch.tensor([[3, 5], [2, 7]])
    batch = {
        "input_ids": ids, "attention_mask": mask, "masked_lm_positions": masked,
        "masked_lm_ids": ids.gather(1, masked), "masked_lm_weights": torch.ones(2, 2),
        "next_sentence_label": torch.tensor([0, 1]),
    }  # fmt: skip
    before, after = losses_of_a_step(ours.train(), lambda: ours(batch))
    assert after < before


def test_error_for_an_unknown_type_names_the_hf_section(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "vocab_size": 61}))
    with pytest.raises(ConfigError, match="no converter for the model_type 'rwkv'") as error:
        import_hf(tmp_path)
    assert "model: {hf: FOLDER}" in error.value.remedy
