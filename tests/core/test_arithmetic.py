"""Settings of torch for exact and for fast arithmetic on a GPU: set in the context, restored after it."""

import pytest
import torch
import torch.utils.deterministic

from headwater.core.arithmetic import exact_arithmetic, fast_arithmetic
from headwater.core.errors import StreamError
from headwater.core.kernels import context_of
from headwater.stream.device_errors import device_errors


def settings():
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "tf32": (cuda.allow_tf32, cudnn.allow_tf32),
        "narrow sums": (
            cuda.allow_bf16_reduced_precision_reduction,
            cuda.allow_fp16_reduced_precision_reduction,
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "benchmark": cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
    }


@pytest.mark.parametrize("context", [exact_arithmetic, fast_arithmetic])
def test_the_settings_before_are_restored(context):
    before = settings()
    with pytest.raises(ZeroDivisionError), context():
        assert settings() != before
        raise ZeroDivisionError
    assert settings() == before


def test_exact_arithmetic_is_deterministic_and_without_tf32():
    with exact_arithmetic():
        assert settings() == {
            "tf32": (False, False),
            "narrow sums": (False, False),
            "deterministic": (True, False),
            "benchmark": False,
            "fill": False,
        }


def test_an_operator_without_a_deterministic_kernel_is_named():
    x = torch.zeros(4)
    named = pytest.raises(StreamError, match="the operator put_ has no deterministic kernel")
    with named as caught, device_errors(), exact_arithmetic():
        x.put_(torch.tensor([0, 0]), torch.ones(2))
    assert "matmul: fast" in str(caught.value)
    with device_errors(), fast_arithmetic():
        x.put_(torch.tensor([0, 0]), torch.ones(2))


def test_a_users_strict_determinism_stays_strict():
    torch.use_deterministic_algorithms(True)
    try:
        with exact_arithmetic():
            assert settings()["deterministic"] == (True, False)
        assert settings()["deterministic"] == (True, False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_fast_arithmetic_uses_tf32():
    with fast_arithmetic():
        assert settings()["tf32"] == (True, True)


def test_an_engine_on_a_gpu_computes_in_these_contexts():
    assert context_of("exact", "cuda") is exact_arithmetic
    assert context_of("fast", "cuda") is fast_arithmetic
