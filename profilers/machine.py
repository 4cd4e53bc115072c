"""Fingerprint of this machine, stored with every profile.

Everything is read, nothing is set. A fact that cannot be read is left empty; it never stops a
measurement. On a processor the memory of a "device" is the rank's share of the host's.
"""

import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

from profilers.affinity import usable_cores
from profilers.records import Machine
from profilers.topology import node_topology

QUERY_TIMEOUT_S = 10.0
THREADS_PER_RANK = 1
"""Threads that profilers/devices.py gives every rank."""


def fingerprint(*, device_kind: str, world: int, local_world: int) -> Machine:
    """Describe the machine as one rank sees it; `device_kind` is cpu or cuda."""
    cores = len(usable_cores())
    host_bytes = int(psutil.virtual_memory().total)
    libraries = {"python": platform.python_version()}
    if device_kind == "cuda":
        device, num_devices, device_bytes, versions = _accelerator()
        oversubscribed = local_world > num_devices
    else:
        device, num_devices, device_bytes = processor_name(), cores, host_bytes // local_world
        versions = _torch_versions()
        oversubscribed = local_world > cores
    return Machine(
        hostname=socket.gethostname(),
        device=device,
        device_kind="cuda" if device_kind == "cuda" else "cpu",
        num_devices=num_devices,
        memory_bytes_per_device=device_bytes,
        cores=cores,
        host_memory_bytes=host_bytes,
        nodes=max(1, world // max(1, local_world)),
        world=world,
        threads_per_rank=THREADS_PER_RANK,
        oversubscribed=oversubscribed,
        driver=_query("--query-gpu=driver_version") if device_kind == "cuda" else "",
        libraries=libraries | versions,
        clocks=_clocks(device_kind),
        topology=node_topology(accelerators=_topology() if device_kind == "cuda" else ""),
    )


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the processor, as the kernel names it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _accelerator() -> tuple[str, int, int, dict[str, str]]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = _torch_versions()
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch
        versions["nccl"] = ".".join(str(part) for part in nccl)
    name, total = str(properties.name), int(properties.total_memory)
    return name, torch.cuda.device_count(), total, versions


def _torch_versions() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__}


def _clocks(device_kind: str) -> dict[str, float]:
    if device_kind == "cuda":
        names = ("clocks.max.sm", "clocks.max.mem")
        values = _query(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        megahertz = [part.strip() for part in values.split(",")]
        pairs = zip(names, megahertz, strict=False)
        return {name: float(value) * 1e6 for name, value in pairs if value.isdigit()}
    frequency = psutil.cpu_freq()
    return {"processor_max": frequency.max * 1e6} if frequency and frequency.max > 0 else {}


def _topology() -> str:
    # Its header is underlined, also where nobody looks.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", _nvidia_smi("topo", "-m"))
    return "\n".join(line.rstrip() for line in plain.splitlines())


def _query(*arguments: str) -> str:
    if not any(argument.startswith("--format") for argument in arguments):
        arguments = (*arguments, "--format=csv,noheader")
    lines = _nvidia_smi(*arguments).splitlines()
    return lines[0].strip() if lines else ""


def _nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
