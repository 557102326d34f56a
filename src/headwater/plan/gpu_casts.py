"""Autocast and the RMSNorm of a GPU for dry runs, which compute on tensors of the CPU.

[Note: casts of a GPU]
Autocast casts other operators on a GPU than on a CPU. For example a LayerNorm runs in fp32 on a GPU and in
16 bits on a CPU, so autograd saves twice as many bytes on a GPU. A build of torch for CPUs cannot train
tensors of a GPU, not even fake ones. So a dry run for a GPU casts tensors of the CPU by the rules of the
GPU.

Autocast of each kind of device is a key of torch's dispatcher. Operators that it casts have a kernel for
this key. `casts_of_gpu` turns on the key of a kind of device for which torch has no kernels, in the calling
thread alone. The kernels that are registered here cast by the rules of the GPU if the thread is under an
autocast of the CPU. So a part of a forward that leaves autocast is not cast here either.

On a GPU one kernel computes RMSNorm and saves its input alone. On a CPU several operators compute it, and
autograd saves the normalized values too: in fp32 they are a fifth of all bytes that a Llama saves. So the
kernel for RMSNorm calls operators that save as much as the kernel of a GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from headwater.core.errors import PlanError


def _names(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


LOWER_PRECISION = _names(
    """
    _convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell
    _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv
    prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """
)
"""Operators that run in the dtype of autocast: matrix products, convolutions, cells of RNNs."""

FP32 = _names(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss
    kl_div l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist
    poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh
    smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """
)
"""Operators whose inputs are cast to fp32: norms, losses, powers, interpolation."""

FP32_RESULT = _names(
    """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
    prod.dim_int softmax.int sum sum.dim_IntList
    """
)
"""Operators that get `dtype=torch.float32`, unless the caller gives a dtype: softmax and sums."""

FP32_OVERLOAD = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators without the argument `dtype` -> the overload that has it and is called with fp32."""

WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """
)
"""Operators that run in the widest dtype of their inputs. `cat` and `stack` do so without autocast."""

REFUSED = ("binary_cross_entropy",)
"""Operators for which a GPU raises an error under autocast. The dry run neither casts nor refuses them."""

_ONLY_ON_CPU = "aten::mkldnn_rnn_layer"
"""An LSTM of the CPU. A GPU runs another operator, which is cast in the same way."""

_NAME = "AutocastIPU"
"""The dispatch key under which the kernels are registered. torch has no kernel for it."""

Kernel = Callable[..., Any]

_RMS_NORM = torch.ops.aten.rms_norm.default


@contextmanager
def casts_of_gpu() -> Iterator[None]:
    """Enter a context in which autograd saves under autocast what it saves on a GPU.

    See [Note: casts of a GPU].
    """
    with _LOCK:  # without it, two threads that plan at once may both register
        key = _registered()
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


def policies() -> dict[str, str]:
    """Return the name of each operator that these lists name -> the name of its list."""
    lists = {
        "lower precision": LOWER_PRECISION,
        "fp32": FP32,
        "fp32 result": FP32_RESULT,
        "fp32 overload": FP32_OVERLOAD,
        "widest": WIDEST,
        "refused": REFUSED,
    }
    return {f"aten::{name}": policy for policy, names in lists.items() for name in names}


_LOCK = threading.Lock()
_LIBRARIES: list[torch.library.Library] = []
"""The registrations, which end when these objects are freed."""


@functools.cache
def _registered() -> DispatchKey:
    """Register the kernels once in a process, and return their dispatch key.

    Raises:
        PlanError: if this version of torch has no such key.
    """
    key = torch._C._parse_dispatch_key(_NAME)
    if key is None:
        raise PlanError(
            f"torch {torch.__version__} has no dispatch key {_NAME}, which a plan for a GPU in 16 bits needs",
            remedy="use a version of torch from 2.11 to 2.13",
        )
    rest, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((rest, aten))
    # Without this fallback, an operator that has no kernel for the key would raise an error.
    rest.fallback(torch.library.fallthrough_kernel, _NAME)
    on_gpu, on_cpu = _cast_operators("AutocastCUDA"), _cast_operators("AutocastCPU")
    known = policies()
    for name in sorted(on_gpu | on_cpu - {_ONLY_ON_CPU}):
        policy = known.get(name) if name in on_gpu else None
        if policy == "lower precision" and name in on_cpu:
            continue  # the kernel of the CPU casts in the same way
        aten.impl(name.removeprefix("aten::"), _kernel(_operator(name), policy, key), _NAME, with_keyset=True)
    if _RMS_NORM.name() not in on_gpu:  # torch 2.11 does not cast it
        aten.impl("rms_norm", _kernel(_RMS_NORM, "uncast", key), _NAME, with_keyset=True)
    return key


def _cast_operators(key: str) -> set[str]:
    """Return the names of torch's operators that have a kernel for a dispatch key, such as `aten::exp`."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    # Other packages register kernels for their operators, too.
    return {name for name in names if name.startswith("aten::")}


def _operator(name: str) -> OpOverload:
    """Return an operator by its name, such as `aten::softmax.int`."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, base), overload or "default")
    return found


def _kernel(operator: OpOverload, policy: str | None, key: DispatchKey) -> Kernel:
    """Return the kernel of an operator, which casts its inputs by a policy. `None` means without casts."""
    autocasts = DispatchKeySet(key).add(DispatchKey.AutocastCPU)
    below = torch._C._dispatch_keyset_full_after(DispatchKey.AutocastCPU)
    cast = _CASTS.get(policy or "")

    def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if cast is None or not torch.is_autocast_enabled("cpu"):
            # Operators that this one calls are still cast.
            return operator.redispatch(keys & below, *args, **kwargs)
        # As in torch's kernels, operators that this one calls are not cast again.
        with torch._C._ExcludeDispatchKeyGuard(autocasts):
            return cast(operator, args, kwargs)

    return kernel


def _lower_precision(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call_in(torch.get_autocast_dtype("cpu"), operator, args, kwargs)


def _fp32(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call_in(torch.float32, _rms_norm if _saves_as_on_gpu(operator) else operator, args, kwargs)


def _uncast_rms_norm(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _rms_norm(*args, **kwargs) if _saves_as_on_gpu(operator) else operator(*args, **kwargs)


def _saves_as_on_gpu(operator: OpOverload) -> bool:
    """True for RMSNorm, outside of derivatives of torch.func, which do not allow saved-tensor hooks."""
    refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return operator is _RMS_NORM and refusal is None


def _rms_norm(
    input: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Return the normalized input. Autograd saves the input, and a few numbers for each row."""
    width = tuple(range(-len(shape), 0))
    epsilon = torch.finfo(input.dtype).eps if eps is None else eps
    scale = torch.rsqrt(input.pow(2).mean(width, keepdim=True) + epsilon)
    normalized = input * scale
    if weight is None:
        return normalized
    place = normalized.untyped_storage()._cdata

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        return None if tensor.untyped_storage()._cdata == place else tensor

    def unpack(kept: torch.Tensor | None) -> torch.Tensor:
        return input.detach() * scale.detach() if kept is None else kept

    with saved_tensors_hooks(pack, unpack):
        return normalized * weight


def _fp32_result(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = kwargs | dict(zip(names, args, strict=False))
    if given.get("dtype") is None and _is_eligible(args[0]):
        given["dtype"] = torch.float32
    return operator(**given)


def _fp32_overload(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    other = _operator(FP32_OVERLOAD[operator.name().removeprefix("aten::")])
    # The other overload has no default values for these arguments.
    left_out = (argument.default_value for argument in operator._schema.arguments[len(args) :])
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    return other(*args, *left_out, dtype=dtype)


def _widest(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    has_fp32 = any(tensor.dtype == torch.float32 for tensor in tensors)
    return _call_in(torch.float32 if has_fp32 else torch.get_autocast_dtype("cpu"), operator, args, kwargs)


_CASTS: dict[str, Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]] = {
    "lower precision": _lower_precision,
    "fp32": _fp32,
    "fp32 result": _fp32_result,
    "fp32 overload": _fp32_overload,
    "widest": _widest,
    "uncast": _uncast_rms_norm,
}
"""Name of a list of operators -> the function that calls such an operator."""


def _call_in(
    dtype: torch.dtype, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call an operator with its floating-point inputs cast to `dtype`."""
    args, kwargs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor, (args, kwargs)
    )
    return operator(*args, **kwargs)


def _is_eligible(tensor: torch.Tensor) -> bool:
    """True if autocast casts a tensor: a floating-point one, but not of fp64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64
