"""Every kernel of the registry on a tiny case, and what becomes of kernels that fail."""

import itertools
import math
import resource
from importlib import import_module
from pathlib import Path

import pytest
import torch

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.devices import DTYPES, clock_of, count_accelerators, pick_device
from profilers.heap import keep_heap
from profilers.kernels import memory_bound, optimizer
from profilers.kernels.autograd import (
    MAX_SETS,
    PLACED_BYTES,
    PLACED_SETS,
    Prepared,
    Tape,
    in_turns,
)
from profilers.kernels.linear_scan import GATED_DELTA, KDA, MAMBA2
from profilers.kernels.memory_bound import BUILDERS
from profilers.kernels.suite import (
    KERNELS,
    LONG_REPEATS,
    WEIGHTS,
    benchmarks,
    live_bytes,
    measure_kernel,
)
from profilers.records import AXES, Case, Measurement, MeasurementStatus
from profilers.sampled_sizes import SIZES, lines
from profilers.schedule import distinct
from profilers.team import SingleRank
from tests.profilers.testing import UnmappedClock, gemm_case
from tests.rows import each_row

CPU = torch.device("cpu")
TINY: dict[str, dict[str, int]] = {
    "gemm": {"m": 3, "n": 5, "k": 7},
    "grouped_gemm": {"experts": 3, "tokens": 7, "largest": 5, "hidden": 8, "ffn": 16},
    "attention": {"batch": 2, "sequence": 9, "heads": 4, "kv_heads": 2, "head_dim": 8},
    "decode_attention": {
        "batch": 2,
        "past": 9,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "window": 0,
    },
    "linear_scan": {
        "batch": 2,
        "sequence": 9,
        "heads": 4,
        "key_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
        "chunk": 4,
    },
    "linear_update": {"batch": 2, "heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 8},
    "index_scores": {
        "batch": 2,
        "sequence": 3,
        "past": 9,
        "heads": 4,
        "head_dim": 8,
        "top_k": 5,
    },
    "memory_bound": {"rows": 6, "width": 8},
    "optimizer": {"parameters": 2**20 + 1},
    "copy": {"bytes": 1000},
}
KINDS = {
    "linear_scan": (MAMBA2, GATED_DELTA, KDA),
    "linear_update": (MAMBA2, GATED_DELTA, KDA),
    "memory_bound": tuple(BUILDERS),
    "optimizer": ("accumulate", "convert"),
    "copy": ("device",),
}
MATRIX = ("gemm", "grouped_gemm", "attention", "linear_scan", "memory_bound")
ASKED = {"linear_scan", "linear_update", "index_scores"}
"""Measured where a spec asks, or where a library's kernels are installed."""
ADAMW = Case(
    operation="optimizer",
    kind="adamw",
    dtype="fp32",
    axes={"parameters": TINY["optimizer"]["parameters"]},
)


def tiny_cases() -> list[Case]:
    listed = [
        Case(
            operation=operation,
            kind=kind,
            dtype=dtype,
            direction="forward" if operation in MATRIX else "",
            axes=axes,
        )
        for operation, axes in TINY.items()
        for kind in KINDS.get(operation, ("",))
        for dtype in (DTYPES if operation != "copy" else ("",))
    ]
    return [*listed, ADAMW]


def measured(case: Case, *, device: torch.device = CPU) -> tuple[Measurement, ...]:
    prepare = import_module(KERNELS[case.operation]).prepare
    return measure_kernel(
        case,
        prepare=lambda: prepare(case, device),
        clock=UnmappedClock() if device == CPU else clock_of(device),
        budget_s=0.0,
        free_bytes=2**32,
        rank=0,
    )


def test_the_tables_and_grids_of_the_suite_agree() -> None:
    assert KERNELS.keys() == WEIGHTS.keys() == TINY.keys()
    for operation in KERNELS:
        assert set(SIZES[operation]) <= set(AXES[operation])
    setting = Setting(
        device="cpu",
        dtypes=("fp32", "bf16"),
        team=SingleRank(),
        clock=HostClock(),
        directory=Path(),
    )
    assert sum(len(benchmark.cases()) for benchmark in benchmarks(setting)) < 500


@each_row("case", tiny_cases())
def test_every_kernel_takes_a_finite_positive_time(case: Case) -> None:
    rows = measured(case)
    directions = ["forward", "backward"] if case.direction else [""]
    assert [row.case.direction for row in rows] == directions
    for row in rows:
        assert row.status is MeasurementStatus.OK, row.error
        assert len(row.times_s) >= LONG_REPEATS
        assert all(math.isfinite(time_s) and time_s > 0.0 for time_s in row.times_s)


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
@each_row("case", tiny_cases())
def test_every_kernel_runs_on_an_accelerator(case: Case) -> None:
    for row in measured(case, device=pick_device("cuda", local_rank=0)):
        assert row.status is MeasurementStatus.OK, row.error
        assert all(math.isfinite(time_s) and time_s > 0.0 for time_s in row.times_s)


@each_row("device", [CPU, torch.device("cuda")])
@each_row("operation", sorted(KERNELS.keys() - ASKED))
def test_default_grids_are_distinct_and_have_sizes_in_between(
    operation: str, device: torch.device
) -> None:
    cases = import_module(KERNELS[operation]).cases(device, ("fp32", "bf16"))
    assert all(case.operation == operation for case in cases)
    assert len(distinct(cases)) == len(cases) > 2
    for line in lines([Measurement(case=case, times_s=(1.0,)) for case in cases]).values():
        assert any(len({case.axes[axis] for case in line}) >= 3 for axis in SIZES[operation])


def test_the_heap_has_its_pages_before_anything_is_timed() -> None:
    if not keep_heap():
        pytest.skip("this C library has no heap to keep")
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=SingleRank(), clock=HostClock(), directory=Path()
    )
    benchmarks(setting)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26, dtype=torch.uint8).fill_(1)
    # 16,384 pages of 4 KiB that would have to be mapped.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000


def test_kernels_that_cannot_run_are_recorded() -> None:
    def prepare() -> Prepared:
        raise RuntimeError("no kernel\nfor this shape")

    rows = measure_kernel(
        gemm_case(4), prepare=prepare, clock=HostClock(), budget_s=0.0, free_bytes=2**30, rank=3
    )
    assert [row.case.direction for row in rows] == ["forward", "backward"]
    assert {row.status for row in rows} == {MeasurementStatus.FAILED}
    assert rows[0].error == "RuntimeError: no kernel for this shape"
    assert rows[0].rank == 3

    def backward() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    prepared = Prepared(forward=lambda: None, backward=lambda: backward)
    rows = measure_kernel(
        gemm_case(4),
        prepare=lambda: prepared,
        clock=HostClock(),
        budget_s=0.0,
        free_bytes=2**30,
        rank=0,
    )
    assert [row.status for row in rows] == [MeasurementStatus.OK, MeasurementStatus.OUT_OF_MEMORY]


def test_a_case_that_cannot_fit_is_not_tried() -> None:
    case = gemm_case(2**40)

    def prepare() -> Prepared:
        raise AssertionError("tried")

    rows = measure_kernel(
        case, prepare=prepare, clock=HostClock(), budget_s=0.0, free_bytes=2**34, rank=0
    )
    assert {row.status for row in rows} == {MeasurementStatus.OUT_OF_MEMORY}
    assert live_bytes(case) > 2**34


@each_row("operation", ["memory_bound", "optimizer"])
def test_a_kind_that_does_not_exist_is_recorded(operation: str) -> None:
    case = Case(operation=operation, kind="sort", dtype="fp32", axes=TINY[operation])
    (row,) = measured(case)
    assert row.status is MeasurementStatus.FAILED
    assert "'sort'" in row.error


def test_the_optimizers_table_has_a_line_of_each_kind_and_type() -> None:
    lines = {(case.kind, case.dtype) for case in optimizer.cases(CPU, ("fp32", "bf16"))}
    added_up = {("accumulate", "fp32"), ("accumulate", "bf16")}
    assert lines == {("adamw", "fp32"), *added_up, ("convert", "fp32"), ("convert", "bf16")}


@each_row("dtype", DTYPES)
def test_gradients_are_added_in_place_and_in_fp32(dtype: str) -> None:
    case = Case(operation="optimizer", kind="accumulate", dtype=dtype, axes={"parameters": 2**16})
    run = optimizer.prepare(case, CPU).forward
    first = run()
    assert isinstance(first, torch.Tensor)
    assert (first.dtype, first.numel()) == (torch.float32, 2**16)
    before = first.clone()
    # Operands take turns, so that none is found in a cache: after all others the first is back.
    for _ in range(MAX_SETS):
        again = run()
        if again is first:
            break
    assert again is first
    assert not torch.equal(first, before)


@each_row("dtype", DTYPES)
def test_parameters_are_converted_to_the_requested_type(dtype: str) -> None:
    case = Case(operation="optimizer", kind="convert", dtype=dtype, axes={"parameters": 64})
    target = optimizer.prepare(case, CPU).forward()
    assert isinstance(target, torch.Tensor)
    assert target.dtype is DTYPES[dtype]


def test_operands_take_turns_until_they_fill_a_cache_twice() -> None:
    first = torch.arange(25, dtype=torch.float32).requires_grad_()
    # 100 bytes each: 2 * 250 bytes of cache take five.
    turns = in_turns(lambda: (first,), cold_bytes=250)
    handed_out = [next(turns)[0] for _ in range(10)]
    assert len({tensor.data_ptr() for tensor in handed_out}) == 5
    assert all(one is other for one, other in zip(handed_out[:5], handed_out[5:], strict=True))
    assert all(tensor.requires_grad and torch.equal(tensor, first) for tensor in handed_out)


def test_sets_lie_at_different_places_unless_they_are_large() -> None:
    turns = in_turns(lambda: (torch.zeros(2**16), torch.zeros(2**16)), cold_bytes=0)
    places = [tuple(tensor.data_ptr() % 4096 for tensor in next(turns)) for _ in range(PLACED_SETS)]
    assert len(set(places)) == PLACED_SETS
    assert all(place % 64 == 0 for pair in places for place in pair)
    # How the operands of a set lie to one another changes too.
    assert len({(one - other) % 4096 for one, other in places}) > 1
    turns = in_turns(lambda: (torch.empty(PLACED_BYTES),), cold_bytes=0)
    assert next(turns) is next(turns)


def test_values_do_not_repeat_before_the_requested_number() -> None:
    numbers = itertools.count()
    turns = in_turns(lambda: (torch.full((10, 10), next(numbers)),), cold_bytes=0, num_values=1000)
    assert [int(next(turns)[0][0, 0]) for _ in range(11)] == [*range(10), 0]
    numbers = itertools.count()
    turns = in_turns(
        lambda: (torch.full((100,), float(next(numbers))),), cold_bytes=1000, num_values=300
    )
    handed_out = [next(turns)[0] for _ in range(5)]
    assert [int(tensor[0]) for tensor in handed_out] == [0, 1, 2, 3, 4]
    assert len({tensor.data_ptr() % 4096 for tensor in handed_out}) > 1


def test_routers_never_get_logits_that_a_processor_could_remember() -> None:
    # One that has learnt their branches takes a third of the time.
    router = Case(
        operation="memory_bound",
        kind="router",
        dtype="fp32",
        direction="forward",
        axes={"rows": 128, "width": 64},
    )
    prepared = memory_bound.prepare(router, CPU)
    tapes = [prepared.forward() for _ in range(16)]
    seen = torch.stack([tape.inputs[0] for tape in tapes if isinstance(tape, Tape)])
    assert seen.shape == (16, 128, 64)
    assert len(set(seen[:, 0, 0].tolist())) == 16
