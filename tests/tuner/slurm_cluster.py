"""A real Slurm on this machine, on loopback, with ports and keys of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import patient_s

CONFIGURATION = """\
ClusterName=moetunetest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=100000
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
MailProg=/bin/true
SlurmdTimeout={down_after_s}
KillWait={kill_wait_s}
PartitionName=lab Nodes={nodes} Default=YES MaxTime=60 State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000\n"
)


class Cluster:
    """Daemons that a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

    def start_controller(self, *, clean: bool = False) -> None:
        self._run("/usr/sbin/slurmctld", *(["-c"] if clean else []))

    def start_node(self, name: str) -> None:
        self._run("/usr/sbin/slurmd", "-N", name)

    def kill(self, daemon: str) -> None:
        """Kill a daemon (`slurmctld`, `slurmd.n1`) outright; what it had started goes on."""
        file = self.folder / f"{daemon}.pid"
        pid = int(file.read_text())
        os.kill(pid, signal.SIGKILL)
        Cluster.wait_for(lambda: not Path(f"/proc/{pid}").exists(), what=f"{daemon} to be gone")
        file.unlink()

    def lose_node(self, name: str) -> None:
        """Kill all that runs on a node, at once, as a loss of power does."""
        self.kill(f"slurmd.{name}")
        # The second process of an srun ends the step when the first one is gone.
        for process in sorted(self._processes_on(name), key=_is_outlived):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def end_jobs(self) -> None:
        """Kill what jobs have started, whatever became of their nodes."""
        for process in self._of_jobs():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes_on(self, name: str) -> set[psutil.Process]:
        lost = set()
        for process in self._of_jobs():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name:
                    lost.add(process)
                    lost |= {one for one in process.parents() if "slurmstepd" in one.name()}
        return lost

    def _of_jobs(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                is_ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
                if is_ours and "SLURM_JOB_ID" in environment:
                    yield process

    def tend(self) -> bool:
        """Do what an administrator does: put nodes back that Slurm has taken out of service.

        Returns whether there was none.

        A controller that was killed before it wrote down a job gives the job's id to the next one,
        and drains the node that runs the former one still.
        """
        out = self.ask("sinfo", "--noheader", "--Node", "--states=down,drain", "--format=%N")
        if out.split():
            self.ask("scontrol", "update", f"NodeName={','.join(out.split())}", "State=RESUME")
        return not out.split()

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout

    @staticmethod
    def wait_for(holds: Callable[[], object], *, what: str, limit_s: float = 300.0) -> None:
        """Wait until something holds."""
        until_s = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until_s:
                pytest.fail(f"waited {limit_s:.0f} s in vain for {what}")
            time.sleep(0.1)

    def wait_for_saved_state(self) -> None:
        """Wait until the controller has written what is known now."""
        now_s = time.time()
        file = self.folder / "state" / "job_state"
        self.wait_for(
            lambda: file.exists() and file.stat().st_mtime > now_s, what="the state to be saved"
        )

    def jobs(self) -> list[str]:
        """Ids of the jobs that run or may run."""
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def _run(self, *command: str) -> None:
        subprocess.run(
            command, env=self.environment, check=True, capture_output=True, timeout=patient_s(60)
        )


def _is_outlived(process: psutil.Process) -> tuple[bool, bool]:
    """Sort an srun behind everything else, and its first process behind the second."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        is_first = parent is None or parent.name() != "srun"
        return (process.name() == "srun", is_first)
    return (False, False)


@contextlib.contextmanager
def running_cluster(*, nodes: int, down_after_s: int, kill_wait_s: int = 3) -> Iterator[Cluster]:
    """Start nodes n1, n2, ... of two cores; whatever is left of them at the end is ended.

    Args:
        nodes: how many.
        down_after_s: when a node that does not answer is down (SlurmdTimeout).
        kill_wait_s: between SIGTERM and SIGKILL (KillWait).
    """
    programs = ("/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/munged", "sbatch")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {missing or 'nothing more'}: apt-get install slurm-wlm munge")
    # Not below pytest's own folder, which is closed to the user that munge runs as.
    folder = Path(tempfile.mkdtemp(prefix="moetune-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    one = Cluster(folder)
    munge: subprocess.Popen[bytes] | None = None
    names = [f"n{number + 1}" for number in range(nodes)]
    try:
        munge = _start_munge(folder)
        for name in ("state", *(f"spool.{name}" for name in names)):
            (folder / name).mkdir()
        controller, *ports = _free_ports(1 + nodes)
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(
            folder=folder,
            host=host,
            controller=controller,
            down_after_s=down_after_s,
            kill_wait_s=kill_wait_s,
            nodes=",".join(names),
        )
        text += "".join(
            _NODE.format(name=name, host=host, port=port)
            for name, port in zip(names, ports, strict=True)
        )
        (folder / "slurm.conf").write_text(text)
        one.start_controller(clean=True)
        for name in names:
            one.start_node(name)
        idle = ("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
        Cluster.wait_for(lambda: len(one.ask(*idle).split()) == nodes, what="nodes to be idle")
        yield one
    finally:
        subprocess.run(
            ["scancel", "--user=root"], env=one.environment, check=False, capture_output=True
        )
        for daemon in (*(f"slurmd.{name}" for name in names), "slurmctld"):
            if (folder / f"{daemon}.pid").exists():
                one.kill(daemon)
        one.end_jobs()
        if munge is not None:
            munge.kill()
            munge.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start_munge(folder: Path) -> subprocess.Popen[bytes]:
    own = folder / "munge"
    own.mkdir()
    own.chmod(0o755)
    key = own / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for path in (own, key):
        shutil.chown(path, "munge")
    files = [f"--{name}-file={own / name}" for name in ("key", "log", "pid", "seed")]
    process = subprocess.Popen(
        ["/usr/sbin/munged", "--foreground", f"--socket={own / 'socket'}", *files],
        user="munge",
        group="munge",
        extra_groups=[],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    Cluster.wait_for((own / "socket").exists, what="munge")
    return process


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
