import math
from collections.abc import Callable

import numpy as np

from profilers.adaptive import HOLDOUT_EVERY, Infill
from profilers.held_out import checked
from profilers.records import Case, Measurement, MeasurementStatus
from tests.profilers.testing import gemm_row

KNEE_BYTES = 2**20

Law = Callable[[Case], float]


def sent(size: int) -> Case:
    axes = {"bytes": size, "ranks": 2, "stride": 1, "world": 2}
    return Case(operation="collective", kind="all_reduce", axes=axes)


def copied(size: int) -> Case:
    return Case(operation="copy", kind="device", axes={"bytes": size})


def knee_s(case: Case) -> float:
    """A latency floor up to 1 MiB, then a bandwidth."""
    return 1e-4 * max(1.0, case.axes["bytes"] / KNEE_BYTES)


def row(case: Case, law: Law) -> Measurement:
    return Measurement(case=case, times_s=(law(case),))


def add_infill(rows: list[Measurement], law: Law, *, count: int) -> Infill:
    """Measure `count` further sizes."""
    infill = Infill(rows=rows, rng=np.random.default_rng(0))
    for _ in range(count):
        case = infill.next()
        if case is None:
            break
        rows.append(row(case, law))
    return infill


def test_added_sizes_spread_over_all_lines_and_octaves() -> None:
    grid = [gemm_row(m, 1.0).case for m in (16, 64, 4096)]
    rows = [
        row(case.model_copy(update={"dtype": dtype}), lambda case: 1e-9 * case.axes["m"])
        for case in grid
        for dtype in ("fp32", "bf16")
    ]
    add_infill(rows, lambda case: 1e-9 * case.axes["m"], count=60)
    added = rows[6:]
    for dtype in ("fp32", "bf16"):
        octaves = [math.log2(r.case.axes["m"]) for r in added if r.case.dtype == dtype]
        # Eight octaves, of which the grid left six without a point.
        assert len(octaves) >= 25
        assert sum(6.0 < octave < 12.0 for octave in octaves) > 0.65 * len(octaves)


def test_every_sixth_size_is_a_holdout_size() -> None:
    rows = [row(sent(2**power), knee_s) for power in (10, 15, 22, 26)]
    infill = add_infill(rows, knee_s, count=2 * 12)
    assert len(infill.holdout) == 2 * 12 // HOLDOUT_EVERY
    assert infill.holdout <= {r.case.id for r in rows}


def test_sizes_that_fits_have_seen_are_no_checks_of_them() -> None:
    # Between 64 and 128 bytes lie few whole messages, so that sizes are drawn again and again.
    rows = [row(sent(size), knee_s) for size in (64, 80, 96, 112, 128)]
    begun = {r.case.id for r in rows}
    infill = add_infill(rows, knee_s, count=4 * 12)
    assert not infill.holdout & begun
    ids = [r.case.id for r in rows]
    assert len(ids) == len(set(ids))


def test_a_line_without_further_sizes_does_not_keep_the_others_from_theirs() -> None:
    # The line with the fewest points: one pair of ranks, all of its three sizes known.
    rows = [row(sent(size), knee_s) for size in (64, 65, 66)]
    wide = [
        Case(
            operation="collective",
            kind="all_reduce",
            axes={"bytes": 2**power, "ranks": 4, "stride": 1, "world": 4},
        )
        for power in (10, 14, 18, 22, 26)
    ]
    rows += [row(case, knee_s) for case in wide]
    known = len(rows)
    add_infill(rows, knee_s, count=40)
    assert len(rows) == known + 40
    assert {r.case.axes["ranks"] for r in rows[known:]} == {4}


def test_cheap_sizes_are_preferred_where_they_add_as_much() -> None:
    def mean_octave(cost_s: Callable[[Case], float]) -> float:
        rows = [row(sent(2**power), knee_s) for power in (10, 18, 26)]
        infill = Infill(rows=rows, rng=np.random.default_rng(0), cost_s=cost_s)
        found = [infill.next() for _ in range(12)]
        return float(np.mean([math.log2(case.axes["bytes"]) for case in found if case]))

    by_size = mean_octave(lambda case: 0.01 + case.axes["bytes"] / 2**20)
    assert by_size < mean_octave(lambda _case: 1.0) - 1.0


def test_nothing_lies_between_equal_sizes() -> None:
    assert Infill(rows=[gemm_row(64, 1.0)], rng=np.random.default_rng(0)).next() is None
    failed = Measurement(case=sent(64), status=MeasurementStatus.FAILED, error="no")
    assert Infill(rows=[failed], rng=np.random.default_rng(0)).next() is None
    assert Infill(rows=[], rng=np.random.default_rng(0)).next() is None


def test_the_same_rows_lead_to_the_same_sizes() -> None:
    def proposed() -> list[str]:
        rows = [gemm_row(m, m * 1e-6) for m in (16, 64, 256)]
        add_infill(rows, lambda case: 1e-6 * case.axes["m"] ** 0.9, count=12)
        return [r.case.id for r in rows]

    assert proposed() == proposed()


def test_left_out_sizes_are_compared_with_the_curve_of_the_others() -> None:
    rows = [row(sent(2**power), knee_s) for power in (21, 23, 25)]
    # Between 2 and 8 MiB time is proportional: 4e-4 s are predicted, and 5e-4 s were measured.
    rows.append(Measurement(case=sent(2**22), times_s=(5e-4,)))
    found = checked(rows, left_out={sent(2**22).id})
    assert found is not None
    assert found.sizes == 1
    assert abs(found.median_ratio - 0.2) < 1e-6
    assert checked(rows, left_out=set()) is None


def test_the_slowest_rank_counts_among_left_out_sizes_and_failures_do_not() -> None:
    rows = [row(sent(2**power), knee_s) for power in (21, 23)]
    for rank, seconds in enumerate((2e-4, 4e-4)):
        rows.append(Measurement(case=sent(2**22), times_s=(seconds,), rank=rank))
    rows.append(Measurement(case=sent(3 * 2**20), status=MeasurementStatus.FAILED, error="no"))
    found = checked(rows, left_out={sent(2**22).id, sent(3 * 2**20).id})
    assert found is not None
    assert (found.sizes, round(found.p90_ratio, 6)) == (1, 0.0)
