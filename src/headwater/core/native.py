"""C sources of the package, compiled for this machine when they are first used.

[Note: compiled kernels] A kernel is a speed-up that a run can do without. `native_library` returns `None`
if it cannot be had (no compiler, a home that cannot be written to, `HEADWATER_NATIVE=0`), logs the reason
in one line, and the caller uses torch's operators.

A library is stored in the user's cache folder under a name that is a hash of everything that it depends on.
Other users must not be able to put code there: the folder and the file must belong to this user, and others
must not be able to write to them. Several processes may compile at once; the last one to finish replaces an
equal file.

A library uses the copy of OpenMP that torch has loaded. A second copy would have its own threads, which wait
for work beside those of torch, and would not know the limits that torch and `core/threads.py` set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import HeadwaterError, RunError
from headwater.core.scratch import cache_folder
from headwater.core.threads import openmp_library

SWITCH = "HEADWATER_NATIVE"
"""Environment variable. `0`: use no kernels of the package, only those of torch."""

_SOURCES = Path(__file__).resolve().parents[1] / "native"
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-fPIC")
# -z,defs: an unknown function is an error of the linker here, and not a crash of the process that calls it.
_LINK_FLAGS = ("-shared", "-Wl,-z,defs")
_MOST_COMPILE_S = 300.0
_LOCK = threading.Lock()

logger = logging.getLogger(__name__)


def native_library(name: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the library of a C source of this package, or `None` if it cannot be had on this machine.

    The first call for a source compiles it if no earlier process has. It takes seconds then.

    Args:
        name: name of the source in `headwater/native`, without `.c`.
        flags: further flags of the compiler, such as `-ffp-contract=off`.
    """
    with _LOCK:
        return _loaded_once(name, flags)


@functools.cache
def _loaded_once(name: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        logger.debug("%s: torch's kernels are used, because %s is 0", name, SWITCH)
        return None
    try:
        return load(_SOURCES / f"{name}.c", flags)
    except HeadwaterError as error:
        logger.info("%s: torch's kernels are used, because the kernel cannot be built: %s", name, error.what)
        return None


def load(source: Path, flags: Sequence[str] = (), folder: Path | None = None) -> ctypes.CDLL:
    """Return the library of a C source, compiled now or by an earlier process.

    Args:
        source: the C source.
        flags: further flags of the compiler.
        folder: where libraries are stored; by default a folder in the user's cache.

    Raises:
        RunError: if a compiler is missing or cannot compile the source, or if the folder cannot be
            used or might have been written to by others.
    """
    openmp = openmp_library()
    if openmp is None:
        raise RunError("torch has loaded no OpenMP library")
    failures = []
    with _own_folder(folder or _default_folder()) as directory:
        for compiler in _compilers():
            try:
                return _load_stored(source, (*compiler, *_FLAGS, *flags), openmp, directory)
            except OSError as error:
                failures.append(f"{compiler[0]}: {error.strerror or error}")
            except subprocess.SubprocessError as error:
                failures.append(f"{compiler[0]}: {_reason(error)}")
    raise RunError("; ".join(failures) or "no C compiler (cc, gcc, clang) was found")


def _load_stored(source: Path, command: Sequence[str], openmp: Path, directory: int) -> ctypes.CDLL:
    name = f"{source.stem}-{_key(source, command, openmp)}.so"
    if not _is_stored(name, directory):
        _store(_compile(source, command, openmp), name, directory)
    # The name is part of the path: the dynamic linker takes equal paths for one library.
    return ctypes.CDLL(f"/proc/self/fd/{directory}/{name}")


def _default_folder() -> Path:
    root = cache_folder()
    if root is None:
        raise RunError("this user has no home folder")
    return root / "native"


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder into which only this user can write. The folder is made if needed.

    Later accesses use the descriptor. A path could lead to another folder after the check.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    try:
        if not _only_this_user_writes(os.fstat(directory)):
            raise RunError(f"{path}: expected a folder into which only this user can write")
        yield directory
    finally:
        os.close(directory)


def _only_this_user_writes(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compilers() -> list[list[str]]:
    """Return the commands of C compilers to try: `$CC` alone if it is set."""
    chosen = os.environ.get("CC")
    if chosen:
        return [chosen.split()]
    found = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    return [[path] for path in {Path(path).resolve(): path for path in reversed(found)}.values()][::-1]


def _key(source: Path, command: Sequence[str], openmp: Path) -> str:
    """Return a hash of everything on which the library depends."""
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, check=True, timeout=_MOST_COMPILE_S
    )
    parts = (source.read_bytes(), "\0".join(command).encode(), version.stdout, _processor_flags())
    whole = hashlib.sha256()
    for part in (*parts, str(openmp).encode()):
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:32]


def _processor_flags() -> bytes:
    """Return what the processor can do: hosts with one home folder may differ in it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else []
    return next((line for line in lines if line.lower().startswith((b"flags", b"features"))), b"")


def source_digest(name: str) -> str:
    """Return a short hash of a C source of this package.

    Args:
        name: name of the source in `headwater/native`, without `.c`.
    """
    return hashlib.sha256((_SOURCES / f"{name}.c").read_bytes()).hexdigest()[:12]


def processor_flags() -> frozenset[str]:
    """Return the names of the processor's features as Linux reports them, such as `avx512_bf16`."""
    return frozenset(_processor_flags().decode().partition(":")[2].split())


def _compile(source: Path, command: Sequence[str], openmp: Path) -> bytes:
    """Return the bytes of the library of `source`.

    Raises:
        SubprocessError: if the compiler fails or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        parts, library = Path(folder) / "parts.o", Path(folder) / "library.so"
        # Linked in a second step without -fopenmp, which would add the system's copy of OpenMP.
        link = (command[0], *_LINK_FLAGS, str(parts), str(openmp), "-lm", "-o", str(library))
        for step in ((*command, "-c", str(source), "-o", str(parts)), link):
            subprocess.run(step, capture_output=True, check=True, timeout=_MOST_COMPILE_S)
        return library.read_bytes()


def _reason(error: subprocess.SubprocessError) -> str:
    """Return the first error in the compiler's message, or else the text of the exception."""
    message = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (message or b"").decode(errors="replace").strip().splitlines() or str(error).splitlines()
    return next((line for line in lines if "error" in line or "undefined" in line), lines[0])


def _is_stored(name: str, directory: int) -> bool:
    """True if the library exists.

    Raises:
        RunError: if others could have written it.
    """
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or not _only_this_user_writes(found):
        raise RunError(f"{name}: expected a file that only this user can write")
    return True


def _store(library: bytes, name: str, directory: int) -> None:
    """Write a library. Another process sees the whole file or none."""
    partial = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(partial, flags, 0o700, dir_fd=directory), "wb") as file:
        file.write(library)
    os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
