"""Every documented converter: its command in both directions on a folder of transformers."""

import json

import pytest
import torch
from conversions import stored
from safetensors.torch import save_file
from test_convert_decoders import CASES
from test_convert_jais import CONFIG
from test_convert_jais import tensors as jais_tensors
from test_convert_llava import _TEXT, _VISION

from headwater.cli.main import main
from headwater.convert.formats import CONVERTERS

transformers = pytest.importorskip("transformers")

LISTING = """
Bert	Bert-sequence-classifier	Bert-token-classifier	Bert-summarization	Bert-q&a
Bloom	Bloom-headless	Btlm	Btlm-headless	codegen
Codegen-headless	Code-llama	Code-llama-headless	Dpr	Falcon
Falcon-headless	Flan-ul2	Gpt2	Gpt2-headless	Gpt2 w/ muP
Gptj	Gptj-headless	Gpt-neox	Gpt-neox-headless	Jais
Llama	Llama-headless	LlamaV2	LlamaV2-headless	Llava
Mpt	Mpt-headless	Mistral	Mistral-headless	Octocoder
Octocoder-headless	Roberta	Santacoder	Santacoder-headless	Sqlcoder
Sqlcoder-headless	T5	Transformer	Ul2	Wizardcoder
Wizardcoder-headless	Wizardlm	Wizardlm-headless
"""
NAMES = {
    word: word.lower().replace(" w/ mup", "-mup").replace("llamav2", "llamaV2")
    for line in LISTING.strip().splitlines()
    for word in line.split("\t")
}

_ENCODER = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 24,
}  # fmt: skip
_TRANSFORMER = {
    "vocab_size": 61, "d_model": 16, "max_position_embeddings": 24, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}  # fmt: skip
SIZES = {
    **{family: sizes for family, sizes in CASES.values() if "rope_parameters" not in sizes},
    "Bert": _ENCODER,
    "Roberta": {**_ENCODER, "type_vocab_size": 1},
    "DPR": _ENCODER,
    "T5": {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 4, "num_layers": 2},
    "Pegasus": _TRANSFORMER,
    "Llava": {
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_index": 60,
    },
}
OF_OTHERS = {"JAIS": "jais", "BTLM": "btlm"}
"""Classes that transformers does not have: the start of their name, and their type."""

NOT_KEPT = ("pooler.dense.weight", "pooler.dense.bias", "lm_head.weight")
"""Ends of the names of tensors that a model without a head, or with a shared one, does not store again."""


def save(architecture, folder):
    """Save a small random model of a class of transformers."""
    family = max((each for each in (*SIZES, *OF_OTHERS) if architecture.startswith(each)), key=len)
    if family not in OF_OTHERS:
        config = getattr(transformers, f"{family}Config")(**SIZES[family], bos_token_id=1, eos_token_id=2)
        return getattr(transformers, architecture)(config).save_pretrained(folder)
    tensors = jais_tensors()
    if architecture.endswith("Model") and not architecture.endswith("LMHeadModel"):
        tensors = {
            name.removeprefix("transformer."): tensor
            for name, tensor in tensors.items()
            if not name.startswith("lm_head.")
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": OF_OTHERS[family], "architectures": [architecture], **CONFIG}
    return (folder / "config.json").write_text(json.dumps(config))


def test_listing_has_48_names_and_each_has_a_converter():
    assert len(NAMES) == 48
    assert set(NAMES.values()) <= set(CONVERTERS)


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name != "dpr"])
def test_documented_command_round_trips(name, tmp_path):
    torch.manual_seed(0)
    folder, back = tmp_path / "hf", tmp_path / "back"
    save(CONVERTERS[name][0].architecture, folder)
    before = stored(folder)
    (folder / "model.safetensors").unlink()
    torch.save(before, folder / "pytorch_model.bin")
    there = f"convert --model {name} --src-fmt hf --tgt-fmt cs-2.2 --output-dir {tmp_path}"
    files = f"--config {folder}/config.json {folder}/pytorch_model.bin"
    assert main(["checkpoint", *there.split(), *files.split()]) == 0
    again = f"convert --model {name} --src-fmt cs-2.2 --tgt-fmt hf {tmp_path}/pytorch_model_to_cs-2.2 {back}"
    assert main(["checkpoint", *again.split()]) == 0
    after = stored(back)
    lost = before.keys() - after.keys()
    assert all(key.endswith(NOT_KEPT) for key in lost)
    for key in before.keys() & after.keys():
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-6 * ("embed_positions" in key))


def test_command_for_two_encoders_in_two_folders(tmp_path):
    folder = tmp_path / "hf"
    save("DPRQuestionEncoder", folder / "question_encoder")
    save("DPRContextEncoder", folder / "ctx_encoder")
    there = f"convert --model dpr --src-fmt hf --tgt-fmt cs-2.2 {folder} {tmp_path}/own"
    again = f"convert --model dpr --src-fmt cs-2.2 --tgt-fmt hf {tmp_path}/own {tmp_path}/back"
    assert main(["checkpoint", *there.split()]) == 0
    assert main(["checkpoint", *again.split()]) == 0
    for part in ("question_encoder", "ctx_encoder"):
        before, after = stored(folder / part), stored(tmp_path / "back" / part)
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("formats", [("cs-2.0", "cs-2.2"), ("cs-2.2", "headwater")])
def test_conversion_between_releases_is_refused(formats, tmp_path, capsys):
    source, target = formats
    words = f"convert --model transformer --src-fmt {source} --tgt-fmt {target} {tmp_path} {tmp_path}/out"
    assert main(["checkpoint", *words.split()]) == 2
    message = capsys.readouterr().err
    assert f"{source} and {target} both mean the format" in message
    assert "IN needs no conversion" in message
