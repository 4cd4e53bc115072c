import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from profilers.adaptive import BATCH, HOLDOUT_EVERY, MIN_SAMPLED, Infill
from profilers.held_out import checked
from profilers.interpolation import fit_rows
from profilers.noise.policy import QUIET, NoisePolicy
from profilers.noise.revisits import MAX_SESSIONS
from profilers.noise.selection import CaseSession
from profilers.records import AXES, Case, Measurement, MeasurementStatus
from profilers.schedule import TableSchedule
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


SINGLE_SESSION = NoisePolicy(revisits=False)


def add_infill(
    rows: list[Measurement], law: Law, *, count: int, seed: int = 0, noise: NoisePolicy = QUIET
) -> Infill:
    """Measure `count` sizes, new ones or known ones."""
    schedule = TableSchedule(requested=[], grid=[], rows=rows)
    infill = Infill(
        rows=rows,
        rng=np.random.default_rng(seed),
        gains=schedule.selection.gains,
        noise=noise,
    )
    for _ in range(count):
        case = infill.next()
        if case is None:
            break
        schedule.add(CaseSession(rows=[row(case, law)]))
    return infill


class Disturbed:
    """A law on a machine with neighbours: so many sessions in ten take half as long again."""

    def __init__(self, law: Law, *, in_ten: int) -> None:
        self._law = law
        self._in_ten = in_ten
        self._chance = np.random.default_rng(5)
        self.measured: list[str] = []

    def __call__(self, case: Case) -> float:
        self.measured.append(case.id)
        is_slow = self._chance.random() < 0.1 * self._in_ten
        return self._law(case) * (1.5 if is_slow else 1.0)


def mean_error(rows: list[Measurement], law: Law) -> float:
    return float(np.mean([math.log(row.expected_s / law(row.case)) for row in rows]))


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
    infill = add_infill(rows, knee_s, count=2 * BATCH, noise=SINGLE_SESSION)
    assert len(infill.holdout) == 2 * BATCH // HOLDOUT_EVERY
    assert infill.holdout <= {r.case.id for r in rows}


def test_without_a_sentinel_the_fastest_session_of_a_disturbed_size_counts() -> None:
    rows = [row(copied(2**power), knee_s) for power in range(10, 27)]
    rows[8] = Measurement(case=rows[8].case, times_s=(1.7 * knee_s(rows[8].case),))
    add_infill(rows, knee_s, count=BATCH)
    assert rows[8].expected_s == knee_s(rows[8].case)


def test_a_disturbed_collective_is_measured_again_and_all_its_sessions_count() -> None:
    rows = [row(sent(2**power), knee_s) for power in range(10, 27)]
    usual_s = knee_s(rows[8].case)
    rows[8] = Measurement(case=rows[8].case, times_s=(1.7 * usual_s,))
    add_infill(rows, knee_s, count=BATCH)
    assert rows[8].times_s[0] == 1.7 * usual_s
    assert set(rows[8].times_s[1:]) == {usual_s}


def test_further_sessions_remove_most_of_what_neighbours_add() -> None:
    def begun(law: Law) -> list[Measurement]:
        return [row(copied(2**power), law) for power in range(10, 27)]

    once, again = Disturbed(knee_s, in_ten=4), Disturbed(knee_s, in_ten=4)
    by_once, by_again = begun(once), begun(again)
    add_infill(by_once, once, count=10 * BATCH, noise=SINGLE_SESSION)
    add_infill(by_again, again, count=10 * BATCH)
    assert mean_error(by_again, knee_s) < 0.5 * mean_error(by_once, knee_s)
    assert max(Counter(again.measured).values()) <= MAX_SESSIONS
    # Ranks in turns disturb each other in a step as well.
    assert max(Counter(once.measured).values()) == 1


def test_with_a_sentinel_further_sessions_average_out_what_it_missed() -> None:
    chance = np.random.default_rng(3)

    def scattered(case: Case) -> float:
        return knee_s(case) * math.exp(0.15 * chance.normal())

    rows = [row(copied(2**power), scattered) for power in range(10, 27)]
    schedule = TableSchedule(requested=[], grid=[], rows=rows)
    infill = Infill(rows=rows, rng=np.random.default_rng(0), gains=schedule.selection.gains)
    for _ in range(20 * BATCH):
        case = infill.next()
        assert case is not None
        schedule.add(CaseSession(rows=[row(case, scattered)], undisturbed_s=1.0))
    away_N = np.array([math.log(r.expected_s / knee_s(r.case)) for r in rows])
    is_again_N = np.array([len(r.times_s) > 1 for r in rows])
    assert is_again_N.mean() >= 0.2
    # On both sides of the truth: the fastest of them would lie below it.
    assert abs(away_N[is_again_N].mean()) < 0.05
    assert np.abs(away_N[is_again_N]).mean() < np.abs(away_N[~is_again_N]).mean()


def test_an_undisturbed_table_spends_most_sessions_on_new_sizes() -> None:
    rows = [row(sent(2**power), knee_s) for power in range(10, 27)]
    begun = len(rows)
    calm = Disturbed(knee_s, in_ten=0)
    add_infill(rows, calm, count=10 * BATCH)
    assert len(rows) - begun > 0.6 * len(calm.measured)


def test_holdout_sizes_are_all_measured_twice_whatever_they_took() -> None:
    rows = [row(sent(2**power), knee_s) for power in range(10, 27)]
    calm = Disturbed(knee_s, in_ten=0)
    infill = add_infill(rows, calm, count=10 * BATCH)
    counts = Counter(calm.measured)
    early = [name for name in calm.measured[: 6 * BATCH] if name in infill.holdout]
    assert len(set(early)) > 5
    assert {counts[name] for name in early} == {2}


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
        infill = Infill(
            rows=rows, rng=np.random.default_rng(0), cost_s=cost_s, noise=SINGLE_SESSION
        )
        found = [infill.next() for _ in range(BATCH)]
        return float(np.mean([math.log2(case.axes["bytes"]) for case in found if case]))

    by_size = mean_octave(lambda case: 0.01 + case.axes["bytes"] / 2**20)
    assert by_size < mean_octave(lambda _case: 1.0) - 1.0


def test_new_and_repeated_sizes_alternate() -> None:
    rows = [row(sent(2**power), knee_s) for power in range(10, 27)]
    # Every second one was disturbed.
    rows[::2] = [Measurement(case=r.case, times_s=(2.0 * r.median_s,)) for r in rows[::2]]
    infill = Infill(rows=rows, rng=np.random.default_rng(0))
    begun = {r.case.id for r in rows}
    first = [case.id in begun for case in (infill.next() for _ in range(BATCH)) if case]
    assert 2 <= sum(first) <= BATCH - 2
    # They do not all come at the end, or at the start.
    assert 0 < first.index(True) < BATCH // 2


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
