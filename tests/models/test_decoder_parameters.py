"""Initializers of decoders: factors of depth and of muP."""

import pytest

from headwater.config import DecoderConfig, InitializerConfig
from headwater.models.decoder_parameters import initializers


def test_output_initializer_shrinks_with_depth_unless_it_is_given():
    found = initializers(DecoderConfig(num_hidden_layers=8))
    assert found.attention_output.std == found.ffn_output.std == pytest.approx(0.02 / 4)
    assert found.attention_output.bounds == pytest.approx((-0.01, 0.01))
    own = InitializerConfig(name="normal", std=0.5)
    assert initializers(DecoderConfig(output_layer_initializer=own)).ffn_output == own


def test_other_initializers_are_equal_unless_given():
    config = DecoderConfig()
    found = initializers(config)
    assert found.reading == found.embedding == found.head == config.matrix_init
    own = InitializerConfig(name="normal", std=0.5)
    assert initializers(DecoderConfig(embedding_initializer=own)).embedding == own


@pytest.mark.parametrize("given", [None, InitializerConfig(name="normal", std=0.08)])
def test_mup_divides_by_the_root_of_the_growth(given):
    """The output initializer of a file with muP does not include the factor of the depth."""
    found = initializers(
        DecoderConfig(
            hidden_size=1024, filter_size=4096, num_heads=16, num_hidden_layers=8, mup_base_hidden_size=256,
            mup_base_filter_size=256, initializer=InitializerConfig(name="normal", std=0.08),
            output_layer_initializer=given,
        )
    )  # fmt: skip
    assert found.embedding.std == 0.08
    assert found.reading.std == pytest.approx(0.08 / 2)
    assert found.attention_output.std == pytest.approx(0.08 / 2 / 4)
    assert found.ffn_output.std == pytest.approx(0.08 / 4 / 4)
