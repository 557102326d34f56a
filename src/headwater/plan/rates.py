"""The rates of a machine, as they were measured."""

from __future__ import annotations

import dataclasses

from headwater.core.precision import PrecisionName

ADAMW_BYTES = 28
"""Bytes that the update of an fp32 parameter reads (weight, gradient, two moments) and writes."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Rates at which one machine computes and moves bytes; each is the best of a few short runs.

    Attributes:
        fp32_flops_per_s: matrix products in fp32 on the compute device; likewise `bf16_…` and `fp16_…`.
        fp32_saved_bytes_per_s: bytes that autograd saves in forward, divided by the time of forward and
            backward of a transformer block outside of its matrix products and attention (norms, activation
            functions, allocation).
        memory_bytes_per_s: bytes read plus bytes written by a copy within the compute device's memory.
        adamw_params_per_s: fp32 parameters that AdamW updates in host memory, or others with as many bytes
            (`ADAMW_BYTES` each).
        link_bytes_per_s: pinned host memory to the device; `None` on CPU.
        disk_read_bytes_per_s: from the folder of the disk tier; `None` if no folder was given.
        disk_write_bytes_per_s: to the same folder.
        fp32_attention_flops_per_s: torch's fused attention, forward and backward; that of matrix products if
            `None`.
        kernel_attention_flops_per_s: the package's kernel of attention in bf16 (`core.attention`), forward
            and backward; `None` if this machine does not use it.
        new_bytes_per_s: bytes of new pages that the cores get from the system, clear and return; `None` if it
            was not measured. Pages then cost no time.
    """

    fp32_flops_per_s: float
    bf16_flops_per_s: float
    fp16_flops_per_s: float
    fp32_saved_bytes_per_s: float
    bf16_saved_bytes_per_s: float
    fp16_saved_bytes_per_s: float
    memory_bytes_per_s: float
    adamw_params_per_s: float
    link_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    fp32_attention_flops_per_s: float | None = None
    bf16_attention_flops_per_s: float | None = None
    fp16_attention_flops_per_s: float | None = None
    kernel_attention_flops_per_s: float | None = None
    new_bytes_per_s: float | None = None

    def flops_per_s(self, precision: PrecisionName) -> float:
        """Floating-point operations per second of matrix products in `precision`."""
        return {
            "fp32": self.fp32_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
        }[precision]

    def attention_flops_per_s(self, precision: PrecisionName) -> float:
        """Floating-point operations per second of fused attention in `precision`."""
        found = {
            "fp32": self.fp32_attention_flops_per_s,
            "bf16": self.bf16_attention_flops_per_s,
            "fp16": self.fp16_attention_flops_per_s,
        }[precision]
        return found or self.flops_per_s(precision)

    def saved_bytes_per_s(self, precision: PrecisionName) -> float:
        """Bytes saved per second of training time outside of matrix products, in `precision`."""
        return {
            "fp32": self.fp32_saved_bytes_per_s,
            "bf16": self.bf16_saved_bytes_per_s,
            "fp16": self.fp16_saved_bytes_per_s,
        }[precision]
