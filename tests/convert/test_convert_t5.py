"""T5 compared with transformers: logits, losses, greedy decoding, and bit-exact round trips."""

import pytest
import torch
from conversions import assert_chooses, losses_of_a_step, stored

from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats import CONVERTERS
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 40,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
CASES = {
    "t5": {},
    "even": {"num_decoder_layers": None, "d_kv": 8, "layer_norm_epsilon": 1e-5},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "ul2": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    torch.manual_seed(3)
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**{**_SIZES, **CASES[request.param]})
    )
    if "tie_word_embeddings" in CASES[request.param]:
        theirs.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(61, 32))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return theirs, tmp_path


def inputs():
    """Return two sources of different lengths, and their targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 61, (2, 30), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 19:] = 0
    labels = torch.randint(2, 61, (2, 22), generator=generator)
    labels[0, 15:] = -100
    start = torch.zeros(2, 1, dtype=torch.int64)
    decoder_input_ids = torch.cat((start, labels[:, :-1].clamp_min(0)), dim=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_input_ids}, labels


def loaded(folder, **changes):
    config, tensors = import_hf(folder)
    model = build_model(config.model_copy(update=changes)).eval()
    model.load_state_dict(dict(tensors), strict=not config.share_embedding_weights)
    return model


def test_logits_equal_transformers(case):
    theirs, folder = case
    batch, _ = inputs()
    with torch.no_grad():
        expected, ours = theirs(**batch).logits, loaded(folder / "theirs").logits(batch)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_an_export_of_an_import_has_the_same_bits_and_loads(case):
    theirs, folder = case
    model, (batch, _) = loaded(folder / "theirs"), inputs()
    export_hf(model.named_parameters(), model.config, folder / "ours", max_shard_bytes=20_000)
    before, after = (stored(folder / kind) for kind in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    again, info = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, theirs(**batch).logits, rtol=1e-5, atol=1e-5)


def test_training_step_has_the_same_loss(case):
    theirs, folder = case
    batch, labels = inputs()
    model = loaded(folder / "theirs", mlm_loss_scaling="num_masked")
    losses = []
    for module, loss in (
        (model, lambda: model({**batch, "labels": labels})),
        (theirs, lambda: theirs(**batch, labels=labels).loss),
    ):
        losses.append(losses_of_a_step(module, loss))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][1] < losses[0][0]


def test_greedy_decoding_equals_transformers(case):
    theirs, folder = case
    batch, _ = inputs()
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = theirs.generate(
        **batch, max_new_tokens=9, do_sample=False, num_beams=1, eos_token_id=1, pad_token_id=1
    )
    assert_chooses(loaded(folder / "theirs"), batch, expected, end=1)


def test_converters_of_t5_and_ul2_have_the_same_class():
    assert {CONVERTERS[name][0].architecture for name in ("t5", "ul2", "flan-ul2")} == {
        "T5ForConditionalGeneration"
    }


def test_export_refuses_what_the_format_cannot_express(tmp_path):
    sizes = {
        "name": "t5",
        "src_vocab_size": 61,
        "d_model": 32,
        "num_heads": 4,
        "d_ff": 40,
        "encoder_num_hidden_layers": 1,
    }
    for changes, message in (
        ({"norm_type": "layernorm"}, "norm_type"),
        ({"position_embedding_type": "fixed"}, "position_embedding_type"),
        ({"use_ffn_bias": True}, "use_ffn_bias"),
        ({"decoder_nonlinearity": "gelu"}, "decoder_nonlinearity"),
        ({"encoder_nonlinearity": "geglu"}, "encoder_nonlinearity"),
        ({"use_transformer_initialization": True}, "attention_logits_alpha"),
        ({"mup_base_d_model": 8, "mup_base_d_ff": 8}, "embeddings_alpha"),
        ({"tgt_vocab_size": 9, "share_encoder_decoder_embedding": False}, "share_encoder_decoder_embedding"),
    ):
        config = Seq2SeqConfig.model_validate({**sizes, **changes})
        model = build_model(config, device="meta")
        with pytest.raises(ConfigError, match=message):
            export_hf(model.named_parameters(), config, tmp_path / "out")


def test_tensor_of_another_shape_is_refused(case):
    _, folder = case
    config = (folder / "theirs" / "config.json").read_text()
    (folder / "theirs" / "config.json").write_text(config.replace('"d_ff": 40', '"d_ff": 41'))
    _, tensors = import_hf(folder / "theirs")
    with pytest.raises(CheckpointError, match="as in the model's config"):
        dict(tensors)
