"""Hold a rank to a limit on the memory of its model and step, as a smaller device would.

On an accelerator PyTorch's allocator refuses what goes beyond the limit, from the first weight to
the last step. On a processor the kernel does (RLIMIT_DATA of setrlimit(2): private writable
pages), during one whole step, with every large block mapped by itself (profilers/heap.py). What
counts is what the process holds beyond its start, less what the first step left behind that is no
tensor: oneDNN reserves addresses for the code it generates, about 1.5 MB for each shape of a
product. That step is therefore run once without a limit, and then repeated on the same tokens under
it.

Timed steps on a processor come afterwards, without limit and on a heap that keeps what is freed,
because they are compared with a profile that was measured so.

Not covered: processors under other systems than Linux; memory that libraries map as shared.
"""

import gc
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from profilers.errors import RankError
from profilers.steps.memory import storage_bytes

STATUS: Final = Path("/proc/self/status")
TENSORS: Final = (Tensor, nn.Parameter)
"""Types with memory of their own; others wrap them."""


class HostLimit:
    """The limit of a rank on a processor, counted from the moment that this is made.

    Raises:
        RankError: the system is not Linux.
    """

    def __init__(self, limit_bytes: int) -> None:
        if not STATUS.is_file():
            raise RankError("memory_limit_bytes on a processor needs Linux; leave it out here")
        self._limit_bytes = limit_bytes
        self._start_bytes = _status_bytes("VmData")
        self._start_addresses = _status_bytes("VmSize")
        self._other_bytes = 0
        self._other_addresses = 0

    def exempt_code(self) -> None:
        """Leave out what the process holds now beyond its start and its tensors."""
        gc.collect()
        held_bytes = storage_bytes(tensor for tensor in gc.get_objects() if type(tensor) in TENSORS)
        self._other_bytes = _status_bytes("VmData") - self._start_bytes - held_bytes
        self._other_addresses = _status_bytes("VmSize") - self._start_addresses - held_bytes

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Let allocations beyond the limit fail inside."""
        before, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = self._start_bytes + self._other_bytes + self._limit_bytes
        if hard_limit != resource.RLIM_INFINITY:
            allowed = min(allowed, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard_limit))
        try:
            yield
        finally:
            # Without it ranks report errors and leave.
            resource.setrlimit(resource.RLIMIT_DATA, (before, hard_limit))

    def peak_bytes(self) -> int:
        """Return the peak of the memory that the limit counts, to the page."""
        return _status_bytes("VmPeak") - self._start_addresses - self._other_addresses


def limit_device(limit_bytes: int, *, device: torch.device) -> None:
    """Let allocations on an accelerator beyond the limit fail from now on.

    Raises:
        RankError: the limit is more than the device has.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes > total:
        raise RankError(
            f"memory_limit_bytes {limit_bytes} is more than the {total} of {device}; leave it out"
        )
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if match is None:
        raise RankError(f"{STATUS} does not contain {field}, which memory_limit_bytes needs")
    return int(match[1]) * 1024
