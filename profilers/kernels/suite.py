"""The kernel benchmarks: which file measures which table, and how a failing kernel is recorded.

All ranks measure the same kernel at the same time, each on its own operands, because ranks of one
node share memory bandwidth and power; every rank's row is kept. On processors they repeat in
lockstep, so that none finds its neighbours busy in one repeat and idle in the next; what one of
them cannot measure, none does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

import numpy as np
import torch

from profilers.benchmark import Setting, TableBenchmark
from profilers.clock import Clock
from profilers.devices import free_bytes, is_out_of_memory, release_memory
from profilers.kernels import optimizer
from profilers.kernels.autograd import MAX_SETS, PLACED_SETS, Prepared
from profilers.pace import BY_ITSELF, Pace
from profilers.records import Case, Direction, Measurement, MeasurementStatus
from profilers.sampled_sizes import SIZES
from profilers.timing import PeerFailedError, measure, measure_fresh
from profilers.work import work

KERNELS: Final[Mapping[str, str]] = {
    "gemm": "profilers.kernels.gemm",
    "grouped_gemm": "profilers.kernels.grouped_gemm",
    "attention": "profilers.kernels.attention",
    "decode_attention": "profilers.kernels.decode_attention",
    "linear_scan": "profilers.kernels.linear_scan",
    "linear_update": "profilers.kernels.linear_update",
    "index_scores": "profilers.kernels.index_scores",
    "memory_bound": "profilers.kernels.memory_bound",
    "optimizer": "profilers.kernels.optimizer",
    "copy": "profilers.kernels.copies",
}
"""The module of each table, with its `cases` and `prepare`."""

WEIGHTS: Final[Mapping[str, float]] = {
    "gemm": 3.0,
    "grouped_gemm": 4.0,
    "attention": 4.0,
    "decode_attention": 1.5,
    "linear_scan": 1.5,
    "linear_update": 0.5,
    "index_scores": 1.0,
    "memory_bound": 5.0,
    "optimizer": 0.5,
    "copy": 0.5,
}

TOUCHED_BYTES = 2**28
"""Bytes of the heap that are touched before anything is timed, at most..."""
TOUCHED_RATIO = 1 / 16
"""...and as a share of the free memory."""
LIVE_COPIES = 4.0
"""Forward traffic times this bounds the memory alive in a backward pass."""
LONG_REPEATS = 3
"""Repeats of a long run."""
GRAPHS_RATIO = 0.1
"""Share of the free memory for the forward passes of all runs of one repeat."""


def benchmarks(setting: Setting) -> tuple["KernelBenchmark", ...]:
    """Every kernel table, GEMMs first.

    The first optimizer step loads a good part of torch, and a heap that grows under a kernel makes
    it pay for pages that a running step already has; both are done here, before anything is timed.
    """
    _touch_heap(setting)
    first = Case(operation="optimizer", kind="adamw", dtype="fp32", axes={"parameters": 1})
    optimizer.prepare(first, torch.device(setting.device)).forward()
    return tuple(
        KernelBenchmark(operation=name, setting=setting, weight=weight, refined_axes=SIZES[name])
        for name, weight in WEIGHTS.items()
    )


def _touch_heap(setting: Setting) -> None:
    """Have pages of the processor's heap mapped; freed memory stays in it (profilers/heap.py)."""
    device = torch.device(setting.device)
    if device.type == "cpu":
        room = free_bytes(device, local_world=setting.team.local_world)
        torch.empty(min(TOUCHED_BYTES, int(TOUCHED_RATIO * room)), dtype=torch.uint8).fill_(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchmark(TableBenchmark):
    """One table of kernel times."""

    def cases(self) -> Sequence[Case]:
        device = torch.device(self.setting.device)
        dtypes = self.setting.dtypes
        if self.operation == "memory_bound":
            dtypes = tuple(dict.fromkeys((*dtypes, "fp32")))
        cases: tuple[Case, ...] = import_module(KERNELS[self.operation]).cases(device, dtypes)
        return cases

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        device = torch.device(self.setting.device)
        prepare = import_module(KERNELS[self.operation]).prepare
        self.setting.team.barrier()
        rows = measure_kernel(
            case,
            prepare=lambda: prepare(case, device),
            clock=self.setting.clock,
            budget_s=budget_s,
            free_bytes=free_bytes(device, local_world=self.setting.team.local_world),
            rank=self.setting.team.rank,
            pace=self.setting.pace,
        )
        release_memory(device)
        return rows


def measure_kernel(
    case: Case,
    *,
    prepare: Callable[[], Prepared],
    clock: Clock,
    budget_s: float,
    free_bytes: int,
    rank: int,
    pace: Pace = BY_ITSELF,
) -> tuple[Measurement, ...]:
    """Time both directions of a case, on as many sets of operands as time allows, and never raise.

    A failure is recorded, on the peers as well. A case that clearly does not fit is not tried: a
    host that overcommits memory would kill the process instead of refusing.
    """
    directions: tuple[Direction, ...] = ("forward", "backward") if case.direction else ("",)
    needed = live_bytes(case)
    least_free = -pace.all_reduce_max((-float(free_bytes),))[0]
    if needed > least_free:
        error = f"needs about {needed:.3g} bytes, {least_free:.3g} are free"
        return tuple(
            _ended(case, direction, status=MeasurementStatus.OUT_OF_MEMORY, error=error, rank=rank)
            for direction in directions
        )
    timing = _Timing(
        clock=clock,
        budget_s=budget_s / len(directions),
        most_at_once=max(1, int(GRAPHS_RATIO * least_free / max(needed, 1.0))),
        pace=pace,
    )
    times: dict[Direction, tuple[float, ...]] = {}
    status, line = MeasurementStatus.FAILED, ""
    try:
        prepared = prepare()
        for direction in directions:
            times[direction] = timing.of(prepared, direction)
    except PeerFailedError:
        line = "a peer failed"
    except Exception as error:  # a failing kernel becomes a row
        # The peers wait for this rank's message.
        pace.all_reduce_max((math.inf, math.inf))
        status = (
            MeasurementStatus.OUT_OF_MEMORY if is_out_of_memory(error) else MeasurementStatus.FAILED
        )
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return tuple(
        Measurement(case=_turned(case, direction), rank=rank, times_s=times[direction])
        if direction in times
        else _ended(case, direction, status=status, error=line, rank=rank)
        for direction in directions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """Clock, budget and repeats for timing the directions of one case."""

    clock: Clock
    budget_s: float
    most_at_once: int
    """Runs of a repeat whose preparation is alive at once."""
    pace: Pace

    def of(self, prepared: Prepared, direction: Direction) -> tuple[float, ...]:
        if direction == "backward" and prepared.backward is not None:
            return measure_fresh(
                prepared.backward,
                clock=self.clock,
                budget_s=self.budget_s,
                max_loops=self.most_at_once,
                min_repeats=PLACED_SETS,
                settled_repeats=MAX_SETS,
                long_repeats=LONG_REPEATS,
                pace=self.pace,
            )
        return measure(
            prepared.forward,
            clock=self.clock,
            budget_s=self.budget_s,
            min_repeats=PLACED_SETS,
            settled_repeats=MAX_SETS,
            long_repeats=LONG_REPEATS,
            pace=self.pace,
        )


def live_bytes(case: Case) -> float:
    """Estimate the peak memory of measuring a case."""
    axes = {axis: np.array([float(size)]) for axis, size in case.axes.items()}
    traffic = work(case.operation, kind=case.kind, dtype=case.dtype, direction="forward", axes=axes)
    return LIVE_COPIES * float(traffic.bytes[0])


def _turned(case: Case, direction: Direction) -> Case:
    return case.model_copy(update={"direction": direction})


def _ended(
    case: Case, direction: Direction, *, status: MeasurementStatus, error: str, rank: int
) -> Measurement:
    return Measurement(case=_turned(case, direction), status=status, error=error, rank=rank)
