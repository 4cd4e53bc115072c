import math
from collections.abc import Callable

import numpy as np

from profilers.adaptive import BATCH, HOLDOUT_EVERY, MIN_SAMPLED, Infill
from profilers.held_out import checked
from profilers.interpolation import fit_rows
from profilers.records import AXES, Case, Measurement, MeasurementStatus
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


def worst_error(rows: list[Measurement], law: Law) -> float:
    (series, curve), *_ = fit_rows(rows).items()
    sizes = np.exp2(np.linspace(10, 26, 300)).round().astype(int)
    cases = [sent(int(size)) for size in sizes]
    places = [[float(case.axes[axis]) for axis in AXES[series.operation]] for case in cases]
    seconds, _ = curve.predict(np.array(places))
    return float(np.max(np.abs(np.log(seconds / np.array([law(case) for case in cases])))))


def test_added_messages_gather_at_the_knee_and_beat_a_uniform_grid() -> None:
    coarse = [row(sent(2**power), knee_s) for power in (10, 15, 22, 26)]
    rows = list(coarse)
    add_infill(rows, knee_s, count=6 * BATCH)
    added = rows[len(coarse) :]
    near = [r for r in added if KNEE_BYTES / 32 <= r.case.axes["bytes"] <= KNEE_BYTES * 32]
    # The knee's surroundings are 10 of 16 octaves.
    assert len(near) > 0.65 * len(added)
    uniform = [row(sent(round(2 ** (10 + 16 * i / 10))), knee_s) for i in range(11)]
    assert worst_error(rows, knee_s) < worst_error(uniform, knee_s)


def test_a_badly_known_series_gets_more_points_than_a_well_known_one() -> None:
    def law(case: Case) -> float:
        axes = case.axes
        base = 1e-6 + 2.0 * axes["m"] * axes["n"] * axes["k"] / 1e11
        is_rough = case.dtype == "bf16"
        return base * (1.0 + 0.5 * is_rough * math.sin(3.0 * math.log2(axes["m"])))

    grid = [gemm_row(m, 1.0).case for m in (16, 64, 256, 1024, 4096)]
    rows = [
        row(case.model_copy(update={"dtype": dtype}), law)
        for case in grid
        for dtype in ("fp32", "bf16")
    ]
    infill = add_infill(rows, law, count=8 * BATCH)
    added = rows[10:]
    rough = sum(r.case.dtype == "bf16" for r in added)
    assert rough > 0.6 * len(added)
    assert infill.error_ratio > 0.0


def test_every_sixth_size_is_a_holdout_size() -> None:
    rows = [row(sent(2**power), knee_s) for power in (10, 15, 22, 26)]
    infill = add_infill(rows, knee_s, count=2 * BATCH)
    assert len(infill.holdout) == 2 * BATCH // HOLDOUT_EVERY
    assert infill.holdout <= {r.case.id for r in rows}


def test_sizes_that_fits_have_seen_are_no_checks_of_them() -> None:
    # Between 64 and 128 bytes lie few whole messages, so that sizes are drawn again and again.
    rows = [row(sent(size), knee_s) for size in (64, 80, 96, 112, 128)]
    begun = {r.case.id for r in rows}
    infill = add_infill(rows, knee_s, count=4 * BATCH)
    assert not infill.holdout & begun
    ids = [r.case.id for r in rows]
    assert len(ids) == len(set(ids))


def test_a_grid_of_round_sizes_counts_as_unknown_until_others_were_seen() -> None:
    def law(case: Case) -> float:
        # Proportional, and half as much again for rows that fill no vector; bf16 is a little rough.
        axes = case.axes
        is_ragged = case.dtype == "fp32" and axes["m"] % 16 != 0
        rough = 0.05 * math.sin(5.0 * math.log2(axes["m"])) * (case.dtype == "bf16")
        return 1e-9 * axes["m"] * (1.5 if is_ragged else 1.0) * (1.0 + rough)

    grid = [gemm_row(m, 1.0).case for m in (16, 64, 256, 1024, 4096)]
    rows = [row(c.model_copy(update={"dtype": d}), law) for c in grid for d in ("fp32", "bf16")]
    add_infill(rows, law, count=2 * BATCH)
    of_fp32 = sum(r.case.dtype == "fp32" for r in rows[10:])
    assert of_fp32 >= MIN_SAMPLED


def test_cheap_sizes_are_preferred_where_they_add_as_much() -> None:
    def mean_octave(cost_s: Callable[[Case], float]) -> float:
        rows = [row(sent(2**power), knee_s) for power in (10, 18, 26)]
        infill = Infill(rows=rows, rng=np.random.default_rng(0), cost_s=cost_s)
        found = [infill.next() for _ in range(BATCH)]
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
        add_infill(rows, lambda case: 1e-6 * case.axes["m"] ** 0.9, count=BATCH)
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
