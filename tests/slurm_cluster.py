"""A Slurm cluster on loopback with separate ports, keys and folders, which are removed afterwards."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NUM_CSX = 4

CONFIGURATION = """\
ClusterName=headwater
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,sched_interval=1,batch_sched_delay=0
MpiDefault=none
GresTypes=csx
KillWait=3
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} \
CPUs={num_csx} Gres=csx:{num_csx} State=UNKNOWN
"""


def missing():
    """Return the first program of Slurm that is not installed."""
    return next((program for program in PROGRAMS if shutil.which(program) is None), None)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def output_of(place, command):
    """Return the file of a daemon's output; its name ends in the last word of the command."""
    return place / f"{Path(command[0]).name}-{Path(command[-1]).name}.out"


@contextmanager
def daemon(place, *command):
    """Run a process inside the context, with its output in a file."""
    with output_of(place, command).open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(condition, process, place, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        said = output_of(place, process.args).read_text()
        assert process.poll() is None and time.monotonic() < limit, said
        time.sleep(0.1)


def host_name():
    """Return Slurm's name for this machine."""
    return socket.gethostname().split(".")[0]


@contextmanager
def cluster(*names):
    """Run a cluster; yield the path of its configuration, which Slurm's programs read from SLURM_CONF.

    Args:
        names: the names of the nodes, each a daemon on this machine; by default one, named like the machine.
    """
    names = names or (host_name(),)
    with tempfile.TemporaryDirectory(prefix="headwater-slurm-") as folder, ExitStack() as stack:
        place, munge = Path(folder), Path(folder) / "munge"
        place.chmod(0o755)
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        port, *ports = free_ports(1 + len(names))
        nodes = [
            NODE.format(name=name, host=host_name(), port=own, num_csx=NUM_CSX)
            for name, own in zip(names, ports, strict=True)
        ]
        text = CONFIGURATION.format(place=place, host=host_name(), port=port, nodes="".join(nodes))
        (place / "slurm.conf").write_text(text)
        (place / "gres.conf").write_text(f"Name=csx Count={NUM_CSX}\n")
        (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
        files = ("key-file", "pid-file", "log-file", "seed-file", "socket")
        words = [f"--{option}={munge / option.removesuffix('-file')}" for option in files]
        munged = stack.enter_context(daemon(place, "munged", "--foreground", "--force", *words))
        wait_for((munge / "socket").exists, munged, place)
        configured = ("-D", "-f", environment["SLURM_CONF"])
        controller = stack.enter_context(daemon(place, "slurmctld", *configured))
        daemons = [stack.enter_context(daemon(place, "slurmd", *configured, "-N", name)) for name in names]

        def ask(*command):
            return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

        def states():
            return ask("sinfo", "--noheader", "--Node", "--format=%T").split()

        wait_for(lambda: states() == ["idle"] * len(names), controller, place)
        stack.callback(wait_for, lambda: not ask("squeue", "--noheader"), daemons[0], place)
        stack.callback(ask, "scancel", "--full", "--signal=KILL", "--user=root")
        stack.callback(ask, "scancel", "--user=root")
        yield environment["SLURM_CONF"]
