"""Connection of the ranks of a launcher: rank 0's address, and the NIC that each rank uses.

Rank 0 keeps a store (torch.distributed.TCPStore) at an address that all ranks know. Every rank
writes its own address there, as seen on the route to rank 0, and waits for the others; ranks that
do not arrive in time are named.

On a host whose name resolves to a loopback address (127.0.1.1 in /etc/hosts, Debian's default) gloo
would listen where no other host can connect. So a rank whose address is loopback takes the NIC that
leads to a rank on another host, if there is one. GLOO_SOCKET_IFNAME overrides this.

Slurm's node names need not be host names; for a name that does not resolve, `scontrol show node` is
asked (its NodeAddr).

Not covered: NCCL, which finds its NICs itself (NCCL_SOCKET_IFNAME, NCCL_IB_HCA).
"""

import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # stub

from profilers.errors import RankError
from profilers.ranks import RankInfo

SCONTROL_TIMEOUT_S: Final = 30.0
"""Seconds that scontrol may take."""
DISCARD_PORT: Final = 9
"""Port for looking up a route, where any will do; nothing is sent."""
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedRanks:
    """Store and NIC that a rank uses once all are connected."""

    store: TCPStore
    nic: str
    """NIC that leads to the other ranks; empty if unknown."""


def wait_for_ranks(info: RankInfo, *, patience_s: float) -> ConnectedRanks:
    """Wait until all ranks are connected.

    Raises:
        RankError: rank 0 cannot be found or reached, or a rank does not arrive in time.
    """
    address = address_of(info.master_address, is_slurms=bool(info.node_name))
    where = f"{info.master_address}:{info.master_port}"
    try:
        store = TCPStore(
            address,
            info.master_port,
            world_size=info.world,
            is_master=info.rank == 0 and not info.store_is_served,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RankError(_no_store(info, error, where=where, patience_s=patience_s)) from error
    keys = [f"moetune-at-{rank}" for rank in range(info.world)]
    store.set(keys[info.rank], own_address(towards=address))
    try:
        store.wait(keys, timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise RankError(_describe_missing(store, keys, patience_s=patience_s)) from error
    addresses = [text.decode("ascii", "replace") for text in store.multi_get(keys)]
    through = nic(local_address=addresses[info.rank], others=addresses)
    return ConnectedRanks(store=store, nic=through)


def address_of(host: str, *, is_slurms: bool) -> str:
    """Return a name or address at which a host can be reached.

    Raises:
        RankError: the host is unknown.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        address_field = slurms_address(host) if is_slurms else ""
        if not address_field:
            raise RankError(
                f"{host!r}, where rank 0 should run, is no host that this one knows; export"
                " MASTER_ADDR=<address of rank 0's host> to all ranks"
            ) from error
        return address_field
    return host


def slurms_address(node: str) -> str:
    """Ask Slurm for the address of a node; empty if it does not say."""
    program = shutil.which("scontrol")
    if program is None or not _NODE_NAME.fullmatch(node):
        return ""
    try:
        done = subprocess.run(
            [program, "show", "node", "--oneliner", node],
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    address_field = re.search(r"(?<!\S)NodeAddr=(\S+)", done.stdout)
    return address_field.group(1) if address_field else ""


def own_address(*, towards: str) -> str:
    """Return this host's address on the route to another host; loopback if there is no route."""
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, DISCARD_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def nic(*, local_address: str, others: Sequence[str]) -> str:
    """Choose the NIC through which the others are reached; empty if unknown."""
    outside = [address for address in others if not _is_loopback(address)]
    if _is_loopback(local_address) and outside:
        local_address = own_address(towards=outside[0])
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(entry.address.partition("%")[0] == local_address for entry in addresses):
            return name
    # All of 127.0.0.0/8 is loopback, though only its first address is listed.
    return "lo" if _is_loopback(local_address) else ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _no_store(info: RankInfo, error: RuntimeError, *, where: str, patience_s: float) -> str:
    if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
        return (
            f"port {info.master_port} of rank 0's host is taken; export MASTER_PORT=<a free port>"
            " to all ranks"
        )
    return (
        f"rank {info.rank} did not reach rank 0 at {where} within {patience_s:.0f} s; see whether"
        " rank 0 runs, or export MASTER_ADDR and MASTER_PORT to all ranks"
    )


def _describe_missing(store: TCPStore, keys: Sequence[str], *, patience_s: float) -> str:
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "rank 0, which keeps the store, left before all ranks had connected"
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {len(keys)} ranks did not connect within {patience_s:.0f} s: {named};"
        " look for their errors on their nodes"
    )
