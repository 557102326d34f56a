"""C and C++ sources of the package, compiled for this machine when they are first used.

[Note: compiled kernels] Kernels only save time: without them a run uses torch's operators. If a library
cannot be built or loaded (no compiler, a home that cannot be written to, `HEADWATER_NATIVE=0`),
`native_library` logs the reason in one line and returns `None`.

A library is stored in the user's cache folder under a name that is a hash of everything that its results
depend on. The flags forbid compilers to change rounding (`-ffp-contract=off`), so the compiler is part of the
hash only if the user has chosen it. Other users must not be able to put code into the folder: the folder and
the file must belong to this user, and others must not be able to write to them. Several processes may compile
at once; the last one to finish replaces an equal file. A library whose checksum is wrong is compiled again.

A library uses the copy of OpenMP that torch uses. A second copy would have its own threads, which wait
for work beside those of torch, and would not know the limits that torch and `core/threads.py` set. The
sources have no pragmas of OpenMP, which clang translates to functions that the copy of torch may not have.
They call the function to which GCC translates a pragma, and which every copy has.

[Note: findings about a library] A comparison of a library with torch takes longer than loading the library,
and has the same result as long as both are the same files on the same processor. So `store_finding` writes
the result beside the library, for later processes. The name of the file is a hash of the library's bytes and
of all other conditions that the caller names. Other conditions lead to another file, so a finding never
becomes false.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.core.errors import HeadwaterError, RunError
from headwater.core.process_lock import ProcessLock
from headwater.core.scratch import cache_folder
from headwater.core.threads import openmp_library

SWITCH = "HEADWATER_NATIVE"
"""Environment variable. `0`: use no kernels of the package, only those of torch."""

_SOURCES = Path(__file__).resolve().parents[1] / "native"
_FLAGS = (
    *("-fPIC", "-shared"),
    # An unknown function is an error of the linker here, and not a crash of the process that calls it.
    "-Wl,-z,defs",
)
_HEADER = re.compile(rb'^#include "(.+)"', re.MULTILINE)
"""An included header of the package, which is beside the source. Other headers are in angle brackets."""
_MOST_COMPILE_S = 120.0
_CHECKSUM_BYTES = hashlib.sha256().digest_size
# Names of lines in /proc/cpuinfo, on x86 and on ARM. With -march=native the code depends on the model too.
_FEATURES = frozenset({"flags", "Features"})
_TYPE = _FEATURES | {"vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part"}
_LOCK = ProcessLock()

_OTHER_CACHE = "set XDG_CACHE_HOME to another folder, in which this user can write and execute files"


@dataclasses.dataclass(frozen=True)
class _Language:
    """A language of the sources.

    Attributes:
        title: its name.
        variable: environment variable that names the compiler which the user chooses.
        commands: usual commands of compilers.
        flags: flags of each compilation.
    """

    title: str
    variable: str
    commands: tuple[str, ...]
    flags: tuple[str, ...]


# The compiler must not choose which products and sums are rounded together: that would change the bits.
_KERNEL_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off")
_LANGUAGES = {
    ".c": _Language("C", "CC", ("cc", "gcc", "clang"), _KERNEL_FLAGS),
    ".cpp": _Language("C++", "CXX", ("c++", "g++", "clang++"), ("-std=gnu++20", "-O2")),
}

logger = logging.getLogger(__name__)


class Library(ctypes.CDLL):
    """A compiled source.

    Args:
        path: path for the dynamic linker, which ends with the name of the file.
        checksum: the checksum of the file.

    Raises:
        OSError: if the dynamic linker refuses it.
    """

    def __init__(self, path: str, checksum: bytes) -> None:
        super().__init__(path)
        self.file_name = Path(path).name
        self.checksum = checksum


def native_library(name: str, flags: tuple[str, ...] = ()) -> Library | None:
    """Return the library of a source of this package, or `None` if it cannot be built or loaded here.

    The first call for a source compiles it, unless an earlier process has. Compilation takes seconds.

    Args:
        name: name of the source in `headwater/native`, without `.c` or `.cpp`.
        flags: further flags of the compiler, such as `-fno-math-errno`.
    """
    with _LOCK.held():
        return _loaded_once(name, flags)


@functools.cache
def _loaded_once(name: str, flags: tuple[str, ...]) -> Library | None:
    if os.environ.get(SWITCH) == "0":
        logger.debug("the native library %s is not used, because %s is 0", name, SWITCH)
        return None
    try:
        return load(_source(name), flags)
    except HeadwaterError as error:
        text = "the native library %s is not used, because it cannot be built: %s; to use it, %s"
        logger.info(text, name, error.what, error.remedy)
        return None


def _source(name: str) -> Path:
    """Return the path of a source of this package."""
    return next(path for language in _LANGUAGES if (path := _SOURCES / f"{name}{language}").exists())


def load(source: Path, flags: Sequence[str] = (), folder: Path | None = None) -> Library:
    """Return the library of a C or C++ source, compiled now or by an earlier process.

    Args:
        source: the source.
        flags: further flags of the compiler.
        folder: where libraries are stored; by default a folder in the user's cache.

    Raises:
        RunError: if a compiler is missing or cannot compile the source, or if the folder cannot be
            used or might have been written to by others.
    """
    openmp = openmp_library()
    if openmp is None:
        raise RunError("torch has loaded no OpenMP library", remedy="install torch's wheel for Linux")
    language = _LANGUAGES[source.suffix]
    build = _Build(source, language, flags, openmp)
    path = folder or _default_folder()
    failures = []
    with _own_folder(path) as directory:
        name = build.name()
        stored = _stored(name, directory)
        if stored is not None:
            with suppress(OSError):  # made on a host with a newer system and the same home
                return _opened(name, directory, stored[-_CHECKSUM_BYTES:])
        for compiler in _compilers(language):
            try:
                code = build.compile(compiler)
                _store(code, name, directory, path)
                return _opened(name, directory, hashlib.sha256(code).digest())
            except OSError as error:
                # The dynamic linker's error has no number, and names the folder by the descriptor.
                reason = error.strerror or str(error).replace(f"/proc/self/fd/{directory}", str(path))
                failures.append(f"{compiler[0]}: {reason}")
            except subprocess.SubprocessError as error:
                failures.append(f"{compiler[0]}: {_reason(error)}")
    other = f"or name another compiler in the variable {language.variable}"
    if failures:
        raise RunError("; ".join(failures), remedy=f"remove the cause that the message names, {other}")
    commands = ", ".join(language.commands)
    raise RunError(
        f"no {language.title} compiler ({commands}) was found", remedy=f"install one of these, {other}"
    )


@dataclasses.dataclass(frozen=True)
class _Build:
    """Everything from which a library is compiled.

    Attributes:
        source: the source.
        language: the language of the source.
        further: further flags of the compiler.
        openmp: path of the OpenMP library.
    """

    source: Path
    language: _Language
    further: Sequence[str]
    openmp: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the compiler."""
        return (*self.language.flags, *_FLAGS, *self.further)

    def name(self) -> str:
        """Return the name of the library's file, which has a hash of everything on which results depend.

        The compiler is part of the hash only if the user has chosen it. So a resumed run finds its library
        even if the compiler was updated or removed since.

        Raises:
            RunError: if the source cannot be read.
        """
        try:
            code = _with_headers(self.source)
        except OSError as error:
            remedy = "install headwater again, so that this user can read its files"
            raise RunError(f"{error.filename}: {error.strerror}", remedy=remedy) from error
        command = "\0".join((os.environ.get(self.language.variable, ""), *self.flags, str(self.openmp)))
        whole = hashlib.sha256()
        for part in (code, command.encode(), _processor()):
            whole.update(hashlib.sha256(part).digest())
        return f"{self.source.stem}-{whole.hexdigest()[:32]}.so"

    def compile(self, compiler: Sequence[str]) -> bytes:
        """Return the bytes of the library.

        Args:
            compiler: the command of a compiler.

        Raises:
            OSError: if the compiler cannot be run, or temporary files cannot be written.
            SubprocessError: if the compiler fails or takes too long.
        """
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "library.so"
            # Libraries among the flags come after the source that needs them.
            files = (str(self.source), *self.flags, str(self.openmp), "-lm", "-o", str(library))
            _run((*compiler, *files), _MOST_COMPILE_S)
            return library.read_bytes()


def _with_headers(source: Path) -> bytes:
    """Return the text of a source, and of the package's headers that it includes.

    Raises:
        OSError: if a file cannot be read.
    """
    code = source.read_bytes()
    headers = (source.with_name(os.fsdecode(name)) for name in _HEADER.findall(code))
    return b"".join((code, *map(_with_headers, headers)))


def _run(command: Sequence[str], most_s: float) -> bytes:
    """Run a command and return its output. If it takes too long, all its processes are killed.

    Raises:
        OSError: if it cannot be run.
        SubprocessError: if it fails or takes longer than `most_s`.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # In English: `_reason` looks for the word "error".
        env={**os.environ, "LC_ALL": "C"},
        # In a separate group, because the command `cc` starts the compiler as another process.
        process_group=0,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=most_s)
        except BaseException:  # Ctrl-C too: the compiler would run on, so its whole group is ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output


def _default_folder() -> Path:
    root = cache_folder()
    if root is None:
        raise RunError("this user has no home folder", remedy=_OTHER_CACHE)
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
        raise RunError(f"{path}: {error.strerror}", remedy=_OTHER_CACHE) from error
    try:
        if not _only_this_user_writes(os.fstat(directory)):
            expected = "expected a folder into which only this user can write"
            raise RunError(f"{path}: {expected}", remedy=_OTHER_CACHE)
        if os.fstatvfs(directory).f_flag & os.ST_NOEXEC:
            expected = "expected a file system whose files can be executed, got one with noexec"
            raise RunError(f"{path}: {expected}", remedy=_OTHER_CACHE)
        yield directory
    finally:
        os.close(directory)


def _only_this_user_writes(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _compilers(language: _Language) -> Sequence[tuple[str, ...]]:
    """Return the commands of compilers to try: only the user's own choice (`$CC` or `$CXX`) if there is one.

    Raises:
        RunError: if the user's choice is not a command.
    """
    named = os.environ.get(language.variable, "")
    try:
        chosen = shlex.split(named)
    except ValueError as error:
        raise RunError(
            f"expected a command in the variable {language.variable}, got {named!r}",
            remedy="close the quotation in the variable, or unset the variable",
        ) from error
    if chosen:
        return [tuple(chosen)]
    found = [path for name in language.commands if (path := shutil.which(name))]
    # Each compiler is tried once: the first command, such as `cc`, is usually a link to one of the others.
    return [(path,) for path in {Path(path).resolve(): path for path in reversed(found)}.values()][::-1]


def _processor() -> bytes:
    """Return the type and the features of the processor: hosts with one home folder may differ in them."""
    return "\n".join(f"{name} {value}" for name, value in _processor_facts() if name in _TYPE).encode()


def _processor_facts() -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the facts that Linux reports about the first processor; else nothing."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            yield name.strip(), value.strip()


def source_digest(name: str) -> str:
    """Return a short hash of a source of this package, and of its headers.

    Args:
        name: name of the source in `headwater/native`, without `.c` or `.cpp`.
    """
    return hashlib.sha256(_with_headers(_source(name))).hexdigest()[:12]


def processor_flags() -> frozenset[str]:
    """Return the names of the processor's features as Linux reports them, such as `avx512_bf16`."""
    lists = (value for name, value in _processor_facts() if name in _FEATURES)
    return frozenset(flag for flags in lists for flag in flags.split())


def _reason(error: subprocess.SubprocessError) -> str:
    """Return the first error in the compiler's message, or else the text of the exception."""
    message = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (message or b"").decode(errors="replace").strip().splitlines() or str(error).splitlines()
    return next((line for line in lines if "error" in line or "undefined" in line), lines[0])


def finding(library: Library, conditions: Sequence[str], folder: Path | None = None) -> str | None:
    """Return what a process has found out about a library under these conditions, or `None`.

    Args:
        library: the library.
        conditions: everything that the finding depends on, besides the library and the processor.
        folder: where libraries are stored; by default a folder in the user's cache.
    """
    try:
        with _own_folder(folder or _default_folder()) as directory:
            content = _stored(_finding_name(library, conditions), directory)
    except RunError as error:
        logger.debug("findings about %s are not read: %s", library.file_name, error.what)
        return None
    return None if content is None else content[:-_CHECKSUM_BYTES].decode()


def store_finding(
    library: Library, conditions: Sequence[str], found: str, folder: Path | None = None
) -> None:
    """Keep a finding about a library for later processes, if files can be written.

    Args:
        library: the library.
        conditions: everything that the finding depends on, besides the library and the processor.
        found: the finding.
        folder: where libraries are stored; by default a folder in the user's cache.
    """
    try:
        path = folder or _default_folder()
        with _own_folder(path) as directory:
            _store(found.encode(), _finding_name(library, conditions), directory, path)
    except RunError as error:
        logger.debug("findings about %s are not stored: %s", library.file_name, error.what)


def _finding_name(library: Library, conditions: Sequence[str]) -> str:
    whole = hashlib.sha256()
    # The name of the library has a hash of the processor.
    for part in (library.file_name.encode(), library.checksum, *map(str.encode, conditions)):
        whole.update(hashlib.sha256(part).digest())
    return f"{library.file_name.partition('-')[0]}-{whole.hexdigest()[:32]}.finding"


def _opened(name: str, directory: int, checksum: bytes) -> Library:
    """Return a stored library.

    Raises:
        OSError: if the dynamic linker refuses it.
    """
    # The name is part of the path: the dynamic linker takes equal paths for one library.
    return Library(f"/proc/self/fd/{directory}/{name}", checksum)


def _stored(name: str, directory: int) -> bytes | None:
    """Return the content of a file with its checksum; `None` if it does not exist or the checksum is wrong.

    Raises:
        RunError: if others could have written it, or it cannot be read.
    """
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or not _only_this_user_writes(found):
            expected = "expected a file that only this user can write"
            raise RunError(f"{name}: {expected}", remedy=f"remove the file, or {_OTHER_CACHE}")
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{name}: {error.strerror}", remedy=f"remove the file, or {_OTHER_CACHE}") from error
    return content if content == _with_checksum(content[:-_CHECKSUM_BYTES]) else None


def _store(content: bytes, name: str, directory: int, path: Path) -> None:
    """Write a file with a checksum. Another process sees the whole file or none.

    Args:
        content: its bytes.
        name: the name of the file.
        directory: descriptor of the folder.
        path: the path of the folder, for an error.

    Raises:
        RunError: if the file cannot be written.
    """
    partial = f"{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, 0o700, dir_fd=directory), "wb") as file:
            file.write(_with_checksum(content))
        os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        with suppress(OSError):  # on a full disk, a part of the file was written
            os.unlink(partial, dir_fd=directory)
        raise RunError(f"{path}: {error.strerror}", remedy=f"free space there, or {_OTHER_CACHE}") from error


def _with_checksum(content: bytes) -> bytes:
    """Return a content with its checksum at the end, where the dynamic linker does not look.

    A crash of the machine may leave a file whose last pages are zeros. Such code would end the process.
    """
    return content + hashlib.sha256(content).digest()
