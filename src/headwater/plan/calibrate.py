"""How fast this machine computes and moves bytes, and how much of it is free."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from headwater.core.errors import ConfigError
from headwater.core.precision import PrecisionName
from headwater.core.units import MIB
from headwater.plan.types import Resources

FREE_SHARE = 0.9
"""Share of the free memory or disk that a plan takes where the user sets no budget."""

_MATRIX_SHAPES = ((512, 768, 3072), (256, 768, 8192))
_BLOCK_SHAPE = (4, 128, 512, 8)  # sequences, their length, width, heads
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DISK_BYTES, _DISK_CHUNK_BYTES, _DISK_WORKERS = 64 * MIB, 4 * MIB, 4


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Rates of one machine, each the best of a few short runs.

    Attributes:
        fp32_flops_per_s: matrix products in fp32 on the compute device; `bf16_…`, `fp16_…` alike.
        fp32_saved_bytes_per_s: bytes that autograd saves in forward, by the time that forward and backward of
            a transformer block take beyond its matrix products (norms, activation functions, allocation).
        memory_bytes_per_s: bytes read plus bytes written by a copy within the compute device's memory.
        adamw_params_per_s: parameters that fused AdamW updates in host memory.
        link_bytes_per_s: pinned host memory to the device; `None` on CPU.
        disk_read_bytes_per_s: from the folder of the disk tier; `None` where no folder was given.
        disk_write_bytes_per_s: to that folder.
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

    def flops_per_s(self, precision: PrecisionName) -> float:
        """Rate of matrix products in `precision`."""
        return {
            "fp32": self.fp32_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
        }[precision]

    def saved_bytes_per_s(self, precision: PrecisionName) -> float:
        """Saved bytes for each second of training that is not spent in matrix products, in `precision`."""
        return {
            "fp32": self.fp32_saved_bytes_per_s,
            "bf16": self.bf16_saved_bytes_per_s,
            "fp16": self.fp16_saved_bytes_per_s,
        }[precision]


def calibrate(
    device: str = "cpu",
    disk: Path | None = None,
    *,
    recalibrate: bool = False,
    cache: Path | None = None,
) -> Calibration:
    """The rates of this machine, measured in about two seconds or read from the cache of an earlier run.

    Args:
        device: `cpu` or `cuda`.
        disk: folder of the disk tier, to be measured too; it need not exist yet.
        recalibrate: measure even if the cache knows this machine.
        cache: JSON file of earlier measurements; by default in the user's cache folder.

    Raises:
        ConfigError: if nothing can be written to `disk`.
    """
    cache = cache or _cache_file()
    folder = None if disk is None else _existing_ancestor(disk)
    key = _machine_key(device, folder)
    known = _read_cache(cache)
    if recalibrate or key not in known:
        known[key] = _measure(device, folder)
        _write_cache(cache, known)
    return known[key]


def resident_bytes() -> int:
    """Bytes of host memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def free_resources(resources: Resources, device: str) -> Resources:
    """`resources` with every budget that was not set filled in from what the machine has free."""
    host, gpu, disk = resources.host_memory, resources.device_memory, resources.disk_bytes
    if host is None:
        host = resident_bytes() + int(FREE_SHARE * psutil.virtual_memory().available)
    if gpu is None and device != "cpu":
        gpu = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    if disk is None and resources.disk is not None:
        disk = int(FREE_SHARE * shutil.disk_usage(_existing_ancestor(resources.disk)).free)
    return Resources(device_memory=gpu, host_memory=host, disk=resources.disk, disk_bytes=disk)


def _measure(device: str, folder: Path | None) -> Calibration:
    read, write = (None, None) if folder is None else _disk_rates(folder)
    matrix = {name: _matrix_flops_per_s(device, dtype) for name, dtype in _DTYPES.items()}
    saved = {name: _saved_bytes_per_s(device, dtype, matrix[name]) for name, dtype in _DTYPES.items()}
    return Calibration(
        fp32_flops_per_s=matrix["fp32"],
        bf16_flops_per_s=matrix["bf16"],
        fp16_flops_per_s=matrix["fp16"],
        fp32_saved_bytes_per_s=saved["fp32"],
        bf16_saved_bytes_per_s=saved["bf16"],
        fp16_saved_bytes_per_s=saved["fp16"],
        memory_bytes_per_s=_copy_bytes_per_s(device),
        adamw_params_per_s=_adamw_params_per_s(),
        link_bytes_per_s=None if device == "cpu" else _link_bytes_per_s(device),
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
    )


def _best_s(run: Callable[[], object], device: str = "cpu", budget_s: float = 0.05) -> float:
    """Shortest time of `run`: one run to warm up, then at least two and as many as `budget_s` allows."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    times: list[float] = []
    run()
    wait()
    while len(times) < 2 or sum(times) < budget_s:
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _matrix_flops_per_s(device: str, dtype: torch.dtype) -> float:
    """Rate of a linear layer's three products, forward and backward."""
    flops = seconds = 0.0
    for rows, inner, columns in _MATRIX_SHAPES:
        inputs = torch.randn(rows, inner, device=device).to(dtype).requires_grad_()
        weight = torch.randn(columns, inner, device=device).to(dtype).requires_grad_()
        upstream = torch.ones(rows, columns, dtype=dtype, device=device)

        def products(inputs: Tensor = inputs, weight: Tensor = weight, upstream: Tensor = upstream) -> None:
            torch.autograd.grad(functional.linear(inputs, weight), (inputs, weight), upstream)

        flops += 6 * rows * inner * columns
        seconds += _best_s(products, device)
    return flops / seconds


def _saved_bytes_per_s(device: str, dtype: torch.dtype, flops_per_s: float) -> float:
    """Bytes that a transformer block saves, over the time it takes beyond its matrix products."""
    sequences, length, width, heads = _BLOCK_SHAPE
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).to(device, dtype)
    batch = torch.randn(sequences, length, width, device=device).to(dtype)
    saved: dict[int, int] = {param.data_ptr(): 0 for param in layer.parameters()}

    def count(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return tensor

    def train() -> None:
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype != torch.float32):
            output = layer(batch)
        output.sum().backward()

    with saved_tensors_hooks(count, lambda tensor: tensor):
        train()
    tokens = sequences * length
    flops = 3 * 2 * tokens * (12 * width**2 + 2 * length * width)
    seconds = _best_s(train, device)
    # Where products take nearly all of it, the rest is lost in the noise of two measurements.
    return sum(saved.values()) / max(seconds - flops / flops_per_s, 0.05 * seconds)


def _copy_bytes_per_s(device: str) -> float:
    source = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_s(lambda: target.copy_(source), device)


def _link_bytes_per_s(device: str) -> float:
    source = torch.ones(64 * MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    return source.numel() / _best_s(lambda: target.copy_(source, non_blocking=True), device)


def _adamw_params_per_s() -> float:
    param = torch.zeros(4 * MIB, requires_grad=True)
    param.grad = torch.full_like(param, 1e-3)
    return param.numel() / _best_s(torch.optim.AdamW([param], fused=True).step)


def _disk_rates(folder: Path) -> tuple[float, float]:
    """`(read, write)` in bytes/s of a file in `folder`, past the page cache where the file system can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".headwater-calibrate-") as file:
            os.posix_fallocate(file.fileno(), 0, _DISK_BYTES)
            direct = _open_direct(file.name)
            try:
                return _transfer_rates(direct)
            finally:
                os.close(direct)
    except OSError as error:
        raise ConfigError(
            f"the disk tier cannot be measured: {error.strerror}",
            where=str(folder),
            remedy=f"choose a folder that can be written to and has {_DISK_BYTES // MIB} MiB free",
        ) from error


def _transfer_rates(file: int) -> tuple[float, float]:
    def write(offset: int) -> int:
        return os.pwritev(file, [buffers[offset]], offset)

    def read(offset: int) -> int:
        return os.preadv(file, [buffers[offset]], offset)

    offsets = range(0, _DISK_BYTES, _DISK_CHUNK_BYTES)
    # Anonymous maps start on a page, as direct input and output require.
    buffers = {offset: mmap.mmap(-1, _DISK_CHUNK_BYTES) for offset in offsets}
    with ThreadPoolExecutor(_DISK_WORKERS) as pool:

        def write_all() -> None:
            _complete(pool.map(write, offsets))
            os.fsync(file)

        def read_all() -> None:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            _complete(pool.map(read, offsets))

        write_s, read_s = _best_s(write_all), _best_s(read_all)
    return _DISK_BYTES / read_s, _DISK_BYTES / write_s


def _complete(counts: Iterable[int]) -> None:
    if any(count != _DISK_CHUNK_BYTES for count in counts):
        raise OSError(0, "a transfer came up short")


def _open_direct(name: str) -> int:
    """`name` opened past the page cache, or through it on file systems that know no other way."""
    try:
        return os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(name, os.O_RDWR)


def _cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "headwater" / "calibration.json"


def _machine_key(device: str, folder: Path | None) -> str:
    gpu = "" if device == "cpu" else torch.cuda.get_device_name(device)
    parts = (platform.node(), _cpu_model(), torch.__version__, torch.get_num_threads(), device, gpu)
    return "|".join(map(str, (*parts, _mount_point(folder) if folder else "")))


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _existing_ancestor(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _mount_point(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.is_mount())


def _read_cache(cache: Path) -> dict[str, Calibration]:
    """Earlier measurements that still have today's fields; a damaged file counts as none."""
    fields = {field.name for field in dataclasses.fields(Calibration)}
    try:
        known = json.loads(cache.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return {key: Calibration(**rates) for key, rates in dict(known).items() if set(rates) == fields}


def _write_cache(cache: Path, known: dict[str, Calibration]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
    fresh.write_text(json.dumps({key: dataclasses.asdict(rates) for key, rates in known.items()}, indent=1))
    fresh.replace(cache)
