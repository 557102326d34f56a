"""Short runs that measure how fast this machine computes and moves bytes, and whether it was busy."""

from __future__ import annotations

import dataclasses
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from headwater.core.attention import AttentionKernel, attention_kernel_available, fused_attention
from headwater.core.errors import ConfigError
from headwater.core.module_parameters import parameters_of
from headwater.core.units import GIB, MIB
from headwater.plan.rates import ADAMW_BYTES, Calibration
from headwater.plan.update_probe import StageOfAllKinds

QUIET_CPU_SHARE = 0.8
"""A process that gets at least this share of its cores' time is alone on them. A busy process takes half."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MATRIX_SHAPES = ((512, 768, 3072), (512, 768, 4096))
_QUICK_SHAPE = (256, 768, 3072)
_BLOCK_SHAPE = (8, 128, 512, 8)  # sequences, their length, width, heads
_ATTENTION_SHAPE = (1, 4, 1024, 64)  # sequences, heads, length, size of a head
_DEVICE_MATRIX_SHAPES, _DEVICE_BLOCK_SHAPE = ((8192, 4096, 14336),), (4, 2048, 4096, 32)
_DEVICE_ATTENTION_SHAPE = (4, 32, 4096, 128)
_SMALL_DEVICE_MATRIX_SHAPES, _SMALL_DEVICE_BLOCK_SHAPE = ((4096, 2048, 8192),), (4, 1024, 1024, 16)
_SMALL_DEVICE_ATTENTION_SHAPE = (4, 16, 1024, 64)
_SMALL_DEVICE_BYTES = 24 * GIB
"""The shapes above are those of large models, on which a GPU reaches the rates of a run: a small product ends
before the next one is launched. A GPU with less free memory than this gets the small shapes."""
_KERNEL = "attention by the package's kernel"
_TRIAL_SHAPE, _TRIALS = (128, 256, 256), 3  # few rows would make products that convert weights look slow
_SLOW_MATRIX_SHAPES, _SLOW_BLOCK_SHAPE = ((64, 768, 512),), (1, 32, 256, 4)
_SLOW_ATTENTION_SHAPE = (1, 2, 128, 32)
"""Small shapes, for a dtype that the processor only emulates, such as fp16 on most CPUs."""
_SLOW_S = 1.0
_COPY_BYTES, _DEVICE_COPY_SHARE = 64 * MIB, 100
"""On a GPU a copy of 64 MiB takes less time than its launch, so a hundredth of the free memory is copied."""
_NEW_TENSORS, _NEW_TENSOR_BYTES = 16, 4 * MIB
_ADAMW_PARAMS, _DEVICE_ADAMW_PARAMS = 4 * MIB, 32 * MIB
"""More parameters with a GPU, whose host is often a server with a cache of up to 64 MiB."""
_DISK_BYTES, _DISK_CHUNK_BYTES, _DISK_WORKERS = 64 * MIB, 4 * MIB, 4
_MOST_ROUNDS, _BUDGET_S = 5, 2.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """A function to time.

    Attributes:
        run: runs the function once.
        on_cores: True if it only computes, on all threads of torch.
    """

    run: Callable[[], object]
    on_cores: bool


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of some probes.

    Attributes:
        best_s: shortest time of each.
        cpu_share: CPU time of this process, as a share of what its threads would get on idle cores.
    """

    best_s: Mapping[str, float]
    cpu_share: float

    @property
    def quiet(self) -> bool:
        """True if the process got nearly all the time of its cores."""
        return self.cpu_share >= QUIET_CPU_SHARE


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The rates of this machine, and the conditions of their measurement.

    Attributes:
        rates: the rates.
        quick_s: result of `time_quick` at that time.
        cpu_share: see `Timing`.
    """

    rates: Calibration
    quick_s: float
    cpu_share: float


@dataclasses.dataclass(frozen=True)
class _Moved:
    """Bytes that a copy within memory copies, and bytes that an update moves."""

    copied: int
    updated: int


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of the probes of one dtype.

    Attributes:
        matrices: rows, inner size and columns of each matrix product.
        block: number of sequences, their length, width and number of heads.
        attention: number of sequences, number of heads, length and size of a head.
    """

    matrices: tuple[tuple[int, int, int], ...]
    block: tuple[int, int, int, int]
    attention: tuple[int, int, int, int]


def _sizes(device: str, dtype: torch.dtype) -> _Sizes:
    """Return the sizes of the probes: small ones if a trial shows that the usual ones take over a second."""
    if device != "cpu":
        return _device_sizes(torch.cuda.mem_get_info(device)[0])
    factor = sum(map(_flops, _MATRIX_SHAPES)) / _flops(_TRIAL_SHAPE)
    if _trial_s(dtype) * factor > _SLOW_S:
        return _Sizes(_SLOW_MATRIX_SHAPES, _SLOW_BLOCK_SHAPE, _SLOW_ATTENTION_SHAPE)
    return _Sizes(_MATRIX_SHAPES, _BLOCK_SHAPE, _ATTENTION_SHAPE)


def _trial_s(dtype: torch.dtype) -> float:
    """Return the CPU seconds of a small product on one core: the shortest of a few runs.

    It is CPU time, because on a busy machine the wall time makes every dtype look slow. So does the CPU time
    of several threads, which spin while they wait for each other.
    """
    trial, threads, times = _matrix("cpu", dtype, (_TRIAL_SHAPE,)), torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        trial.run()  # the first product of a dtype includes one-time initialization
        for _ in range(_TRIALS):
            start_s = time.thread_time()
            trial.run()
            times.append(time.thread_time() - start_s)
    finally:
        torch.set_num_threads(threads)
    return min(times)


def _device_sizes(free_bytes: int) -> _Sizes:
    """Return the sizes of the probes on a GPU with this much free memory."""
    if free_bytes < _SMALL_DEVICE_BYTES:
        return _Sizes(_SMALL_DEVICE_MATRIX_SHAPES, _SMALL_DEVICE_BLOCK_SHAPE, _SMALL_DEVICE_ATTENTION_SHAPE)
    return _Sizes(_DEVICE_MATRIX_SHAPES, _DEVICE_BLOCK_SHAPE, _DEVICE_ATTENTION_SHAPE)


def measure(device: str, folder: Path | None) -> Measurement:
    """Measure everything in this process, in about two seconds.

    Args:
        device: `cpu` or `cuda`.
        folder: an existing folder of the disk tier, if there is one.

    Returns:
        The rates, and the conditions of the measurement.

    Raises:
        ConfigError: if `folder` cannot be written to.
    """
    with ExitStack() as stack:
        disk = {} if folder is None else stack.enter_context(_disk(folder))
        sizes = {name: _sizes(device, dtype) for name, dtype in _DTYPES.items()}
        blocks = {name: _Block(device, dtype, sizes[name].block) for name, dtype in _DTYPES.items()}
        updates = StageOfAllKinds(_ADAMW_PARAMS if device == "cpu" else _DEVICE_ADAMW_PARAMS)
        # A machine with a GPU has many cores, and only one of them works between two pieces of an update. So
        # the CPU time of an update would not show whether other programs use the cores.
        update = Probe(updates.update, on_cores=device == "cpu")
        copied = _copied_bytes(device)
        probes = {"quick": _quick(device), "copy": _copy(device, copied), "adamw": update} | disk
        for name, dtype in _DTYPES.items():
            probes[f"matrix {name}"] = _matrix(device, dtype, sizes[name].matrices)
            probes |= blocks[name].probes(name)
            probes[f"attention {name}"] = _attention(device, dtype, sizes[name].attention, "torch")
        if device == "cpu" and attention_kernel_available():
            probes[_KERNEL] = _attention(device, torch.bfloat16, sizes["bf16"].attention, "auto")
        probes |= _new_pages() if device == "cpu" else {"link": _link(device)}
        timing = time_probes(probes, device)
    rates = _rates(timing.best_s, blocks, sizes, _Moved(copied, updates.moved_bytes))
    return Measurement(rates, timing.best_s["quick"], timing.cpu_share)


def time_quick(device: str) -> Timing:
    """Measure for a tenth of a second, to compare the machine's speed with an earlier result."""
    return time_probes({"quick": _quick(device)}, device)


def time_probes(probes: Mapping[str, Probe], device: str = "cpu") -> Timing:
    """Time each probe a few times, in turns, so that a short disturbance does not affect all of its runs."""
    best_s = dict.fromkeys(probes, float("inf"))
    wall_s = cpu_s = 0.0
    began_s = time.perf_counter()
    for turn in range(1 + _MOST_ROUNDS):  # turn 0 warms up
        # The first timed turn always runs, so that each probe has a time.
        if turn > 1 and time.perf_counter() - began_s > _BUDGET_S:
            break
        for name, probe in probes.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            probe.run()
            if device != "cpu":
                torch.cuda.synchronize(device)
            took_s = time.perf_counter() - start_s
            if turn > 0:
                best_s[name] = min(best_s[name], took_s)
            if turn > 0 and probe.on_cores:
                wall_s += took_s
                cpu_s += time.process_time() - start_cpu_s
    return Timing(best_s, min(1.0, cpu_s / (wall_s * torch.get_num_threads())) if wall_s else 1.0)


def _rates(
    best_s: Mapping[str, float], blocks: Mapping[str, _Block], sizes: Mapping[str, _Sizes], moved: _Moved
) -> Calibration:
    matrix = {
        name: sum(map(_flops, size.matrices)) / best_s[f"matrix {name}"] for name, size in sizes.items()
    }
    attention = {
        name: _attention_flops(size.attention) / best_s[f"attention {name}"] for name, size in sizes.items()
    }
    saved = {name: block.saved_bytes / _other_s(best_s, name) for name, block in blocks.items()}
    disk = {name: _DISK_BYTES / best_s[name] for name in ("read", "write") if name in best_s}
    return Calibration(
        fp32_flops_per_s=matrix["fp32"],
        bf16_flops_per_s=matrix["bf16"],
        fp16_flops_per_s=matrix["fp16"],
        fp32_saved_bytes_per_s=saved["fp32"],
        bf16_saved_bytes_per_s=saved["bf16"],
        fp16_saved_bytes_per_s=saved["fp16"],
        memory_bytes_per_s=2 * moved.copied / best_s["copy"],
        adamw_params_per_s=moved.updated / ADAMW_BYTES / best_s["adamw"],
        link_bytes_per_s=_COPY_BYTES / best_s["link"] if "link" in best_s else None,
        disk_read_bytes_per_s=disk.get("read"),
        disk_write_bytes_per_s=disk.get("write"),
        fp32_attention_flops_per_s=attention["fp32"],
        bf16_attention_flops_per_s=attention["bf16"],
        fp16_attention_flops_per_s=attention["fp16"],
        kernel_attention_flops_per_s=_kernel_rate(best_s, sizes["bf16"]),
        new_bytes_per_s=_new_bytes_rate(best_s),
    )


def _other_s(best_s: Mapping[str, float], name: str) -> float:
    """Return the seconds of a block that are not spent in products and attention; at least a twentieth.

    If these take nearly all of the time, the difference of the measurements is only noise.
    """
    block_s = best_s[f"block {name}"]
    return max(
        block_s - best_s[f"products of block {name}"] - best_s[f"attention of block {name}"], 0.05 * block_s
    )


def _kernel_rate(best_s: Mapping[str, float], sizes: _Sizes) -> float | None:
    seconds = best_s.get(_KERNEL)
    return None if seconds is None else _attention_flops(sizes.attention) / seconds


def _new_bytes_rate(best_s: Mapping[str, float]) -> float | None:
    if "new pages" not in best_s:
        return None
    # If new pages take hardly longer than old ones, the difference is only noise.
    seconds = max(best_s["new pages"] - best_s["old pages"], 0.05 * best_s["new pages"])
    return _NEW_TENSORS * _NEW_TENSOR_BYTES / seconds


def _flops(shape: tuple[int, int, int]) -> int:
    """Return the FLOPs of a linear layer's three products, forward and backward."""
    rows, inner, columns = shape
    return 6 * rows * inner * columns


def _quick(device: str) -> Probe:
    return _matrix(device, torch.float32, (_QUICK_SHAPE,))


def _matrix(device: str, dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]]) -> Probe:
    layers = []
    for rows, inner, columns in shapes:
        inputs = torch.randn(rows, inner, device=device).to(dtype).requires_grad_()
        weight = torch.randn(columns, inner, device=device).to(dtype).requires_grad_()
        layers.append((inputs, weight, torch.ones(rows, columns, dtype=dtype, device=device)))

    def products() -> None:
        for inputs, weight, upstream in layers:
            torch.autograd.grad(functional.linear(inputs, weight), (inputs, weight), upstream)

    return Probe(products, on_cores=device == "cpu")


def _attention_flops(shape: tuple[int, int, int, int]) -> int:
    """Return the FLOPs of causal attention, two products in forward and five in backward."""
    sequences, heads, length, size = shape
    return 7 * 2 * sequences * heads * (length * (length + 1) // 2) * size


def _attention(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    kernel: AttentionKernel,
    *,
    causal: bool = True,
) -> Probe:
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    upstream = torch.ones(shape, dtype=dtype, device=device)

    def attend() -> None:
        output = fused_attention(query, key, value, causal=causal, kernel=kernel)
        torch.autograd.grad(output, (query, key, value), upstream)

    return Probe(attend, on_cores=device == "cpu")


class _Block:
    """A transformer block that is trained to measure the time that is not spent in matrix products.

    Its products and its attention are also measured alone, in the same sizes, because small ones are slower.
    """

    def __init__(self, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
        sequences, length, width, heads = shape
        self._layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).to(device, dtype)
        self._batch = torch.randn(sequences, length, width, device=device).to(dtype)
        self._dtype = dtype
        self.saved_bytes = self._count_saved()
        rows = sequences * length
        inner_and_columns = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self._products = _matrix(device, dtype, [(rows, *sizes) for sizes in inner_and_columns])
        heads_shape = (sequences, heads, length, width // heads)
        self._attention = _attention(device, dtype, heads_shape, "torch", causal=False)

    def probes(self, name: str) -> dict[str, Probe]:
        """Return the probes of the block in the dtype `name`: all of it, its products, and its attention."""
        return {
            f"block {name}": Probe(self.train, on_cores=self._batch.device.type == "cpu"),
            f"products of block {name}": self._products,
            f"attention of block {name}": self._attention,
        }

    def train(self) -> None:
        """Run one forward and backward."""
        device_type = self._batch.device.type
        with torch.autocast(device_type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            output = self._layer(self._batch)
        output.sum().backward()

    def _count_saved(self) -> int:
        """Return the bytes that autograd saves in one forward, without weights."""
        saved: dict[int, int] = {param.data_ptr(): 0 for param in parameters_of(self._layer)}

        def count(tensor: Tensor) -> Tensor:
            saved.setdefault(tensor.data_ptr(), tensor.numel() * tensor.element_size())
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            self.train()
        return sum(saved.values())


def _copied_bytes(device: str) -> int:
    """Return the bytes of a copy that shows the rate of a device's memory."""
    if device == "cpu":
        return _COPY_BYTES
    free: int = torch.cuda.mem_get_info(device)[0]
    return max(_COPY_BYTES, free // _DEVICE_COPY_SHARE)


def _copy(device: str, num_bytes: int) -> Probe:
    # The source has ones: pages that were never written are all one page of zeros, which stays in the cache.
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Probe(lambda: target.copy_(source), on_cores=device == "cpu")


def _new_pages() -> dict[str, Probe]:
    """Return two probes: one fills tensors in new pages of the system, the other refills one old tensor."""

    def new() -> Tensor:
        # malloc maps a large block like this if it returns pages. In this process it may keep pages instead.
        return torch.frombuffer(mmap.mmap(-1, _NEW_TENSOR_BYTES), dtype=torch.uint8)

    old = new()

    def fill_new() -> None:
        for _ in range(_NEW_TENSORS):
            new().fill_(1)

    def fill_old() -> None:
        for _ in range(_NEW_TENSORS):
            old.fill_(1)

    return {"new pages": Probe(fill_new, on_cores=False), "old pages": Probe(fill_old, on_cores=False)}


def _link(device: str) -> Probe:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    return Probe(lambda: target.copy_(source, non_blocking=True), on_cores=False)


@contextmanager
def _disk(folder: Path) -> Iterator[dict[str, Probe]]:
    """Yield probes for `write` and `read` of a file in `folder`, past the page cache if possible."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # unnamed, since the process may be killed
            os.posix_fallocate(file.fileno(), 0, _DISK_BYTES)
            # Through /proc, because the file has no name.
            direct = _open_direct(f"/proc/self/fd/{file.fileno()}")
            try:
                with ThreadPoolExecutor(_DISK_WORKERS) as pool:
                    yield _transfers(direct, pool)
            finally:
                os.close(direct)
    except OSError as error:
        raise ConfigError(
            f"the disk tier cannot be measured: {error.strerror}",
            where=str(folder),
            remedy=f"choose a folder that can be written to and has {_DISK_BYTES // MIB} MiB free",
        ) from error


def _transfers(file: int, pool: ThreadPoolExecutor) -> dict[str, Probe]:
    offsets = range(0, _DISK_BYTES, _DISK_CHUNK_BYTES)
    # Anonymous maps start on a page, as direct input and output require.
    buffers = {offset: mmap.mmap(-1, _DISK_CHUNK_BYTES) for offset in offsets}

    def write() -> None:
        _complete(pool.map(lambda offset: os.pwritev(file, [buffers[offset]], offset), offsets))
        os.fsync(file)

    def read() -> None:
        # Where direct reads are not supported, the page cache would answer all of them.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        _complete(pool.map(lambda offset: os.preadv(file, [buffers[offset]], offset), offsets))

    return {"write": Probe(write, on_cores=False), "read": Probe(read, on_cores=False)}


def _complete(counts: Iterable[int]) -> None:
    if any(count != _DISK_CHUNK_BYTES for count in counts):
        raise OSError(0, "fewer bytes were read or written than requested")


def _open_direct(name: str) -> int:
    """Open `name` past the page cache, or through it on file systems that do not support that."""
    try:
        return os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(name, os.O_RDWR)
