"""Losses at meetings, by hand; two ranks really meet in tests/profilers/test_session.py."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.interpolation import fit_rows
from profilers.links.arrival_skew import (
    MAX_BLOCKS,
    MIN_BLOCKS,
    SMALLEST_LOSS_S,
    WORK_US,
    ArrivalSkewBenchmark,
    lost_seconds,
    num_blocks,
    positive,
)
from profilers.links.groups import shapes
from profilers.records import Case, MeasurementStatus
from profilers.series import key_of
from profilers.store import read_profile
from profilers.team import SingleRank
from tests.rows import each_row

EXAMPLES = Path(__file__).parents[3] / "examples/profiles"


class Four(SingleRank):
    """One of four ranks that are not connected."""

    world = 4


def _benchmark(team: SingleRank) -> ArrivalSkewBenchmark:
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=team, clock=HostClock(), directory=Path()
    )
    return ArrivalSkewBenchmark(setting=setting)


def test_arrival_skew_by_hand() -> None:
    # Two ranks, two blocks, 0.1 s and 0.2 s for the same collective alone.
    # First: 1.5 and 1.4 s with work of 1.0 and 1.2: 1.45 - 1.1 - 0.15. Then no loss at all.
    seen = [(0.1, [1.0, 1.0], [1.5, 1.2]), (0.2, [1.2, 1.0], [1.4, 1.1])]
    assert lost_seconds(seen) == pytest.approx([0.2, 0.0])
    # Nothing but 1 s of work; once the second rank is woken 0.5 s late, and the first one waits
    # for it at the next meeting.
    first, second = [1.0, 1.5, 1.0, 1.0], [1.5, 1.0, 1.0, 1.0]
    worked = [1.0] * 4
    assert sum(lost_seconds([(0.0, worked, first), (0.0, worked, second)])) == pytest.approx(0.5)
    assert positive([0.0, -1.0]) == (SMALLEST_LOSS_S, SMALLEST_LOSS_S)
    assert positive([1.0, 4.0]) == pytest.approx((1.0, 4.0))


@settings(deadline=None, max_examples=60)
@given(lost_s=st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=16))
def test_blocks_are_positive_repeats_whose_mean_stays(lost_s: list[float]) -> None:
    repeats_s = positive(lost_s)
    assert len(repeats_s) == len(lost_s)
    assert min(repeats_s) >= SMALLEST_LOSS_S
    assert max(repeats_s) <= max(SMALLEST_LOSS_S, *lost_s) + 1e-12
    mean_s = statistics.fmean(repeats_s)
    # A block below the clock's worth adds so much at most.
    assert mean_s == pytest.approx(max(0.0, statistics.fmean(lost_s)), abs=2 * SMALLEST_LOSS_S)


def test_longer_works_of_stored_profiles_are_predicted_from_the_shorter_ones() -> None:
    by_model: dict[bool, list[float]] = {False: [], True: []}
    on_a_line: dict[bool, list[float]] = {False: [], True: []}
    for used in sorted(EXAMPLES.glob("epyc-*/used/profile")):
        is_quiet = used.parts[-3] == "epyc-held-out-4"
        rows = sorted(
            read_profile(used).rows("rendezvous"), key=lambda row: row.case.axes["work_us"]
        )
        for known in range(1, len(rows)):
            (curve,) = fit_rows(rows[:known]).values()
            works_us = [row.case.axes["work_us"] for row in rows]
            lost_s = [statistics.fmean(row.times_s) for row in rows]
            slope = 0.0
            if known > 1:
                rise_s = max(0.0, lost_s[known - 1] - lost_s[known - 2])
                slope = rise_s / (works_us[known - 1] - works_us[known - 2])
            for place in range(known, len(rows)):
                _, place_of_row = key_of(rows[place].case)
                (said_s,), _ = curve.predict(np.array([place_of_row], dtype=np.float64))
                by_model[is_quiet].append(abs(math.log(said_s / lost_s[place])))
                said_s = lost_s[known - 1] + slope * (works_us[place] - works_us[known - 1])
                on_a_line[is_quiet].append(abs(math.log(said_s / lost_s[place])))
    # The run of a quiet host apart: there the model is hardly better than the line.
    for is_quiet, count, model, line in ((False, 7, 1.7, 3.4), (True, 1, 2.3, 2.3)):
        assert len(by_model[is_quiet]) == 10 * count
        assert math.exp(statistics.fmean(by_model[is_quiet])) < model
        assert math.exp(statistics.fmean(on_a_line[is_quiet])) > line


@each_row(
    ("budget_s", "interval_s", "blocks"),
    # A block of 8 meetings of 10 ms takes 80 ms; ten of them fit into 0.8 s.
    [(0.801, 0.01, 10), (0.0, 0.01, MIN_BLOCKS), (1e3, 0.01, MAX_BLOCKS), (1.0, 0.0, MAX_BLOCKS)],
)
def test_the_budget_decides_how_often_ranks_meet(
    budget_s: float, interval_s: float, blocks: int
) -> None:
    assert num_blocks(budget_s, interval_s=interval_s) == blocks


def test_every_group_is_measured_after_little_work_and_much() -> None:
    cases = _benchmark(Four()).cases()
    assert len({case.id for case in cases}) == len(cases) == len(shapes(4)) * len(WORK_US)
    groups = {(case.axes["ranks"], case.axes["stride"], case.axes["world"]) for case in cases}
    assert groups == {(2, 1, 4), (2, 2, 4), (4, 1, 4)}
    assert {case.axes["work_us"] for case in cases} == set(WORK_US)


def test_one_rank_waits_for_nobody() -> None:
    benchmark = _benchmark(SingleRank())
    assert benchmark.cases() == ()
    assert "waits for nobody" in benchmark.note()
    assert _benchmark(Four()).note() == ""
    axes = {"work_us": 250, "ranks": 2, "stride": 1, "world": 2}
    case = Case(operation="rendezvous", axes=axes)
    (row,) = _benchmark(SingleRank()).measure(case, budget_s=0.0)
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "no such group of ranks here")
