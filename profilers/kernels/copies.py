"""Copies of contiguous bytes: within the device, and across to and from pinned host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from profilers.devices import last_cache_bytes
from profilers.kernels.autograd import DRAWN, Prepared, in_turns, repeated
from profilers.records import Case

CPU_BYTES = tuple(2**power for power in (12, 16, 20, 24, 26))
CUDA_BYTES = tuple(2**power for power in (12, 16, 20, 24, 28, 30))


def cases(device: torch.device, _dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Sizes of every kind there is: across to the host only where the device is not the host."""
    on_cuda = device.type == "cuda"
    kinds = ("device", "host_to_device", "device_to_host") if on_cuda else ("device",)
    return tuple(
        Case(operation="copy", kind=kind, axes={"bytes": size})
        for kind in kinds
        for size in (CUDA_BYTES if on_cuda else CPU_BYTES)
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Allocate sources and targets; all are written once, so that their pages exist."""
    size = case.axes["bytes"]
    if case.kind == "device":
        turns = in_turns(
            lambda: (_bytes(size, device), _bytes(size, device)),
            cold_bytes=last_cache_bytes(device),
        )
        return Prepared(forward=lambda: _copy(*next(turns)), backward=None)
    here = _bytes(size, device)
    host = _bytes(size, torch.device("cpu")).pin_memory()
    source, target = (host, here) if case.kind == "host_to_device" else (here, host)
    return Prepared(forward=lambda: _copy(source, target), backward=None)


def _bytes(size: int, device: torch.device) -> Tensor:
    part = torch.randint(256, (min(size, DRAWN),), dtype=torch.uint8, device=device)
    return repeated(part, size)


def _copy(source: Tensor, target: Tensor) -> Tensor:
    return target.copy_(source, non_blocking=True)
