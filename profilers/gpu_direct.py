"""Whether NICs and accelerators of this node exchange data without host memory (GPUDirect RDMA).

Three facts decide, and each is said:

    the driver    nvidia_peermem (or the older nv_peer_mem) is loaded; or DMA-BUF: NVIDIA's open
                  kernel modules on Linux 5.12 or newer (NVIDIA GPU Operator, GPUDirect RDMA;
                  NCCL uses either)
    the distance  between NIC and accelerator on PCIe, in the words of `nvidia-smi topo -m`: PIX
                  under one switch, PXB across several, PHB across a host bridge, NODE across host
                  bridges of one memory node, SYS across memory nodes
    the user      NCCL_NET_GDR_LEVEL names the largest distance at which NCCL may, LOC or 0 never
                  (NCCL documentation, environment variables, where PHB is one memory node, NODE
                  included); names count as they are written, numbers above the last one as the
                  last (`ncclGetLevel` in NCCL's src/graph/paths.cc); without it NCCL has a limit
                  of its own, by release

What cannot be read is reported as unknown. Whether NCCL then used it, only its log says
(NCCL_DEBUG=INFO: "GDRDMA"). Not covered: accelerators of other vendors; NICs inside containers
that hide them from sysfs.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")
DMA_BUF_KERNEL: Final = (5, 12)
NVIDIA: Final = "0x10de"
ACCELERATORS: Final = ("0x0300", "0x0302")
"""PCI classes of VGA and 3D controllers."""
DISTANCES: Final = ("LOC", "PIX", "PXB", "PHB", "NODE", "SYS")
LEVELS: Final = {
    **{name: DISTANCES.index(name) for name in ("LOC", "PIX", "PXB", "SYS")},
    # To NCCL all of a memory node is PHB.
    "PHB": DISTANCES.index("NODE"),
}
OLD_LEVELS: Final = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""What the numbers of older releases stand for."""
MOST_DEVICES: Final = 256


def gpu_direct_facts(
    *, sysfs: Path, proc: Path, kernel: str, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the known facts, a line each; nothing where there are no RDMA NICs.

    Args:
        sysfs: where the kernel shows its devices.
        proc: where it shows the driver.
        kernel: its release, e.g. `6.8.0-31-generic`.
        environment: of the ranks.
    """
    nics = _devices_of(sysfs / "class/infiniband")
    if not nics:
        return
    gpus = _accelerators(sysfs)
    if not gpus:
        yield "gpu direct: no accelerator is seen on PCIe"
        return
    yield f"gpu direct: {driver_support(sysfs=sysfs, proc=proc, kernel=kernel)}"
    level = environment.get("NCCL_NET_GDR_LEVEL", "")[:16]
    most = _most(level)
    if level:
        meant = "not a level" if most is None else f"at most {DISTANCES[most]}" if most else "never"
        yield f"gpu direct: NCCL_NET_GDR_LEVEL {level}, {meant}"
    for name, nic in sorted(nics.items()):
        for slot, gpu in sorted(gpus.items()):
            far = distance(nic, gpu)
            is_too_far = most is not None and DISTANCES.index(far) > most
            yield f"gpu direct {name} - {slot}: {far}{', farther than allowed' * is_too_far}"


def _most(level: str) -> int | None:
    """Return the place in DISTANCES up to which a level allows; None where NCCL ignores it."""
    number = re.match(r"[0-9]+", level)
    if number is not None:
        level = OLD_LEVELS[min(int(number[0]), len(OLD_LEVELS) - 1)]
    return LEVELS.get(level)


def driver_support(*, sysfs: Path, proc: Path, kernel: str) -> str:
    """Whether the driver lets NICs reach an accelerator's memory: yes, no or unknown."""
    if not (sysfs / "module").is_dir():
        return "unknown, the kernel's modules cannot be read"
    loaded = [name for name in PEER_MODULES if (sysfs / "module" / name).exists()]
    if loaded:
        return f"yes, {loaded[0]} is loaded"
    try:
        version = (proc / "driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown, nvidia_peermem is not loaded and the driver's version cannot be read"
    number = re.match(r"(\d+)\.(\d+)", kernel)
    if "open kernel module" not in version.lower():
        return "no, nvidia_peermem is not loaded and the driver's modules are not the open ones"
    if number is None:
        return f"unknown, open kernel modules on a kernel {kernel!r}"
    if (int(number[1]), int(number[2])) < DMA_BUF_KERNEL:
        return f"no, nvidia_peermem is not loaded and Linux {number[0]} has no DMA-BUF for it"
    return "yes, by DMA-BUF"


def distance(nic: Path, gpu: Path) -> str:
    """Compare two devices' places in sysfs, e.g. `pci0000:00/0000:00:01.0/0000:01:00.0`."""
    one, other = _route(nic), _route(gpu)
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    if shared == 0:
        nodes = [_memory_node(device) for device in (nic, gpu)]
        return "NODE" if nodes[0] == nodes[1] != "" else "SYS"
    if shared == 1:
        return "PHB"
    # Below what they share a switch adds one bridge, the port down to the device.
    deepest = max(len(one), len(other)) - shared
    return "PIX" if deepest <= 2 else "PXB"


def _route(device: Path) -> tuple[str, ...]:
    """Host bridge, bridges and the device itself."""
    parts = Path(os.path.realpath(device)).parts
    starts = [place for place, part in enumerate(parts) if part.startswith("pci")]
    return parts[starts[-1] :] if starts else ()


def _memory_node(device: Path) -> str:
    try:
        text = (device / "numa_node").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
    return text if text.isdigit() else ""


def _devices_of(folder: Path) -> dict[str, Path]:
    try:
        names = sorted(folder.iterdir())[:MOST_DEVICES]
    except OSError:
        return {}
    return {each.name: each / "device" for each in names if (each / "device").exists()}


def _accelerators(sysfs: Path) -> dict[str, Path]:
    try:
        slots = sorted((sysfs / "bus/pci/devices").iterdir())
    except OSError:
        return {}
    accelerators = {slot.name: slot for slot in slots if _is_accelerator(slot)}
    return dict(list(accelerators.items())[:MOST_DEVICES])


def _is_accelerator(slot: Path) -> bool:
    try:
        vendor = (slot / "vendor").read_text(encoding="ascii", errors="replace").strip()
        kind = (slot / "class").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return False
    return vendor == NVIDIA and kind.startswith(ACCELERATORS)
