"""Several hosts on one machine: network namespaces joined by a switch. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil


def available() -> str | None:
    """Return why this machine cannot run namespaces, or `None` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed"
    name = f"hw{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this system allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Hosts:
    """Hosts, each with an address, that reach each other and no other host.

    Attributes:
        count: number of hosts.

    Args:
        count: number of hosts.
        megabits: megabits that each may send per second; unlimited if not given.
    """

    def __init__(self, count: int, megabits: float | None = None) -> None:
        self.count = count
        self._id = uuid.uuid4().hex[:6]
        self._switch = f"hw{self._id}s"
        self._names = [f"hw{self._id}h{index}" for index in range(count)]
        self._megabits = megabits

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove)
            self._make(self._switch)
            self._ip(self._switch, "link add br0 type bridge")
            self._ip(self._switch, "link set br0 up")
            for index, name in enumerate(self._names):
                self._make(name)
                self._ip(name, f"link add eth0 type veth peer name port{index} netns {self._switch}")
                self._ip(name, f"addr add {self.address(index)}/24 dev eth0")
                self._ip(name, "link set eth0 up")
                self._ip(self._switch, f"link set port{index} master br0 up")
                self._limit(name)
            undo.pop_all()  # the namespace is complete
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _make(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", name], check=True)
        self._ip(name, "link set lo up")

    def _ip(self, name: str, words: str) -> None:
        subprocess.run(["ip", "-n", name, *words.split()], check=True)

    def _limit(self, name: str) -> None:
        if self._megabits is not None:
            burst = max(self._megabits * 1e6 / 8 / 250, 32768)  # bytes that pass in one kernel tick
            words = f"qdisc add dev eth0 root tbf rate {self._megabits}mbit burst {burst:.0f} latency 200ms"
            subprocess.run(["tc", "-n", name, *words.split()], check=True)

    def cut(self, host: int) -> None:
        """Disconnect a host from the network."""
        self._ip(self._names[host], "link set eth0 down")

    def restore(self, host: int) -> None:
        """Connect a host again."""
        self._ip(self._names[host], "link set eth0 up")

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host, in a separate session."""
        words = ["ip", "netns", "exec", self._names[host], *command]
        return subprocess.Popen(words, text=True, start_new_session=True, **options)

    def kill(self) -> None:
        """Kill all processes of all hosts, also those in separate sessions."""
        for host in range(self.count):
            for process in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def processes(self, host: int) -> list[int]:
        """Return the processes of a host."""
        words = ["ip", "netns", "pids", self._names[host]]
        return [int(word) for word in subprocess.run(words, capture_output=True, text=True).stdout.split()]

    @staticmethod
    def wait(
        launchers: Sequence[subprocess.Popen[str]], log: Path, timeout_s: float
    ) -> tuple[list[int], list[str]]:
        """Wait for the launchers; return exit codes and outputs of the hosts. No process remains.

        Args:
            launchers: the processes that `start_ranks` returned.
            log: the folder that `start_ranks` wrote to.
            timeout_s: limit of each, in seconds.

        Raises:
            TimeoutError: if one takes longer; with the output of the hosts and the stacks of their threads.
        """
        try:
            codes = [launcher.wait(timeout_s) for launcher in launchers]
        except subprocess.TimeoutExpired as error:
            for process in _descendants(launchers):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER it prints its threads
            time.sleep(2)
            raise TimeoutError("\n".join([f"after {timeout_s} s:", *_printed(launchers, log)])) from error
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
        return codes, _printed(launchers, log)

    def start_ranks(
        self,
        arguments: Sequence[str],
        ranks: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "headwater"),
    ) -> list[subprocess.Popen[str]]:
        """Start a program as ranks on every host, under `torchrun`.

        Args:
            arguments: the arguments of the program.
            ranks: number of ranks of each host.
            log: a folder for the outputs of the hosts: `host0.log`, …
            environment: variables instead of those of this process.
            program: the program that `torchrun` runs; `headwater` if not given.
        """
        started = []
        for host in range(len(self._names)):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self._names)}"),
                *(f"--node_rank={host}", f"--nproc_per_node={ranks}"),
                *(f"--master_addr={self.address(0)}", "--master_port=29500"),
                *program,
                *arguments,
            ]
            with (log / f"host{host}.log").open("w") as out:
                started.append(
                    self.start(host, command, env=environment, stdout=out, stderr=subprocess.STDOUT)
                )
        return started


def _descendants(launchers: Sequence[subprocess.Popen[str]]) -> list[psutil.Process]:
    """Return all descendants of these launchers: their children, the children of these, and so on."""
    found: list[psutil.Process] = []
    for launcher in launchers:
        with contextlib.suppress(psutil.Error):
            found.extend(psutil.Process(launcher.pid).children(recursive=True))
    return found


def _printed(launchers: Sequence[subprocess.Popen[str]], log: Path) -> list[str]:
    """Return what each host has printed."""
    return [(log / f"host{host}.log").read_text() for host in range(len(launchers))]
