"""One GEMM and one copy, timed on every rank at once, to find ranks slower than their peers.

Every rank times itself and all rows are kept, one per rank; profilers/stragglers.py compares them.
Sizes are large enough that a device is busy for milliseconds, so that clocks, thermal limits and
neighbours show, and small enough for a second in all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from profilers.benchmark import TableBenchmark
from profilers.devices import is_out_of_memory
from profilers.pace import BY_ITSELF, Pace
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.timing import measure

CPU_SIZES: Final = {"gemm": 512, "copy": 2**25}
CUDA_SIZES: Final = {"gemm": 8192, "copy": 2**30}
ELEMENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRankBenchmark(TableBenchmark):
    """The table of the work that every rank does."""

    operation: str = "every_rank"
    weight: float = 0.5
    one_rank_note: str = "one rank has no peers"

    def cases(self) -> Sequence[Case]:
        world = self.setting.team.world
        sizes = CUDA_SIZES if self.setting.device.startswith("cuda") else CPU_SIZES
        if world == 1:
            return ()
        return tuple(
            Case(operation="every_rank", kind=kind, axes={"size": size, "world": world})
            for kind, size in sizes.items()
        )

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        team = self.setting.team
        status, error, run = MeasurementStatus.OK, "", None
        try:
            run = _RUNS[case.kind](case.axes["size"], torch.device(self.setting.device))
        except (RuntimeError, MemoryError) as problem:
            status = (
                MeasurementStatus.OUT_OF_MEMORY
                if is_out_of_memory(problem)
                else MeasurementStatus.FAILED
            )
            error = " ".join(str(problem).split())[:200]
        # All start together: how ranks slow each other down is part of the result.
        (anybody_failed,) = team.slowest_s([float(run is None)])
        if run is None:
            return (Measurement(case=case, rank=team.rank, status=status, error=error),)
        times_s = measure(
            run,
            clock=self.setting.clock,
            budget_s=budget_s,
            min_repeats=10,
            pace=BY_ITSELF
            if anybody_failed
            else Pace(all_reduce_max=self.setting.pace.all_reduce_max),
        )
        return (Measurement(case=case, rank=team.rank, times_s=times_s),)


def _gemm(size: int, device: torch.device) -> Callable[[], object]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.randn(max(1, size // ELEMENT_BYTES), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


_RUNS: Final = {"gemm": _gemm, "copy": _copy}
