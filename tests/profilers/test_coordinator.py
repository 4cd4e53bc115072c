import json
from pathlib import Path

import pytest

from profilers.coordinator import CLOSING_S, Book, Desk, deadline_s
from profilers.errors import MachineMismatchError
from profilers.job import Job
from profilers.records import AXES, Case, Measurement
from profilers.schedule import Step
from profilers.store import read_header, read_profile
from profilers.visits import Visit
from tests.profilers.testing import FakeBench, fake_machine, gemm_case, gemm_row


def job(out: Path = Path("out"), *, budget_s: float = 60.0, begun_s: float | None = None) -> Job:
    return Job(out=str(out), suites=("kernels",), budget_s=budget_s, begun_s=begun_s)


def visit(bench: FakeBench, step: Step) -> Visit:
    return Visit(rows=bench.measure(step.case, budget_s=step.budget_s))


def test_starting_the_ranks_and_writing_are_part_of_the_budget() -> None:
    assert deadline_s(job(begun_s=100.0), now_s=104.0) == 160.0 - CLOSING_S
    assert deadline_s(job(), now_s=104.0) == 164.0 - CLOSING_S


def test_half_of_the_budget_is_for_measuring_however_long_the_start_took() -> None:
    assert deadline_s(job(begun_s=0.0), now_s=500.0) == 530.0


def test_a_short_budget_keeps_most_of_itself() -> None:
    assert deadline_s(job(budget_s=1.0, begun_s=0.0), now_s=0.0) == pytest.approx(0.9)


def test_what_the_second_round_measured_is_kept_and_tables_stay_complete(tmp_path: Path) -> None:
    desk = Desk(book=Book.opened(job(tmp_path), machine=fake_machine(), weight=1.0))
    bench = FakeBench(listed=(gemm_case(16), gemm_case(64), gemm_case(4096)))
    table = desk.begin(bench, later=())
    assert table is not None
    while step := table.next_step():
        desk.add(table, visit(bench, step))
    desk.end()
    assert read_header(tmp_path).tables["gemm"].complete
    for _ in range(12):
        chosen = desk.next_fill()
        assert chosen is not None
        place, step = chosen
        desk.filled(place, visit(bench, step), seconds=0.0)
    desk.keep()
    kept = read_profile(tmp_path)
    assert kept.header.tables["gemm"].complete
    assert len(kept.measurements) == 3 + 12
    header = desk.close()
    assert header is not None
    assert header == read_header(tmp_path)
    checked = header.tables["gemm"].checked
    assert checked is not None
    assert checked.sizes == 2
    # The bench's law is the base itself.
    assert checked.p90_ratio < 1e-3
    assert len(read_profile(tmp_path).measurements) == 3 + 12


def test_what_earlier_tables_left_over_is_not_all_for_the_last_one(tmp_path: Path) -> None:
    book = Book.opened(job(tmp_path), machine=fake_machine(), weight=20.0)
    table = book.table(FakeBench(listed=()), later=())
    # Twice a twentieth of 60 s, although everything is left.
    assert table.end_s - table.started_s == pytest.approx(6.0)
    alone = Book.opened(job(tmp_path), machine=fake_machine(), weight=1.0)
    table = alone.table(FakeBench(listed=()), later=())
    assert table.end_s - table.started_s == pytest.approx(60.0 - CLOSING_S, abs=1.0)


def test_a_table_that_was_cut_short_gets_its_cases_in_the_second_round(tmp_path: Path) -> None:
    # A twentieth of a second is for its first round.
    book = Book.opened(job(tmp_path), machine=fake_machine(), weight=2400.0)
    desk = Desk(book=book)
    bench = FakeBench(listed=(gemm_case(16), gemm_case(64), gemm_case(10**5)), refined_axes=())
    table = desk.begin(bench, later=())
    assert table is not None
    while step := table.next_step():
        desk.add(table, visit(bench, step))
    desk.end()
    assert read_header(tmp_path).tables["gemm"].note == "1 case skipped: the time budget was spent"
    chosen = desk.next_fill()
    assert chosen is not None
    place, step = chosen
    assert step.case.axes["m"] == 10**5
    desk.filled(place, visit(bench, step), seconds=0.0)
    assert desk.next_fill() is None
    header = desk.close()
    assert header is not None
    assert header.tables["gemm"].note == ""
    assert len(read_profile(tmp_path).measurements) == 3


def test_an_empty_desk_has_nothing_to_decide_or_to_write() -> None:
    desk = Desk()
    assert desk.begin(FakeBench(listed=()), later=()) is None
    desk.end()
    assert desk.next_fill() is None
    desk.keep()
    assert desk.close() is None


def test_a_profile_of_another_machine_is_not_opened(tmp_path: Path) -> None:
    Book.opened(job(tmp_path), machine=fake_machine(), weight=1.0)
    other = fake_machine(device="Other 1")
    with pytest.raises(MachineMismatchError, match="measure into a new directory"):
        Book.opened(job(tmp_path).model_copy(update={"resume": True}), machine=other, weight=1.0)


def test_headers_of_earlier_releases_say_nothing_of_checks(tmp_path: Path) -> None:
    desk = Desk(book=Book.opened(job(tmp_path), machine=fake_machine(), weight=1.0))
    rows: list[Measurement] = [gemm_row(16, 1.0)]
    table = desk.begin(FakeBench(listed=()), later=())
    assert table is not None
    desk.add(table, Visit(rows=rows))
    desk.end()
    stored = json.loads((tmp_path / "profile.json").read_text())
    assert stored["tables"]["gemm"].pop("checked") is None
    (tmp_path / "profile.json").write_text(json.dumps(stored))
    assert read_header(tmp_path).tables["gemm"].checked is None


def test_all_tables_are_kept_as_on_the_machine_undisturbed_and_say_how_slow_it_was(
    tmp_path: Path,
) -> None:
    desk = Desk(book=Book.opened(job(tmp_path), machine=fake_machine(), weight=2.0))
    for operation, quickest_s in (("gemm", 1.4e-4), ("attention", 1e-4)):
        table = desk.begin(FakeBench(listed=(), operation=operation), later=())
        assert table is not None
        case = gemm_case(8).model_copy(update={"operation": operation})
        if operation == "attention":
            axes = dict.fromkeys(AXES["attention"], 8)
            case = Case(operation=operation, dtype="fp32", direction="forward", axes=axes)
        row = Measurement(case=case, times_s=(1.4e-3,))
        desk.add(table, Visit(rows=[row], quickest_s=quickest_s))
        desk.end()
    # Interrupted here, the run has seen what the machine does undisturbed.
    desk.keep()
    kept = read_profile(tmp_path, with_incomplete=True)
    (product,), (attention,) = kept.table("gemm"), kept.table("attention")
    assert product.times_s == pytest.approx((1e-3,))
    assert attention.times_s == (1.4e-3,)
    tables = kept.header.tables
    assert "took 1.40 times as long as undisturbed" in tables["gemm"].note
    assert "undisturbed" not in tables["attention"].note


def test_what_a_resumed_run_adds_to_a_table_that_had_all_its_cases_is_written(
    tmp_path: Path,
) -> None:
    bench = FakeBench(listed=(gemm_case(16), gemm_case(64)))
    for resumed in (False, True):
        of_run = job(tmp_path).model_copy(update={"resume": resumed})
        book = Book.opened(of_run, machine=fake_machine(), weight=1.0)
        desk = Desk(book=book)
        table = desk.begin(bench, later=())
        assert table is not None
        while step := table.next_step():
            desk.add(table, visit(bench, step))
        desk.end()
        if resumed:
            faster = Visit(rows=[Measurement(case=gemm_case(16), times_s=(1e-9,))])
            desk.filled(0, faster, seconds=0.0)
        desk.close()
    kept = {row.case.axes["m"]: row.times_s for row in read_profile(tmp_path).measurements}
    assert kept[16] == (1e-9,)
