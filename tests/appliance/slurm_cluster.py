"""A Slurm cluster of one node on loopback: its own ports, keys and folders, and nothing left afterwards."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NUM_CSX = 4

CONFIGURATION = """\
ClusterName=headwater
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
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
NodeName={host} NodeAddr=127.0.0.1 CPUs={num_csx} Gres=csx:{num_csx} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """The first program of Slurm that is not here."""
    return next((program for program in PROGRAMS if shutil.which(program) is None), None)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def daemon(place, *command):
    """A process until the end; what it says is in a file."""
    with (place / f"{command[0]}.out").open("w") as output:
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
        said = (place / f"{Path(process.args[0]).name}.out").read_text()
        assert process.poll() is None and time.monotonic() < limit, said
        time.sleep(0.1)


@contextmanager
def cluster():
    """The path of its configuration, which every program of Slurm reads from SLURM_CONF."""
    with tempfile.TemporaryDirectory(prefix="headwater-slurm-") as name, ExitStack() as stack:
        place, munge, host = Path(name), Path(name) / "munge", socket.gethostname().split(".")[0]
        place.chmod(0o755)
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o600)
        text = CONFIGURATION.format(place=place, host=host, ports=free_ports(2), num_csx=NUM_CSX)
        (place / "slurm.conf").write_text(text)
        (place / "gres.conf").write_text(f"Name=csx Count={NUM_CSX}\n")
        (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
        files = ("key-file", "pid-file", "log-file", "seed-file", "socket")
        words = [f"--{option}={munge / option.removesuffix('-file')}" for option in files]
        munged = stack.enter_context(daemon(place, "munged", "--foreground", "--force", *words))
        wait_for((munge / "socket").exists, munged, place)
        configured = ("-f", environment["SLURM_CONF"])
        controller = stack.enter_context(daemon(place, "slurmctld", "-D", *configured))
        node = stack.enter_context(daemon(place, "slurmd", "-D", "-N", host, *configured))

        def ask(*command):
            return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

        wait_for(lambda: "idle" in ask("sinfo", "--noheader", "--format=%T"), controller, place)
        stack.callback(wait_for, lambda: not ask("squeue", "--noheader"), node, place)
        stack.callback(ask, "scancel", "--full", "--signal=KILL", "--user=root")
        stack.callback(ask, "scancel", "--user=root")
        yield environment["SLURM_CONF"]
