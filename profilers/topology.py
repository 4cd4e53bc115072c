"""Parts of this node and their connections: accelerators, NICs, memory nodes, as Linux reports.

Read from sysfs and, where there are accelerators, from `nvidia-smi topo -m`. Facts that cannot be
read are left out. Interfaces without a device behind them (loopback, bridges, containers' ends of a
pair) are listed too, as a profile over them is worth knowing about.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
MOST_ENTRIES: Final = 64
"""Entries of one kind that are listed, at most; more say nothing new."""


def node_topology(*, accelerators: str = "", sysfs: Path = SYSFS) -> str:
    """Describe the node, a line a fact.

    Args:
        accelerators: what `nvidia-smi topo -m` printed, or nothing.
        sysfs: where the kernel shows its devices.
    """
    return "\n".join(
        [
            *filter(None, accelerators.splitlines()),
            *_memory_nodes(sysfs),
            *_nics(sysfs),
            *_rdma_ports(sysfs),
        ]
    )


def _memory_nodes(sysfs: Path) -> Iterator[str]:
    for folder in _entries(sysfs / "devices/system/node", prefix="node"):
        cores = _text(folder / "cpulist")
        distance = _text(folder / "distance")
        yield f"numa {folder.name}: cores {cores or '-'}, distance {distance or '-'}"


def _nics(sysfs: Path) -> Iterator[str]:
    for folder in _entries(sysfs / "class/net"):
        speed = _text(folder / "speed")
        facts = [
            f"{speed} Mbit/s" if speed.isdigit() else "",
            f"mtu {_text(folder / 'mtu')}",
            _text(folder / "operstate"),
            _place(folder / "device"),
        ]
        yield f"card {folder.name}: " + ", ".join(filter(None, facts))


def _rdma_ports(sysfs: Path) -> Iterator[str]:
    """InfiniBand and RoCE ports."""
    for folder in _entries(sysfs / "class/infiniband"):
        for port in _entries(folder / "ports"):
            facts = [
                _text(port / "rate"),
                _text(port / "link_layer"),
                _text(port / "state"),
                _place(folder / "device"),
            ]
            yield f"rdma {folder.name}/{port.name}: " + ", ".join(filter(None, facts))


def _place(device: Path) -> str:
    """The PCIe slot of a NIC and its memory node."""
    if not device.exists():
        return ""
    node = _text(device / "numa_node")
    slot = Path(os.path.realpath(device)).name
    return f"{slot} at numa {node}" if node.isdigit() else slot


def _entries(folder: Path, *, prefix: str = "") -> list[Path]:
    try:
        entries = sorted(path for path in folder.iterdir() if path.name.startswith(prefix))
    except OSError:
        return []
    return [path for path in entries if path.is_dir()][:MOST_ENTRIES]


def _text(file: Path) -> str:
    """First line of a small file; empty where it cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.readline(256).strip()
    except OSError:
        return ""
