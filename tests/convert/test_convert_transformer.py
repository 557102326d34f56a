"""The original transformer in the format of Pegasus, compared with transformers in both directions."""

import pytest
import torch
from conversions import assert_chooses, stored

from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats import CONVERTERS
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

SMALL = {
    "name": "transformer",
    "src_vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_heads": 4,
    "encoder_num_hidden_layers": 3,
    "decoder_num_hidden_layers": 2,
    "src_max_position_embeddings": 20,
    "tgt_max_position_embeddings": 24,
    "use_pre_encoder_decoder_layer_norm": True,
}
MUP = {"mup_base_d_model": 32, "mup_base_d_ff": 40, "use_transformer_initialization": False}
BY_ROOT = {"scale_encoder_qk_dot_by_d": False, "scale_decoder_qk_dot_by_d": False}
VARIANTS = [
    {},
    {"use_projection_bias_in_attention": True, "encoder_nonlinearity": "gelu"},
    {**MUP, **BY_ROOT},
]


def model_of(**changes):
    model = build_model(Seq2SeqConfig.model_validate({**SMALL, **changes})).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def inputs():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 61, (2, 18), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    written = torch.randint(2, 61, (2, 22), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": written}


@pytest.mark.parametrize("changes", VARIANTS)
def test_export_has_the_same_logits_in_transformers_and_reimported(changes, tmp_path):
    model = model_of(**changes)
    export_hf(model.named_parameters(), model.config, tmp_path / "out")
    theirs, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config, tensors = import_hf(tmp_path / "out")
    again = build_model(config).eval()
    again.load_state_dict(dict(tensors), strict=False)
    batch = inputs()
    with torch.no_grad():
        expected = model.logits(batch)
        torch.testing.assert_close(theirs.eval()(**batch).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again.logits(batch), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("scaled", [True, False])
def test_import_from_transformers_exports_the_same_bits(scaled, tmp_path):
    torch.manual_seed(2)
    theirs = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(
            vocab_size=61, d_model=64, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=40,
            decoder_ffn_dim=40, encoder_attention_heads=4, decoder_attention_heads=4,
            max_position_embeddings=32, scale_embedding=scaled, init_std=0.2,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    config, tensors = import_hf(tmp_path / "theirs")
    ours = build_model(config).eval()
    ours.load_state_dict(dict(tensors), strict=False)
    batch = inputs()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(batch), theirs(**batch).logits, rtol=1e-5, atol=1e-5)
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = theirs.generate(
        **text, max_new_tokens=9, do_sample=False, num_beams=1, eos_token_id=1, forced_eos_token_id=None
    )
    assert_chooses(ours, text, expected, end=0)
    export_hf(ours.named_parameters(), config, tmp_path / "back")
    before, after = (stored(tmp_path / kind) for kind in ("theirs", "back"))
    for name, tensor in after.items():
        if "embed_positions" in name:
            torch.testing.assert_close(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name]), name
    assert before.keys() - after.keys() <= {"lm_head.weight"}


def test_import_of_unsupported_biases_is_refused(tmp_path):
    theirs = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(
            vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=40,
            decoder_ffn_dim=40, encoder_attention_heads=4, decoder_attention_heads=4,
        )
    )  # fmt: skip
    torch.nn.init.ones_(theirs.model.encoder.layers[0].self_attn.out_proj.bias)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"self_attn\.out_proj\.bias has values"):
        dict(import_hf(tmp_path)[1])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"use_pre_encoder_decoder_layer_norm": False}, "use_pre_encoder_decoder_layer_norm"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"d_kv": 12}, "d_kv"),
        ({"embeddings_alpha": 3.0}, "embeddings_alpha"),
        ({"share_embedding_weights": False}, "share_embedding_weights"),
    ],
)
def test_what_pegasus_cannot_express_is_refused_with_the_key(changes, key, tmp_path):
    model = model_of(**changes)
    with pytest.raises(ConfigError) as error:
        export_hf(model.named_parameters(), model.config, tmp_path / "out")
    assert error.value.where == f"model.{key}"
    assert CONVERTERS["transformer"][0].architecture in error.value.what
