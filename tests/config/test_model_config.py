"""The model section of decoders: effective sizes, rates and ratios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headwater.config import DecoderConfig, InitializerConfig
from headwater.config.sections import LoopConfig


def test_absent_rates_and_sizes():
    model = DecoderConfig(hidden_size=64, num_heads=4, dropout_rate=0.3)
    assert (model.ffn_size, model.embedding_dropout, model.attention_dropout) == (256, 0.3, 0.3)
    given = DecoderConfig(filter_size=100, embedding_dropout_rate=0.0, attention_dropout_rate=0.2)
    assert (given.ffn_size, given.embedding_dropout, given.attention_dropout) == (100, 0.0, 0.2)


def test_attention_scale():
    shape = {"hidden_size": 64, "num_heads": 4}
    assert DecoderConfig(**shape).attention_scale(0) == 0.25
    assert DecoderConfig(**shape, scale_qk_dot_by_d=True).attention_scale(0) == 1 / 16
    assert DecoderConfig(**shape, attention_type="dot_product").attention_scale(0) == 1.0


def test_a_model_is_frozen_and_a_value():
    assert DecoderConfig() == DecoderConfig()
    with pytest.raises(ValidationError, match="frozen"):
        DecoderConfig().hidden_size = 3


def test_mup_ratios():
    model = DecoderConfig(
        hidden_size=1024,
        filter_size=4096,
        num_heads=16,
        mup_base_hidden_size=256,
        mup_base_filter_size=256,
    )
    assert (model.width_ratio, model.filter_ratio, model.logits_scale) == (4, 16, 0.25)


def test_without_mup_every_ratio_is_one():
    model = DecoderConfig(output_logits_alpha=5.0)
    assert (model.width_ratio, model.filter_ratio, model.logits_scale) == (1, 1, 1)


@given(
    mean=st.floats(-1, 1), std=st.floats(1e-3, 1), width=st.floats(0.1, 3), factor=st.floats(1e-3, 10),
    name=st.sampled_from(["truncated_normal", "uniform"]),
)  # fmt: skip
def test_scaled_keeps_the_centre(mean, std, width, factor, name):
    initializer = InitializerConfig(name=name, mean=mean, std=std, a=mean - width, b=mean + width)
    low, high = initializer.scaled(factor).bounds
    assert (low + high) / 2 == pytest.approx(mean, abs=1e-9)
    assert high - low == pytest.approx(2 * width * factor, rel=1e-6, abs=1e-9)
    assert initializer.scaled(factor).std == std * factor


def test_bounds_must_be_in_order():
    with pytest.raises(ValidationError, match="expected a <= b"):
        InitializerConfig(name="uniform", a=1.0, b=0.0)


@given(start=st.integers(0, 50), max_steps=st.integers(1, 100), num_steps=st.integers(1, 100))
def test_the_first_limit_reached_ends_the_loop(start, max_steps, num_steps):
    both = LoopConfig(max_steps=max_steps, num_steps=num_steps).end_step(start)
    assert both == min(
        LoopConfig(max_steps=max_steps).end_step(start), LoopConfig(num_steps=num_steps).end_step(start)
    )
    assert LoopConfig(max_steps=max_steps).end_step(start) == max_steps
    assert LoopConfig(num_steps=num_steps).end_step(start) == start + num_steps


def test_epochs_end_after_their_steps():
    assert LoopConfig(num_epochs=3).end_step(0, steps_per_epoch=7) == 21
    assert LoopConfig(num_epochs=3, steps_per_epoch=5).end_step(0, steps_per_epoch=7) == 15


@pytest.mark.parametrize(
    ("frequency", "interval"), [(10, 10), (0, 0), (None, 0), (1.0, 200), (0.25, 50), (0.001, 1)]
)
def test_eval_interval(frequency, interval):
    assert LoopConfig(max_steps=200, eval_frequency=frequency).eval_interval(200) == interval
