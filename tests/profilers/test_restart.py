"""Restarts: phases of processes that really start, and what one that does not start leaves."""

import sys
from pathlib import Path

import pytest

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.records import Measurement, MeasurementStatus
from profilers.restart import PHASES, REPEATS, RestartBenchmark, phases_s
from profilers.session import measure_profile
from profilers.store import read_profile
from profilers.team import SingleRank

ALONE: dict[str, str] = {}
SAYS_WHEN = "print([time.monotonic() + 0.01 * phase for phase in range(6)])"


def measured(directory: Path) -> tuple[Measurement, ...]:
    benchmark = RestartBenchmark(
        setting=Setting(
            device="cpu", dtypes=(), team=SingleRank(), clock=HostClock(), directory=directory
        )
    )
    (case,) = benchmark.cases()
    return benchmark.measure(case, budget_s=0.0)


def measured_with(
    program: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Measurement, ...]:
    """Measure where Python is a program of the test's own."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport sys, time\n{program}\n", encoding="utf-8")
    python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr("profilers.restart.sys.executable", str(python))
        return measured(folder)


def test_a_phase_begins_when_the_one_before_it_is_over() -> None:
    assert phases_s((0.5, 2.0, 2.0, 2.25)) == (0.5, 1.5, 0.0, 0.25)


def test_every_phase_is_a_row_with_a_repeat_for_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = measured_with(SAYS_WHEN, tmp_path, monkeypatch)
    assert [row.case.kind for row in rows] == list(PHASES)
    assert {(row.status, len(row.times_s)) for row in rows} == {(MeasurementStatus.OK, REPEATS)}
    assert all(row.median_s == pytest.approx(0.01, rel=0.01) for row in rows[1:])


def test_a_process_that_does_not_start_is_a_row_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "sys.exit('no such device')": "rank 0: no such device",
        "sys.exit(3)": "rank 0: ended with exit code 3",
        "print([3.0, 2.0])": "rank 0: ended with exit code 0",
        "print('a word of a library')": "rank 0: ended with exit code 0",
    }
    wrong = {}
    for program, error in programs.items():
        (row,) = measured_with(program, tmp_path, monkeypatch)
        if (row.status, row.error) != (MeasurementStatus.FAILED, error):
            wrong[program] = row
    assert not wrong


@pytest.mark.slow
def test_two_ranks_start_anew_and_join(tmp_path: Path) -> None:
    measure_profile(
        tmp_path, suites=("restart",), budget_s=5.0, ranks=2, device="cpu", environment=ALONE
    )
    rows = read_profile(tmp_path).rows("restart")
    assert [(row.case.kind, row.case.axes["ranks"], row.rank) for row in rows] == [
        (phase, 2, 0) for phase in PHASES
    ]
    seconds = {row.case.kind: row.median_s for row in rows}
    # Two processes import PyTorch, and nothing else takes nearly as long.
    assert 0.3 < seconds["imports"] / sum(seconds.values()) <= 1.0
    assert min(seconds["process"], seconds["group"], seconds["first_collective"]) > 0.0
