import json
from pathlib import Path

import pytest

from profilers.coordinator import CLOSING_S, Coordinator, ProfileOnDisk, deadline_s
from profilers.errors import MachineMismatchError
from profilers.job import Job
from profilers.records import Measurement
from profilers.schedule import Step
from profilers.store import read_header, read_profile
from tests.expect import present
from tests.profilers.testing import FakeBenchmark, fake_machine, gemm_case, gemm_row


def job(out: Path = Path("out"), *, budget_s: float = 60.0, begun_s: float | None = None) -> Job:
    return Job(out=str(out), suites=("kernels",), budget_s=budget_s, begun_s=begun_s)


def measured(benchmark: FakeBenchmark, step: Step) -> tuple[Measurement, ...]:
    return benchmark.measure(step.case, budget_s=step.budget_s)


def test_the_budget_is_shared_between_starting_measuring_and_writing() -> None:
    assert deadline_s(job(begun_s=100.0), now_s=104.0) == 160.0 - CLOSING_S
    assert deadline_s(job(), now_s=104.0) == 164.0 - CLOSING_S
    assert deadline_s(job(begun_s=0.0), now_s=500.0) == 530.0
    assert deadline_s(job(budget_s=1.0, begun_s=0.0), now_s=0.0) == pytest.approx(0.9)


def test_what_the_second_pass_measured_is_saved_and_tables_stay_complete(tmp_path: Path) -> None:
    coordinator = Coordinator(
        profile=ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=1.0)
    )
    benchmark = FakeBenchmark(listed=(gemm_case(16), gemm_case(64), gemm_case(4096)))
    table = present(coordinator.begin(benchmark, later=()))
    while step := table.next_step():
        coordinator.add(table, measured(benchmark, step), seconds=0.0)
    coordinator.end()
    assert read_header(tmp_path).tables["gemm"].complete
    for _ in range(12):
        place, step = present(coordinator.next_infill())
        coordinator.add_infill(place, measured(benchmark, step), seconds=0.0)
    coordinator.save()
    kept = read_profile(tmp_path)
    assert kept.header.tables["gemm"].complete
    assert len(kept.measurements) == 3 + 12
    header = present(coordinator.close())
    assert header == read_header(tmp_path)
    checked = present(header.tables["gemm"].checked)
    assert checked.sizes == 2
    # The benchmark's law is the base itself.
    assert checked.p90_ratio < 1e-3
    assert len(read_profile(tmp_path).measurements) == 3 + 12


def test_what_earlier_tables_left_over_is_not_all_for_the_last_one(tmp_path: Path) -> None:
    profile = ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=20.0)
    table = profile.begin_table(FakeBenchmark(listed=()), later=())
    # Twice a twentieth of 60 s, although everything is left.
    assert table.end_s - table.started_s == pytest.approx(6.0)
    isolated = ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=1.0)
    table = isolated.begin_table(FakeBenchmark(listed=()), later=())
    assert table.end_s - table.started_s == pytest.approx(60.0 - CLOSING_S, abs=1.0)


def test_a_table_that_was_cut_short_gets_its_cases_in_the_second_pass(tmp_path: Path) -> None:
    # A twentieth of a second is for its first pass.
    profile = ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=2400.0)
    coordinator = Coordinator(profile=profile)
    benchmark = FakeBenchmark(
        listed=(gemm_case(16), gemm_case(64), gemm_case(10**5)), refined_axes=()
    )
    table = present(coordinator.begin(benchmark, later=()))
    while step := table.next_step():
        coordinator.add(table, measured(benchmark, step), seconds=0.0)
    coordinator.end()
    assert read_header(tmp_path).tables["gemm"].note == "1 case skipped: the time budget was spent"
    place, step = present(coordinator.next_infill())
    assert step.case.axes["m"] == 10**5
    coordinator.add_infill(place, measured(benchmark, step), seconds=0.0)
    assert coordinator.next_infill() is None
    assert present(coordinator.close()).tables["gemm"].note == ""
    assert len(read_profile(tmp_path).measurements) == 3


def test_an_empty_coordinator_decides_and_writes_nothing() -> None:
    coordinator = Coordinator()
    assert coordinator.begin(FakeBenchmark(listed=()), later=()) is None
    coordinator.end()
    assert coordinator.next_infill() is None
    coordinator.save()
    assert coordinator.close() is None


def test_a_profile_of_another_machine_is_not_opened(tmp_path: Path) -> None:
    ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=1.0)
    other = fake_machine(device="Other 1")
    with pytest.raises(MachineMismatchError, match="measure into a new directory"):
        ProfileOnDisk.open(
            job(tmp_path).model_copy(update={"resume": True}), machine=other, weight=1.0
        )


def test_headers_of_earlier_releases_hold_no_holdout_errors(tmp_path: Path) -> None:
    coordinator = Coordinator(
        profile=ProfileOnDisk.open(job(tmp_path), machine=fake_machine(), weight=1.0)
    )
    table = present(coordinator.begin(FakeBenchmark(listed=()), later=()))
    coordinator.add(table, [gemm_row(16, 1.0)], seconds=0.0)
    coordinator.end()
    stored = json.loads((tmp_path / "profile.json").read_text())
    assert stored["tables"]["gemm"].pop("checked") is None
    (tmp_path / "profile.json").write_text(json.dumps(stored))
    assert read_header(tmp_path).tables["gemm"].checked is None


def test_what_a_resumed_run_adds_to_a_table_that_had_all_its_cases_is_written(
    tmp_path: Path,
) -> None:
    benchmark = FakeBenchmark(listed=(gemm_case(16), gemm_case(64)))
    for resumed in (False, True):
        of_run = job(tmp_path).model_copy(update={"resume": resumed})
        profile = ProfileOnDisk.open(of_run, machine=fake_machine(), weight=1.0)
        coordinator = Coordinator(profile=profile)
        table = present(coordinator.begin(benchmark, later=()))
        while step := table.next_step():
            coordinator.add(table, measured(benchmark, step), seconds=0.0)
        coordinator.end()
        if resumed:
            coordinator.add_infill(0, [gemm_row(32, 1e-9)], seconds=0.0)
        coordinator.close()
    kept = {row.case.axes["m"]: row.times_s for row in read_profile(tmp_path).measurements}
    assert kept[32] == (1e-9,)
    assert len(kept) == 3
