"""A real SSH server on loopback, with configuration, keys and port of the test, and its client's options."""

import contextlib
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import quick_start
from headwater.appliance.remote.connection import Connection

SSHD = "/usr/sbin/sshd"
_SOURCES = Path(__file__).resolve().parents[2] / "src"


def free_port():
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Sshd:
    """An SSH server that this user may log in to with a key, on 127.0.0.1.

    Commands over SSH use the queue in `queue_dir`, and this Python with the sources of the checkout.
    """

    def __init__(self, folder, queue_dir):
        assert Path(SSHD).exists(), "install openssh-server"
        self.folder, self.port = folder, free_port()
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        folder.mkdir()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root does not start without it
        for name in ("host", "user", "stranger"):
            path = folder / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        shutil.copyfile(folder / "user.pub", folder / "authorized")
        self.command = folder / "headwater"
        python = f"{shlex.quote(sys.executable)} -P -m headwater"
        self.command.write_text(f'#!/bin/sh\necho a login script prints this\nexec {python} "$@"\n')
        self.command.chmod(0o755)
        variables = {
            "HEADWATER_QUEUE_DIR": queue_dir,
            "PYTHONPATH": quick_start.with_site(str(_SOURCES)),
            "OMP_NUM_THREADS": 1,
            "CUDA_VISIBLE_DEVICES": "",
            "XDG_STATE_HOME": folder / "state",
            "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
            quick_start.NO_PICTURES: "1",
        }
        lines = [
            f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/authorized", "StrictModes no", "UsePAM no", "PidFile none",
            "PermitRootLogin yes", "PasswordAuthentication no", "KbdInteractiveAuthentication no",
            "MaxStartups 100", "SetEnv " + " ".join(f'"{key}={value}"' for key, value in variables.items()),
        ]  # fmt: skip
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.write_client_config("user")
        self._process = None

    def write_client_config(self, key, port=None):
        """Write the configuration of the client, with one of the keys in the folder."""
        known = f"[127.0.0.1]:{self.port} {(self.folder / 'host.pub').read_text()}"
        (self.folder / "known_hosts").write_text(known)
        lines = [
            "Host wafer", "HostName 127.0.0.1", f"Port {port or self.port}", f"User {self.user}",
            f"IdentityFile {self.folder}/{key}", "IdentitiesOnly yes", "IdentityAgent none",
            f"UserKnownHostsFile {self.folder}/known_hosts", "GlobalKnownHostsFile none",
            "StrictHostKeyChecking yes", "BatchMode yes",
        ]  # fmt: skip
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")

    @property
    def variables(self):
        """The environment variables of a client."""
        config = shlex.quote(str(self.folder / "ssh_config"))
        return {"HEADWATER_SSH": f"ssh -F {config}", "HEADWATER_APPLIANCE_COMMAND": str(self.command)}

    def start(self):
        """Start the server, and return when it listens."""
        words = [SSHD, "-D", "-e", "-f", self.folder / "sshd_config"]
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(words, stderr=log)
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "sshd.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.02)

    def stop(self):
        """End the server and all its connections. Jobs continue."""
        if self._process is None:
            return
        for process in [psutil.Process(self._process.pid), *self._descendants()]:
            try:
                if "sshd" in process.name() or "stdio" in process.cmdline():
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        self._process = None

    def _descendants(self):
        return psutil.Process(self._process.pid).children(recursive=True)


@contextlib.contextmanager
def cutting(pause_s, most, after=lambda: True):
    """Kill the connections of this process `most` times; returns the list of the killed processes.

    It begins when `after` returns true. A connection is killed some time after the server has answered. If it
    were killed earlier, the pauses between attempts would grow, on a slow machine to minutes.
    """
    stop, cuts, answered, connected = threading.Event(), [], {}, Connection._connected

    def connect(self):
        process = connected(self)
        answered.setdefault(process, time.monotonic())
        return process

    def cut():
        while not stop.wait(pause_s / 10):
            for process, since in list(answered.items()) if after() else ():
                if len(cuts) < most and time.monotonic() - since > pause_s:
                    del answered[process]
                    if process._process.returncode is None:
                        process._process.kill()
                        cuts.append(process._process.pid)

    thread = threading.Thread(target=cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_connected", connect)
        thread.start()
        try:
            yield cuts
        finally:
            stop.set()
            thread.join()
