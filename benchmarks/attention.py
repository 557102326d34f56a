"""CPU time of attention in bf16, the package's kernel beside torch's: `python -m benchmarks.attention`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.options import positive
from benchmarks.padding import add_padding_argument, text_mask
from benchmarks.runner import Row, is_part, save
from headwater.core.attention import AttentionKernel, attention_kernel_available, fused_attention

_TOKENS, _HEADS = 2048, 12
_KERNELS: tuple[AttentionKernel, ...] = ("torch", "auto")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[128, 512, 2048, 8192], help="tokens of a sequence"
    )
    parser.add_argument("--sizes", type=positive, nargs="+", default=[64, 128], help="elements of a head")
    add_padding_argument(parser)
    parser.add_argument("--rounds", type=positive, default=5, help="measurements of each kernel, in turns")
    return parser


def _inputs(length: int, size: int) -> list[Tensor]:
    shape = (max(1, _TOKENS // length), length, _HEADS, size)
    return [torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]


def _cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def _mask(sequences: int, length: int, padding: float) -> Tensor | None:
    """Return a causal mask that hides the padding; `None` without padding."""
    if padding == 0:
        return None
    seen = text_mask(sequences, length, padding)
    return seen[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()


def _times(length: int, size: int, rounds: int, padding: float) -> dict[AttentionKernel, tuple[float, float]]:
    """Return the seconds of forward and backward by kernel, the best of some rounds in turns."""
    tensors = _inputs(length, size)
    mask = _mask(len(tensors[0]), length, padding)
    gradient = torch.randn_like(tensors[0])
    best = dict.fromkeys(_KERNELS, (float("inf"), float("inf")))
    for _ in range(1 + rounds):  # the first one warms up
        for kernel in _KERNELS:
            outputs: list[Tensor] = []

            def forward(kernel: AttentionKernel = kernel, outputs: list[Tensor] = outputs) -> None:
                output = fused_attention(*tensors, causal=mask is None, mask=mask, kernel=kernel)
                outputs.append(output)

            def backward(outputs: list[Tensor] = outputs) -> None:
                torch.autograd.grad(outputs[0], tensors, gradient)

            found = _cpu_s(forward), _cpu_s(backward)
            best[kernel] = (min(best[kernel][0], found[0]), min(best[kernel][1], found[1]))
    return best


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if not attention_kernel_available():
        print("this machine does not use the kernel", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{_HEADS} heads, causal, ms of CPU time of one thread, forward + backward", flush=True)
    rows: list[Row] = []
    for size in args.sizes:
        for length in args.lengths:
            times = _times(length, size, args.rounds, args.padding)
            torch_s, kernel_s = sum(times["torch"]), sum(times["auto"])
            texts = [" + ".join(f"{1e3 * part:.1f}" for part in times[kernel]) for kernel in _KERNELS]
            sequences = max(1, _TOKENS // length)
            print(
                f"size {size}, {sequences} × {length}: torch {texts[0]}, kernel {texts[1]}, "
                f"ratio {torch_s / kernel_s:.2f}",
                flush=True,
            )
            row: Row = {"size": size, "length": length, "ratio": round(torch_s / kernel_s, 2)}
            rows.append(row | {f"{kernel}_s": times[kernel] for kernel in _KERNELS})
    part = is_part(parser, args, "lengths", "sizes", "padding")
    print(save("attention", rows, part=part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
