"""Nodes on one machine: network namespaces whose only way to each other is slow and far.

Needs root, `ip`, `tc` with the token bucket filter, and /dev/net/tun; tests skip without. What is
made carries this process's number in its name and is taken down whatever happens.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.expect import present
from tests.patience import patient_s

RELAY = Path(__file__).with_name("relay.py")
PORT = 29717
BURST_BYTES = 262144


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """Nodes that are up."""

    namespaces: tuple[str, ...]

    def shape(self, node: int, *, rate: str) -> None:
        """Limit what a node sends."""
        limit = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "30ms")
        _run(
            *("ip", "netns", "exec", self.namespaces[node]),
            *("tc", "qdisc", "replace", "dev", f"n{node}", "root", *limit),
        )

    def run(
        self, command: Sequence[str], *, ranks_per_node: int = 1, timeout_s: float = 240.0
    ) -> tuple[subprocess.CompletedProcess[str], ...]:
        """Run a command as ranks on every node, as srun would, and wait for all."""
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(self._started(command, rank, ranks_per_node))
                for rank in range(ranks_per_node * len(self.namespaces))
            ]
            return tuple(_finished(rank, timeout_s=timeout_s) for rank in ranks)

    def run_all_but(
        self, lost: int, command: Sequence[str], *, timeout_s: float = 240.0
    ) -> tuple[subprocess.CompletedProcess[str] | None, ...]:
        """Run one rank a node, and wait for all but one, which is then ended."""
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(self._started(command, rank, 1))
                for rank in range(len(self.namespaces))
            ]
            return tuple(
                None if rank == lost else _finished(process, timeout_s=timeout_s)
                for rank, process in enumerate(ranks)
            )

    @contextmanager
    def _started(
        self, command: Sequence[str], rank: int, ranks_per_node: int
    ) -> "Iterator[subprocess.Popen[str]]":
        node = rank // ranks_per_node
        environment: Mapping[str, str] = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks_per_node * len(self.namespaces)),
            "LOCAL_RANK": str(rank % ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "10.91.0.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": f"n{node}",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[node], *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def _finished(
    process: "subprocess.Popen[str]", *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=patient_s(timeout_s))
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def emulated_cluster() -> Iterator[Callable[..., EmulatedCluster]]:
    """A function that brings up nodes: `emulated_cluster(nodes=4, rate="1gbit", delay_s=1e-3)`."""
    if reason := _lacking():
        pytest.skip(reason)
    with ExitStack() as stack:

        def up(*, nodes: int, rate: str, delay_s: float) -> EmulatedCluster:
            return stack.enter_context(_up(nodes=nodes, rate=rate, delay_s=delay_s))

        yield up


@contextmanager
def _up(*, nodes: int, rate: str, delay_s: float) -> Iterator[EmulatedCluster]:
    spaces = tuple(f"moetune-{os.getpid()}-{node}" for node in range(nodes))
    devices = [f"mt{os.getpid() % 10**7}n{node}" for node in range(nodes)]
    with ExitStack() as stack:
        for space in spaces:
            _run("ip", "netns", "add", space)
            stack.callback(_run, "ip", "netns", "del", space)
        relay = subprocess.Popen(
            [sys.executable, "-P", str(RELAY), str(delay_s), *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(_ended, relay)
        assert present(relay.stdout).readline() == "ready\n"
        cluster = EmulatedCluster(namespaces=spaces)
        for node, (space, device) in enumerate(zip(spaces, devices, strict=True)):
            inside = ("ip", "-n", space)
            _run("ip", "link", "set", device, "netns", space, "name", f"n{node}")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "addr", "add", f"10.91.0.{node + 1}/24", "dev", f"n{node}")
            _run(*inside, "link", "set", f"n{node}", "mtu", "9000", "up")
            cluster.shape(node, rate=rate)
        yield cluster


def _lacking() -> str:
    if os.geteuid() != 0:
        return "emulated nodes need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"emulated nodes need {missing[0]}"
    if not Path("/dev/net/tun").exists():
        return "emulated nodes need /dev/net/tun"
    probe = f"moetune-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
    except subprocess.CalledProcessError:
        return "network namespaces cannot be made here"
    try:
        _run(
            *("ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", "lo", "root"),
            *("tbf", "rate", "1gbit", "burst", str(BURST_BYTES), "latency", "30ms"),
        )
    except subprocess.CalledProcessError:
        return "this kernel has no token bucket filter"
    finally:
        _run("ip", "netns", "del", probe)
    return ""


def _ended(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=patient_s(30.0))
