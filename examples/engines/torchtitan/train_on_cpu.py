"""torchtitan 0.3.0 on a CPU: what TRAIN_FILE of a plan's run.sh names where there is no GPU.

    TRAIN_FILE=train_on_cpu MODULE=tiny_moe CONFIG=tiny_moe bash PLAN/launch/torchtitan/run.sh

torchtitan asks for an accelerator and a torch newer than 2.13.0. This stands in for what it misses
and starts its own program. It changes what a step runs on, not what the plan decides.
"""

import ctypes
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

DEVICE = "cpu"
# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def refuse_on_gpus() -> None:
    """End where a GPU could train: torchtitan runs on one as it is."""
    if torch.cuda.is_available():
        sys.exit("train_on_cpu: there is a CUDA device; start torchtitan.train itself")


class Processor(ModuleType):
    """What torchtitan asks of `torch.cuda`, answered for the CPU; the rest is `torch.cpu`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        """Every rank has the one CPU."""
        return 1

    def current_device(self) -> int:
        """Return the number of the CPU."""
        return 0

    def get_device_name(self, _: object = None) -> str:
        """Return a name without a datasheet."""
        return DEVICE

    def get_device_properties(self, _: object = None) -> SimpleNamespace:
        """Return what a percentage of memory is taken of."""
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, _: object = None) -> Mapping[str, int]:
        """Return nothing: there are no counters of the CPU's memory."""
        return {}

    def reset_peak_memory_stats(self, _: object = None) -> None:
        """There are no counters."""

    def empty_cache(self) -> None:
        """There is no cache."""


def stand_in_for_the_device() -> None:
    """Let torchtitan find the CPU where it looks for an accelerator."""
    processor = Processor("processor")
    torch._utils._get_available_device_type = lambda: DEVICE
    torch._utils._get_device_module = lambda _: processor


def stand_in_for_a_newer_torch() -> None:
    """Add what torchtitan 0.3.0 calls and torch 2.13.0 lacks."""
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    if find_spec("triton") is None:
        # Kernels of one dispatcher, imported by all; nothing on a CPU calls them.
        kernels = _Absent("torchtitan.distributed.minimal_async_ep.kernels")
        sys.modules[kernels.__name__] = kernels


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def keep_freed_blocks() -> None:
    """Let glibc keep freed memory, as the allocator of an accelerator does.

    It otherwise gives large blocks back and faults in every page anew: up to half of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26)):
            mallopt(option, value)


def sum_in_reductions() -> None:
    """Let FSDP2 reduce with SUM: gloo lacks PREMUL_SUM, and torchtitan's factor is 1."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import fsdp

    plain = fsdp.disable_fsdp_gradient_division

    def with_sums(model: torch.nn.Module) -> None:
        plain(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = with_sums


def stand_in() -> None:
    """Prepare torchtitan for the CPU; before anything else imports it."""
    refuse_on_gpus()
    stand_in_for_the_device()
    stand_in_for_a_newer_torch()
    keep_freed_blocks()
    sum_in_reductions()


def main() -> None:
    """Train."""
    stand_in()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
