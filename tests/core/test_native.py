"""C sources that are compiled when they are first used: who may write the libraries, and their threads."""

import logging
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headwater.core import native
from headwater.core.attention import attention_kernel_available
from headwater.core.errors import RunError
from headwater.core.native import SWITCH, finding, load, native_library, processor_flags, store_finding
from headwater.core.threads import openmp_library
from headwater.core.worker_pools import single_core_pool
from read_only import another_user

SOURCE = """
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
int omp_get_max_threads(void);
int most_threads(void) { return omp_get_max_threads(); }
int number(void) { return NUMBER; }
static void join(void *members) { __atomic_fetch_add((int *)members, 1, __ATOMIC_RELAXED); }
int team(void) {
    int members = 0;
    GOMP_parallel(join, &members, 0, 0);
    return members;
}
"""
FLAGS = ("-DNUMBER=7",)
KERNELS = ("adam", "attention", "few_rows", "masked_products")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "sample.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "libraries"


@pytest.fixture
def no_memory():
    """Forget what this process has loaded, before and after a test."""
    native._loaded_once.cache_clear()
    yield
    native._loaded_once.cache_clear()


def forbid_compiling(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native._Build, "compile", fail)


def test_a_library_is_compiled_once_and_found_again(source, folder, monkeypatch):
    assert load(source, FLAGS, folder).number() == 7
    (stored,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and stored.stat().st_mode & 0o077 == 0
    forbid_compiling(monkeypatch)
    assert load(source, FLAGS, folder).number() == 7


def test_every_compiler_of_this_machine_compiles_the_kernels(folder, monkeypatch):
    for compiler in filter(shutil.which, ("gcc", "clang")):
        monkeypatch.setenv("CC", compiler)
        for name in KERNELS:
            if name != "attention" or attention_kernel_available():
                assert load(native._SOURCES / f"{name}.c", (), folder)


def test_another_source_or_flag_is_another_library(source, folder):
    first = load(source, FLAGS, folder)
    assert load(source, ("-DNUMBER=8",), folder).number() == 8
    source.write_text(SOURCE.replace("return NUMBER", "return NUMBER + 1"))
    assert load(source, FLAGS, folder).number() == 8
    assert first.number() == 7 and len(list(folder.iterdir())) == 3


def test_another_header_is_another_library(source, folder):
    source.with_name("inner.h").write_text("#define INNER 1\n")
    source.with_name("outer.h").write_text('#include "inner.h"\n')
    source.write_text('#include "outer.h"\nint inner(void) { return INNER; }\n')
    assert load(source, (), folder).inner() == 1
    source.with_name("inner.h").write_text("#define INNER 2\n")
    assert load(source, (), folder).inner() == 2
    source.with_name("inner.h").unlink()
    with pytest.raises(RunError, match=r"inner\.h: No such file"):
        load(source, (), folder)


def test_a_stored_library_needs_no_compiler(source, folder, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    assert load(source, FLAGS, folder).number() == 7
    monkeypatch.setenv("PATH", str(folder))
    assert load(source, FLAGS, folder).number() == 7
    monkeypatch.setenv("CC", "/nonexistent/cc")  # whose library it is not
    with pytest.raises(RunError, match="nonexistent"):
        load(source, FLAGS, folder)


def test_another_processor_has_another_library(source, folder, monkeypatch):
    load(source, FLAGS, folder)
    facts = dict(native._processor_facts())
    monkeypatch.setattr(native, "_processor_facts", lambda: {**facts, "model": "other"}.items())
    load(source, FLAGS, folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda code: code[:-100], lambda code: b"", lambda code: bytes(len(code))]
)
def test_a_damaged_library_is_compiled_again(source, folder, damage):
    assert load(source, FLAGS, folder).number() == 7
    (stored,) = folder.iterdir()
    whole = stored.read_bytes()
    stored.unlink()  # this process has mapped its pages
    stored.write_bytes(damage(whole))
    stored.chmod(0o700)
    assert load(source, FLAGS, folder).number() == 7
    assert list(folder.iterdir()) == [stored] and stored.stat().st_size == len(whole)


def test_a_library_uses_the_threads_of_torch(source, folder):
    library = load(source, FLAGS, folder)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert library.most_threads() == library.team() == count
    finally:
        torch.set_num_threads(before)
    with single_core_pool(1, "alone") as pool:
        assert pool.submit(library.team).result() == 1
    names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len({name for name in names if "libgomp" in name or "libomp" in name or "libiomp" in name}) == 1


@pytest.mark.real_start
@pytest.mark.parametrize("first", ["copy", "torch"])
def test_a_second_copy_of_openmp_is_not_taken_for_that_of_torch(first, tmp_path):
    """Other packages have their own (scikit-learn, for example). If it is loaded first, torch may use it."""
    copy = shutil.copy(openmp_library(), tmp_path / "libgomp-copy.so")
    steps = {"copy": f"ctypes.CDLL({str(copy)!r})", "torch": "import torch"}
    code = f"""
import ctypes
{steps.pop(first)}
{steps.popitem()[1]}
from headwater.core.threads import one_core, openmp_library
with one_core():
    print(torch.get_num_threads(), openmp_library())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    cores, path = done.stdout.split()
    assert cores == "1" and (first == "copy" or Path(path) == openmp_library())


@pytest.mark.parametrize("compiler", ["false", "/nonexistent/cc", "echo"])
def test_a_compiler_that_fails_is_an_error_with_its_name(source, folder, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(RunError, match=compiler):
        load(source, FLAGS, folder)
    assert not list(folder.iterdir())


def test_the_compiler_may_have_arguments(source, folder, monkeypatch):
    monkeypatch.setenv("CC", "env -u UNUSED cc '-DNUMBER=5'")
    assert load(source, (), folder).number() == 5
    monkeypatch.setenv("CC", " ")  # as if it were not set
    assert load(source, FLAGS, folder).number() == 7
    monkeypatch.setenv("CC", "cc '")
    with pytest.raises(RunError, match="variable CC"):
        load(source, FLAGS, folder)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_compiler_that_hangs_is_ended_with_all_its_processes(source, folder, tmp_path, monkeypatch):
    compiler, started = tmp_path / "slow", tmp_path / "started"
    compiler.write_text(
        f"#!/bin/sh\nsleep 1000 &\necho $! > {started}.part\nmv {started}.part {started}\nwait\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    def wait_in_vain(process, timeout):
        while not started.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", wait_in_vain)
    with pytest.raises(RunError, match=r"slow: .*timed out"):
        load(source, FLAGS, folder)
    child = int(started.read_text())
    assert any(not is_running(child) or time.sleep(0.01) for _ in range(6000))


def test_the_message_of_the_compiler_is_in_the_error(source, folder):
    source.write_text("int number(void) { return missing; }")
    with pytest.raises(RunError, match=r"sample\.c"):
        load(source, (), folder)


def test_an_unknown_function_is_found_when_the_library_is_made(source, folder):
    source.write_text("int unknown(void);\nint number(void) { return unknown(); }")
    with pytest.raises(RunError, match="unknown"):
        load(source, (), folder)


def test_a_machine_without_a_compiler(source, folder, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RunError, match="no C compiler"):
        load(source, FLAGS, folder)


def test_a_folder_into_which_others_write_is_not_used(source, folder):
    load(source, FLAGS, folder)
    folder.chmod(0o722)
    with pytest.raises(RunError, match="only this user"):
        load(source, FLAGS, folder)


def test_a_folder_of_another_user_is_not_used(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RunError, match="only this user"):
        load(source, FLAGS, tmp_path)


def test_a_link_to_a_folder_is_not_followed(source, folder, tmp_path):
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(RunError, match="libraries"):
        load(source, FLAGS, folder)


def test_a_file_that_others_could_have_written_is_not_loaded(source, folder):
    load(source, FLAGS, folder)
    (stored,) = folder.iterdir()
    stored.chmod(0o722)
    with pytest.raises(RunError, match="only this user"):
        load(source, FLAGS, folder)
    content = stored.read_bytes()
    stored.unlink()
    (folder / "real.so").write_bytes(content)
    stored.symlink_to(folder / "real.so")
    with pytest.raises(RunError, match="only this user"):
        load(source, FLAGS, folder)


def test_a_home_that_cannot_be_written(source, protected):
    with another_user(), pytest.raises(RunError, match="Permission denied"):
        load(source, FLAGS, protected / "cache" / "native")


def test_a_folder_that_cannot_be_written_is_named(source, protected, monkeypatch):
    if not os.geteuid():
        os.chown(protected, 65534, -1)
    code = source.read_bytes()
    monkeypatch.setattr(Path, "read_bytes", lambda path: code)  # which another user could not read
    monkeypatch.setattr(native._Build, "compile", lambda *_: b"")
    with another_user(), pytest.raises(RunError, match=rf"^{protected}: Permission denied"):
        load(source, FLAGS, protected)


def test_a_stored_library_that_cannot_be_read(source, protected, monkeypatch):
    if not os.geteuid():
        os.chown(protected, 65534, -1)
    protected.chmod(0o755)
    code = source.read_bytes()
    monkeypatch.setattr(Path, "read_bytes", lambda path: code)  # which another user could not read
    monkeypatch.setattr(native._Build, "compile", lambda *_: b"not a library")
    flags = ("-DNUMBER=-2",)  # which this process has not loaded from elsewhere
    with another_user():
        with pytest.raises(RunError):
            load(source, flags, protected)
        (stored,) = protected.iterdir()
        stored.chmod(0)
        with pytest.raises(RunError, match=rf"^{stored.name}: Permission denied"):
            load(source, flags, protected)


def test_a_folder_whose_files_cannot_be_executed(source, folder, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    with pytest.raises(RunError, match="noexec"):
        load(source, FLAGS, folder)


def test_a_full_disk_leaves_no_part_of_a_library(source, folder, monkeypatch):
    monkeypatch.setattr(native._Build, "compile", lambda *_: bytes(100_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RunError, match=rf"^{folder}: "):
            load(source, FLAGS, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())


def test_a_library_that_cannot_be_loaded_is_named(source, folder, monkeypatch):
    monkeypatch.setattr(native._Build, "compile", lambda *_: b"not a library")
    with pytest.raises(RunError, match=rf"{folder}/sample-\w+\.so"):
        load(source, ("-DNUMBER=-1",), folder)  # which this process has not loaded from elsewhere


def stored_finding(folder):
    return next(folder.glob("*.finding"))


def test_a_finding_belongs_to_a_library_and_to_its_conditions(source, folder):
    library = load(source, FLAGS, folder)
    assert finding(library, ("a",), folder) is None
    store_finding(library, ("a",), "42", folder)
    assert finding(load(source, FLAGS, folder), ("a",), folder) == "42"
    assert finding(library, ("b",), folder) is finding(library, ("a", ""), folder) is None
    assert finding(load(source, ("-DNUMBER=8",), folder), ("a",), folder) is None
    stored = stored_finding(folder)
    assert stored.stat().st_mode & 0o077 == 0
    # The file of the same name may have been made by another compiler.
    library.checksum = bytes(32)
    assert finding(library, ("a",), folder) is None


def damage(file):
    file.write_bytes(file.read_bytes().replace(b"42", b"43"))


@pytest.mark.parametrize("spoil", [damage, lambda file: file.chmod(0o722), lambda file: file.unlink()])
def test_a_finding_that_is_damaged_or_that_others_could_have_written_is_not_used(source, folder, spoil):
    library = load(source, FLAGS, folder)
    store_finding(library, (), "42", folder)
    assert finding(library, (), folder) == "42"
    spoil(stored_finding(folder))
    assert finding(library, (), folder) is None


def test_a_finding_that_cannot_be_stored_is_not_an_error(source, folder, caplog, monkeypatch):
    library = load(source, FLAGS, folder)
    folder.chmod(0o722)
    with caplog.at_level(logging.DEBUG, logger=native.__name__):
        store_finding(library, (), "42", folder)
        assert finding(library, (), folder) is None
        monkeypatch.setattr(native, "cache_folder", lambda: None)
        store_finding(library, (), "42")
        assert finding(library, ()) is None
    assert len(caplog.records) == 4 and not list(folder.glob("*.finding"))


def load_at(barrier, source, folder, results):
    barrier.wait()
    results.put(load(source, FLAGS, folder).number())


def test_two_processes_compile_at_once(source, folder):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    processes = [context.Process(target=load_at, args=(barrier, source, folder, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(), results.get()] == [7, 7]
    for process in processes:
        process.join()
    assert len(list(folder.iterdir())) == 1


def test_the_switch_and_a_failure_leave_torchs_kernels(no_memory, monkeypatch, caplog, source):
    monkeypatch.setattr(native, "_SOURCES", source.parent)
    with caplog.at_level(logging.DEBUG, logger=native.__name__):
        monkeypatch.setenv(SWITCH, "0")
        assert native_library("sample", FLAGS) is None
        native._loaded_once.cache_clear()
        monkeypatch.delenv(SWITCH)
        assert native_library("sample", FLAGS).number() == 7
        monkeypatch.setenv("CC", "false")
        assert native_library("sample", FLAGS).number() == 7  # loaded once in a process
        assert native_library("sample", ("-DNUMBER=9",)) is None
        assert native_library("sample", ("-DNUMBER=9",)) is None
    levels = [record.levelname for record in caplog.records]
    assert levels == ["DEBUG", "INFO"] and "false" in caplog.text
    assert "to use it, remove the cause that the message names, or name another compiler" in caplog.text


def test_a_user_without_a_home(monkeypatch, source):
    monkeypatch.setattr(native, "cache_folder", lambda: None)
    with pytest.raises(RunError, match="home") as error:
        load(source, FLAGS)
    assert "XDG_CACHE_HOME" in error.value.remedy
    monkeypatch.undo()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent))  # as the remedy says
    assert load(source, FLAGS).number() == 7


def test_the_processor_has_flags():
    listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in listed.splitlines() if line.startswith("Flags:"))
    assert set(line.split()[1:]) == processor_flags()
