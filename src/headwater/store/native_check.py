"""A comparison of the native kernel of Adam with torch's own, before the kernel is used.

[Note: the kernel is checked at first use] The bits of torch's kernel depend on its build: on the instructions
that its compiler has chosen, and on the width of its vectors. So the first update of a process runs a few
small updates both ways, with the torch that is installed. The native kernel is used only if every bit agrees.

The comparison takes half a second of a core, so its result is stored beside the library and later processes
use it. `_conditions` lists what the result depends on besides the library and the processor: if one of these
changes, the next process compares again. Only agreement is stored.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from headwater.core.native import Library, finding, native_library, source_digest, store_finding
from headwater.core.process_lock import ProcessLock
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.worker_pools import single_core_pool
from headwater.optim.spec import OptimizerSpec
from headwater.store.layout import Scalars, StageLayout
from headwater.store.masters import Workspaces, write_master
from headwater.store.native_adam import AdamKernel
from headwater.store.native_pieces import NativePieces
from headwater.store.piece_update import PieceUpdate, StageJob
from headwater.store.rule import UpdateRule, stage_layout
from headwater.store.torch_pieces import TorchPieces
from headwater.store.update import Part, Pending, Progress, Update

_SOURCE = "adam"
_FLAGS = ("-fno-math-errno", "-fno-trapping-math")
"""Without these, the loop would not be computed as vectors: a square root might set `errno`, and without
AVX-512 an operation that a condition leaves out might trap. The bits are the same."""

_WIDTHS = (8, 16, 4)
"""Elements in a vector of torch's kernel, the likeliest first: AVX2, AVX-512, NEON."""

_SPECS = (
    OptimizerSpec("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    OptimizerSpec("Adam", {"lr": 3e-2, "weight_decay": 0.01, "eps": 1e-5, "maximize": True}),
    OptimizerSpec("AdamW", {"lr": 0.5, "weight_decay": 0.0, "betas": (0.0, 0.6)}),
)
_SMALL, _LARGE = tuple(range(1, 65)), (20_003,)
"""Sizes of parameters: every remainder of a vector, and a size that the threads of both kernels divide."""

_STEPS = 3
_MOST_EXPONENT = 90
"""Gradients reach 2 to this power, so that second moments overflow but no number becomes NaN."""

_LOCK = ProcessLock()

logger = logging.getLogger(__name__)


def checked_adam() -> AdamKernel | None:
    """Return the native kernel of Adam if its results are bit-identical to torch's, otherwise `None`.

    The first call on a machine takes a fraction of a second, or some seconds if the kernel must be compiled.
    """
    with _LOCK.held():
        return _checked_once()


def adam_in_use() -> str:
    """Return a name for the kernel of Adam that updates weights. It changes with the kernel's source."""
    return "torch" if checked_adam() is None else f"native {source_digest(_SOURCE)}"


@functools.cache
def _checked_once() -> AdamKernel | None:
    library = _library()
    if library is None:  # `native_library` has logged the reason
        return None
    conditions = _conditions()
    known = finding(library, conditions)
    for width in _WIDTHS:
        kernel = AdamKernel(library, width)
        if known == str(width):
            return kernel
        if known is None and agrees(kernel):
            store_finding(library, conditions, str(width))
            return kernel
    logger.info("adam: torch's kernel is used, because the native one is not bit-identical to this build's")
    return None


def _library() -> Library | None:
    """Return the compiled kernel, or `None` if it cannot be built on this machine."""
    return native_library(_SOURCE, _FLAGS)


def _conditions() -> tuple[str, ...]:
    """Return everything that the comparison depends on, besides the library and the processor."""
    kernels = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    file = kernels.stat() if kernels.exists() else None
    return (
        torch.__version__,
        # Two builds of torch may have the same version.
        f"{file.st_size} {file.st_mtime_ns}" if file else torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),  # a variable of the environment may lower it
        str(torch.get_num_threads()),  # the threads divide a large parameter
        str(
            bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1)
        ),  # False if denormal numbers become 0
        _digest_of_updates(),
    )


def _digest_of_updates() -> str:
    """Return a hash of the Python code that prepares and runs an update in both ways."""
    store = Path(__file__).parent
    whole = hashlib.sha256()
    for file in sorted((*store.glob("*.py"), *(store.parent / "optim").glob("*.py"))):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def agrees(kernel: AdamKernel) -> bool:
    """True if a few small updates by a native kernel are bit-identical to torch's."""
    # On one core: with more threads, a barrier after each operator would take seconds on a busy machine.
    with single_core_pool(1, "headwater-check") as pool:
        small = pool.submit(lambda: all(_agrees(kernel, spec, _SMALL) for spec in _SPECS)).result()
    return small and _agrees(kernel, _SPECS[0], _LARGE)


def _agrees(kernel: AdamKernel, spec: OptimizerSpec, sizes: Sequence[int]) -> bool:
    def native(job: StageJob) -> PieceUpdate:
        return NativePieces(job, lambda: kernel)

    def plain(job: StageJob) -> PieceUpdate:
        return TorchPieces(job, Workspaces())

    both = zip(_updated(spec, sizes, native), _updated(spec, sizes, plain), strict=True)
    return all(torch.equal(own, its) for own, its in both)


def _updated(
    spec: OptimizerSpec, sizes: Sequence[int], update: Callable[[StageJob], PieceUpdate]
) -> Iterator[torch.Tensor]:
    """Yield all bytes of a small stage after each of a few updates.

    Args:
        spec: the optimizer.
        sizes: the sizes of the parameters of the stage.
        update: returns an implementation of updates.
    """
    rule = UpdateRule(spec)
    layout = stage_layout(StageSpec(0, "check", _params(sizes)), rule)
    generator = torch.Generator().manual_seed(0)
    image = torch.zeros(layout.wire_bytes, dtype=torch.uint8, device="cpu")
    rest = torch.zeros(layout.rest_bytes, dtype=torch.uint8, device="cpu")
    _fill(layout, image, rest, generator)
    scalars: list[Scalars | None] = [None] * len(sizes)
    for step in range(1, 1 + _STEPS):
        settings = Update(step, {"lr": spec.kwargs["lr"] / step}, max_value=1e20 if step == 2 else None)
        part = Part(
            step, settings, torch.tensor(0.37, dtype=torch.float32, device="cpu") if step > 1 else None
        )
        pending, progress = Pending(step, dict.fromkeys(range(len(sizes)), part)), Progress.of(scalars)
        job = StageJob(layout, rule, image, _gradients(sizes, generator), scalars, pending, progress)
        piece_update = update(job)
        for group in layout.groups:
            piece_update.apply(group.pieces, rest[group.offset : group.offset + group.num_bytes])
        scalars = progress.after
        yield torch.cat([image, rest])


def _params(sizes: Sequence[int]) -> tuple[ParamSpec, ...]:
    """Return parameters of these sizes, whose encodings and dtypes of state differ."""
    return tuple(
        ParamSpec(
            str(index),
            (size,),
            torch.float32,
            torch.float32 if index % 3 == 0 else torch.bfloat16,
            bf16_state=index % 2 == 1,
            exact_cast=index % 3 == 2,
        )
        for index, size in enumerate(sizes)
    )


def _fill(layout: StageLayout, image: torch.Tensor, rest: torch.Tensor, generator: torch.Generator) -> None:
    """Write random masters with many ties. The state stays 0: it has no values before the first update."""
    wires = layout.stage.flat_views(image)
    for piece in (piece for group in layout.groups for piece in group.pieces):
        master = torch.randn(piece.stop - piece.start, dtype=torch.float32, generator=generator, device="cpu")
        tied = master.view(torch.int32)[::5]
        tied.bitwise_and_(-1 << 16).bitwise_or_(1 << 15)  # halfway between two bf16 numbers
        write_master(piece.encoding, master, wires[piece.param], piece.views(rest))


def _gradients(sizes: Sequence[int], generator: torch.Generator) -> list[torch.Tensor | None]:
    """Return gradients with ordinary, huge, tiny and zero elements; their dtypes alternate."""
    count = sum(sizes)
    values = torch.randn(count, dtype=torch.float32, generator=generator, device="cpu")
    exponents = torch.randint(-149, _MOST_EXPONENT, (count,), generator=generator, device="cpu")
    kind = torch.randint(0, 4, (count,), generator=generator, device="cpu")
    values[kind == 1] *= 0.0
    values[kind == 2] *= torch.exp2(exponents[kind == 2].float())
    parts = values.split(list(sizes))
    return [part if index % 4 < 2 else part.to(torch.bfloat16) for index, part in enumerate(parts)]
