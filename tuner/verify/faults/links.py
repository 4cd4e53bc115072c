"""Links of emulated nodes: network namespaces behind a bridge, each node's egress rate-limited.

Every namespace belongs to a small process that waits for the end of its input, so that namespaces,
devices and rates are gone with this process however it ends. Nothing of the host's own network is
touched. The rate is a token bucket (tc-tbf(8)) on what a node sends; a link that is made slow sends
a share of it. Ranks of one node are not limited among themselves.

Needs root, iproute2 and util-linux.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError

DEVICE: Final = "eth0"
"""Of a node, inside its namespace."""
PROGRAMS: Final = ("ip", "tc", "nsenter", "unshare")
BURST_BYTES: Final = 256 * 1024
QUEUE: Final = "50ms"
"""Longest wait in the bucket's queue."""
DEADLINE_S: Final = 10.0
POLL_S: Final = 0.01


@dataclass(slots=True, kw_only=True)
class NodeLinks:
    """The links of all nodes; mutable, as their rates are."""

    bytes_per_s: float
    spaces: list["_Namespace"] = field(default_factory=list)

    def entering(self, node: int) -> tuple[str, ...]:
        """Return the prefix of a command that is to run on a node."""
        return self.spaces[node].entering

    @property
    def environment(self) -> dict[str, str]:
        """Return what ranks on nodes need beyond their other variables."""
        return {"GLOO_SOCKET_IFNAME": DEVICE}

    def set_rate(self, node: int, *, ratio: float = 1.0) -> None:
        """Let a node send a share of the usual rate.

        Raises:
            EnvironmentMissingError: the kernel refuses.
        """
        rate = f"{max(1, round(self.bytes_per_s * ratio * 8))}bit"
        bucket = ("tbf", "rate", rate, "burst", f"{BURST_BYTES}", "latency", QUEUE)
        _run(*self.entering(node), "tc", "qdisc", "replace", "dev", DEVICE, "root", *bucket)


@contextmanager
def node_links(nodes: int, *, bytes_per_s: float) -> Iterator[NodeLinks]:
    """Make the links of some nodes, and remove them in the end.

    Args:
        nodes: at most 250.
        bytes_per_s: that each of them sends at most.

    Raises:
        EnvironmentMissingError: not root, a program is missing, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise EnvironmentMissingError("link: emulated links need root")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise EnvironmentMissingError(f"link: emulated links need the program {missing[0]}")
    links = NodeLinks(bytes_per_s=bytes_per_s)
    with ExitStack() as stack:
        spaces = [stack.enter_context(_namespace()) for _ in range(nodes + 1)]
        *links.spaces, switch = spaces
        switch.run("ip", "link", "add", "br0", "type", "bridge")
        switch.run("ip", "link", "set", "br0", "up")
        for node, space in enumerate(links.spaces):
            port = f"p{node}"
            peer = ("peer", "name", DEVICE, "netns", f"{space.pid}")
            switch.run("ip", "link", "add", port, "type", "veth", *peer)
            switch.run("ip", "link", "set", port, "master", "br0", "up")
            space.run("ip", "link", "set", "lo", "up")
            space.run("ip", "addr", "add", f"10.91.0.{node + 1}/24", "dev", DEVICE)
            space.run("ip", "link", "set", DEVICE, "up")
            links.set_rate(node)
        yield links


@dataclass(frozen=True, slots=True)
class _Namespace:
    """The network namespace of a process."""

    pid: int

    @property
    def entering(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def run(self, *command: str) -> None:
        _run(*self.entering, *command)


@contextmanager
def _namespace() -> Iterator[_Namespace]:
    """Make a network namespace that lasts as long as a process which leaves with this one."""
    process = subprocess.Popen(("unshare", "--net", "cat"), stdin=subprocess.PIPE)
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while not _has_own_network(process):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise EnvironmentMissingError("link: this kernel makes no network namespaces")
            time.sleep(POLL_S)
        yield _Namespace(process.pid)
    finally:
        process.kill()
        process.communicate()


def _has_own_network(process: subprocess.Popen[bytes]) -> bool:
    # A process that has ended has none.
    with suppress(OSError):
        own = Path("/proc/self/ns/net").readlink()
        return Path(f"/proc/{process.pid}/ns/net").readlink() != own
    return False


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        raise EnvironmentMissingError(f"link: {_named(command)}: {lines[0] or done.returncode}")


def _named(command: Sequence[str]) -> str:
    """Return a command without the words that enter a namespace."""
    return " ".join(command[command.index("--") + 1 :])
