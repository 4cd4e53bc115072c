"""How the ranks of a launcher find each other: rank 0's address, and the card that each one uses.

Rank 0 keeps a store (torch.distributed.TCPStore) at an address that all know. Every rank writes
into it where it stands, as seen on the way to rank 0, and waits for the others; whoever does not
come in time is named.

A host that calls itself by a loopback address (127.0.1.1 in /etc/hosts, Debian's usual) would have
gloo listen where nobody from outside can come. So a rank that stands on loopback takes the card
that leads to a rank elsewhere, where there is one. GLOO_SOCKET_IFNAME, where it is set, decides.

Slurm knows its nodes by names that need not be those of hosts; what does not resolve is asked of
`scontrol show node` (its NodeAddr).

Not covered: NCCL, which finds its cards itself (NCCL_SOCKET_IFNAME, NCCL_IB_HCA).
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

ANSWER_S: Final = 30.0
"""For scontrol."""
DISCARD_PORT: Final = 9
"""Any port does to ask for a route; nothing is sent."""
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetRanks:
    """What a rank knows when all have come."""

    store: TCPStore
    address: str
    """Where the store is."""
    card: str
    """That leads to the other ranks; empty where none can be told."""


def met(info: RankInfo, *, patience_s: float) -> MetRanks:
    """Wait until all ranks have come.

    Raises:
        RankError: rank 0 cannot be found or reached, or a rank does not come in time.
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
        raise RankError(_who_is_missing(store, keys, patience_s=patience_s)) from error
    addresses = [text.decode("ascii", "replace") for text in store.multi_get(keys)]
    through = card(own=addresses[info.rank], others=addresses)
    return MetRanks(store=store, address=address, card=through)


def address_of(host: str, *, is_slurms: bool) -> str:
    """Return a name or number under which a host can be reached.

    Raises:
        RankError: nobody knows the host.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        found = slurms_address(host) if is_slurms else ""
        if not found:
            raise RankError(
                f"{host!r}, where rank 0 should run, is no host that this one knows; export"
                " MASTER_ADDR=<address of rank 0's host> to all ranks"
            ) from error
        return found
    return host


def slurms_address(node: str) -> str:
    """Ask Slurm for the address of a node; empty where it does not say."""
    program = shutil.which("scontrol")
    if program is None or not _NODE_NAME.fullmatch(node):
        return ""
    try:
        done = subprocess.run(
            [program, "show", "node", "--oneliner", node],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"(?<!\S)NodeAddr=(\S+)", done.stdout)
    return found.group(1) if found else ""


def own_address(*, towards: str) -> str:
    """Return this host's address on the way to another host; loopback where there is no way."""
    try:
        family, _, _, _, target = socket.getaddrinfo(towards, DISCARD_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def card(*, own: str, others: Sequence[str]) -> str:
    """Choose the card through which the others are reached; empty where none can be told."""
    outside = [address for address in others if not _is_loopback(address)]
    if _is_loopback(own) and outside:
        own = own_address(towards=outside[0])
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    # The whole of 127.0.0.0/8 is loopback's, though only its first address is listed.
    return "lo" if _is_loopback(own) else ""


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


def _who_is_missing(store: TCPStore, keys: Sequence[str], *, patience_s: float) -> str:
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "rank 0, who keeps the store, left before all ranks had met"
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {len(keys)} ranks did not come within {patience_s:.0f} s: {named};"
        " look for their errors on their nodes"
    )
