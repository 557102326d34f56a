"""Initializers of encoder-decoders: T5, the first transformer, and muP."""

import pytest

from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.models.seq2seq_parameters import initializers


def make(name="t5", stack="encoder", **keys):
    sizes = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_heads": 4, "encoder_num_hidden_layers": 8}
    return initializers(Seq2SeqConfig(name=name, **sizes | keys), stack)


def test_initializers_of_t5():
    found = make(initializer_factor=2.0)
    assert found.embedding.std == 2.0
    assert found.key_value.std == found.ffn_input.std == found.attention_output.std == 2 * 64**-0.5
    assert found.query.std == pytest.approx(2 * 64**-0.5 / 4)
    assert found.ffn_output.std == 2 * 256**-0.5


def test_initializers_of_the_first_transformer():
    found = make("transformer")
    assert {each.name for each in (found.query, found.key_value, found.ffn_output)} == {"xavier_uniform"}
    assert (found.key_value.gain, found.ffn_input.gain) == (1 / 3, 1.0)
    assert found.embedding.name == "truncated_normal"


def test_mup_shrinks_outputs_with_the_depth_of_their_stack():
    mup = {"mup_base_d_model": 16, "mup_base_d_ff": 64, "decoder_num_hidden_layers": 2}
    encoder, decoder = (make(stack=stack, **mup) for stack in ("encoder", "decoder"))
    assert encoder.embedding.std == 64**-0.5
    assert encoder.attention_output.std == pytest.approx(64**-0.5 / 4)
    assert decoder.attention_output.std == pytest.approx(64**-0.5 / 2)
    assert encoder.ffn_output.std == pytest.approx(256**-0.5 / 4)


def test_inputs_of_the_attention_output_are_the_heads_unless_their_size_is_constant():
    keys = {"d_kv": 8, "mup_base_d_model": 16, "mup_base_d_ff": 64}
    assert make(**keys).attention_output.std == pytest.approx(64**-0.5 / 4)
    assert make(**keys, mup_base_d_kv=4).attention_output.std == pytest.approx(32**-0.5 / 4)
