"""The coordinator of a run, on rank 0: it decides the next case, collects the rows and writes them.

A `MeasuredTable` is one table being measured, a `ProfileOnDisk` what is written so far, and the
`Coordinator` holds both, for the rank loop and for whatever ends the run early. On other ranks it
is empty.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from profilers.adaptive import Infill
from profilers.benchmark import Benchmark
from profilers.clock import HostClock
from profilers.errors import MachineMismatchError, ProfilerError
from profilers.held_out import checked
from profilers.job import Job
from profilers.progress import ProgressEvent
from profilers.records import (
    Case,
    Checked,
    Machine,
    Measurement,
    MeasurementStatus,
    ProfileHeader,
    TableInfo,
)
from profilers.schedule import MAX_CASE_S, Step, TableSchedule, key
from profilers.schema_version import moetune_version
from profilers.second_pass import (
    INFILL_S,
    SKIPPED_RATIO,
    SecondPassTable,
    next_infill,
    next_skipped,
)
from profilers.store import clear_unlisted, holds_profile, read_profile, write_header, write_table

CLOSING_S = 2.0
"""Reserved for checking and writing the tables, and for the ranks to leave..."""
CLOSING_RATIO = 0.1
"""...but no more of the budget than this."""
MEASURED_RATIO = 0.5
"""The share of the budget that is for measuring, however long the ranks took to start."""
SEED = 20
"""Seed of the sampled sizes: repeated jobs measure the same ones."""
REQUESTED_S = 0.6
"""The first pass reserves this for each case that the spec requests..."""
REQUESTED_RATIO = 0.6
"""...but no more of the time left than this."""
SHARE_RATIO = 2.0
"""A table's first pass takes no more than this times its share of the budget by weight: what
earlier tables left over is for sizes in between, not for the most expensive cases of the last
table."""
WRITE_EVERY_S = 10.0


@dataclass(slots=True, kw_only=True)
class MeasuredTable:
    """One table being measured."""

    benchmark: Benchmark
    schedule: TableSchedule
    second_pass: SecondPassTable | None
    """Part of the table in the second pass; None if nothing lies between its sizes."""
    started_s: float
    end_s: float
    deadline_s: float
    spent_s: float
    """Seconds of earlier runs; of this run's as well, once the first pass is over."""
    before: Checked | None
    """An earlier run's errors at its hold-out sizes."""
    written_s: float
    """Clock seconds at which its rows were last written."""

    def next_step(self) -> Step | None:
        return self.schedule.next(left_s=self.end_s - HostClock().now_s())

    def event(self, step: Step) -> ProgressEvent:
        done = len({key(row.case) for row in self.schedule.rows}) + self.schedule.skipped
        return ProgressEvent(
            table=self.benchmark.operation,
            done=done,
            total=done + self.schedule.remaining,
            left_s=max(0.0, self.deadline_s - HostClock().now_s()),
            case=step.case.id,
        )

    def info(self, *, complete: bool, seconds: float, with_holdout: bool = False) -> TableInfo:
        """Describe it; `with_holdout` also predicts the sizes that were left out of its fits."""
        schedule, second_pass = self.schedule, self.second_pass
        errors = {
            key(row.case): row.error
            for row in schedule.rows
            if row.status is not MeasurementStatus.OK
        }
        notes = [
            self.benchmark.note(),
            f"{_cases(schedule.skipped)} skipped: the time budget was spent"
            if schedule.skipped
            else "",
            f"{_cases(len(errors))} failed, e.g. {min(errors.values())}" if errors else "",
        ]
        errors_at_holdout = (
            checked(schedule.rows, left_out=second_pass.infill.holdout)
            if with_holdout and second_pass
            else None
        )
        return TableInfo(
            rows=len(schedule.rows),
            complete=complete,
            seconds=seconds,
            note="; ".join(note for note in notes if note),
            checked=errors_at_holdout or self.before,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOnDisk:
    """The profile as written so far."""

    job: Job
    header: ProfileHeader
    known: Mapping[str, tuple[Measurement, ...]]
    """Rows that an earlier run measured."""
    deadline_s: float
    weight: float
    """Sum of all tables' weights, for the share of the budget that one table gets."""

    @classmethod
    def open(cls, job: Job, *, machine: Machine, weight: float) -> "ProfileOnDisk":
        """Start a profile, or continue the one to resume."""
        out = Path(job.out)
        known: dict[str, tuple[Measurement, ...]] = {}
        header = ProfileHeader(
            moetune_version=moetune_version(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine,
            tables={},
        )
        if job.resume and holds_profile(out):
            profile = read_profile(out, with_incomplete=True)
            _require_same(profile.header.machine, machine, path=out)
            header = profile.header
            known = {
                name: tuple(row for row in profile.measurements if row.case.operation == name)
                for name in header.tables
            }
        write_header(out, header)
        clear_unlisted(out, header)
        return cls(
            job=job,
            header=header,
            known=known,
            deadline_s=deadline_s(job, now_s=HostClock().now_s()),
            weight=weight,
        )

    def begin_table(self, benchmark: Benchmark, *, later: Sequence[Benchmark]) -> MeasuredTable:
        """Begin or continue a table; of a complete one only requested cases are measured."""
        before = self.header.tables.get(benchmark.operation)
        is_done = before is not None and before.complete
        has_second_pass = bool(benchmark.refined_axes) and not is_done
        schedule = TableSchedule(
            requested=_requested(self.job, benchmark),
            grid=() if is_done else benchmark.cases(),
            rows=list(self.known.get(benchmark.operation, ())),
            grid_case_s=INFILL_S if has_second_pass else MAX_CASE_S,
        )
        if before is None:
            self.with_info(benchmark.operation, TableInfo(rows=0, complete=False, seconds=0.0))
        now_s = HostClock().now_s()
        left_s = max(0.0, self.deadline_s - now_s)
        infill = Infill(rows=schedule.rows, rng=np.random.default_rng(SEED), cost_s=schedule.cost_s)
        return MeasuredTable(
            benchmark=benchmark,
            schedule=schedule,
            second_pass=SecondPassTable(weight=benchmark.weight, schedule=schedule, infill=infill)
            if has_second_pass
            else None,
            started_s=now_s,
            end_s=now_s + self._share_s(benchmark, later=later, left_s=left_s),
            deadline_s=self.deadline_s,
            spent_s=before.seconds if before else 0.0,
            before=before.checked if before else None,
            written_s=now_s,
        )

    def with_rows(self, table: MeasuredTable, info: TableInfo) -> "ProfileOnDisk":
        """Write a table, then the header that counts it."""
        operation = table.benchmark.operation
        before = self.header.tables.get(operation)
        if before and before.complete and not table.schedule.is_changed:
            return self
        write_table(Path(self.job.out), table.schedule.rows, operation=operation)
        return self.with_info(operation, info)

    def with_info(self, operation: str, info: TableInfo) -> "ProfileOnDisk":
        """Write the header with a new description of one table."""
        tables = self.header.tables | {operation: info}
        header = self.header.model_copy(update={"tables": tables})
        write_header(Path(self.job.out), header)
        return replace(self, header=header)

    def _share_s(self, benchmark: Benchmark, *, later: Sequence[Benchmark], left_s: float) -> float:
        """Seconds for the first pass of a table out of what is left for it and the later ones."""
        requested = len(_requested(self.job, benchmark))
        all_requested = requested + sum(
            len(_requested(self.job, later_benchmark)) for later_benchmark in later
        )
        reserved_s = min(REQUESTED_S * all_requested, REQUESTED_RATIO * left_s)
        weights = benchmark.weight + sum(later_benchmark.weight for later_benchmark in later)
        share_s = (left_s - reserved_s) * benchmark.weight / weights
        most_s = SHARE_RATIO * self.job.budget_s * benchmark.weight / self.weight
        return min(share_s, most_s) + (
            reserved_s * requested / all_requested if all_requested else 0.0
        )


@dataclass(slots=True)
class Coordinator:
    """Rank 0's state of the run; empty on other ranks."""

    profile: ProfileOnDisk | None = None
    table: MeasuredTable | None = None
    """Table that is in its first pass."""
    tables: list[MeasuredTable] = field(default_factory=list)
    """Tables whose first pass is over."""
    skipped_end_s: float | None = None
    """Time at which the second pass ends the cases that the first one skipped; None before it."""

    def begin(self, benchmark: Benchmark, *, later: Sequence[Benchmark]) -> MeasuredTable | None:
        """Begin the first pass of a table; None on other ranks."""
        self.table = self.profile.begin_table(benchmark, later=later) if self.profile else None
        return self.table

    def add(self, table: MeasuredTable, rows: Sequence[Measurement], *, seconds: float) -> None:
        """Add the rows of a case, and write the table every `WRITE_EVERY_S` seconds."""
        table.schedule.add(rows, spent_s=seconds)
        now_s = HostClock().now_s()
        if now_s - table.written_s >= WRITE_EVERY_S:
            self._write(table)
            table.written_s = now_s

    def end(self) -> None:
        """End the first pass of the table in progress; from here on it counts as complete."""
        table = self.table
        if table is not None:
            table.spent_s += HostClock().now_s() - table.started_s
            self.tables.append(table)
            self.table = None
            self._write(table)

    def next_infill(self) -> tuple[int, Step] | None:
        """Choose a table by its index and a size for it; None ends the second pass."""
        if self.profile is None:
            return None
        now_s = HostClock().now_s()
        left_s = self.profile.deadline_s - now_s
        if self.skipped_end_s is None:
            self.skipped_end_s = now_s + SKIPPED_RATIO * left_s
        schedules = [table.schedule for table in self.tables]
        return next_skipped(schedules, left_s=self.skipped_end_s - now_s) or next_infill(
            [table.second_pass for table in self.tables], left_s=left_s
        )

    def add_infill(
        self, place: int, rows: Sequence[Measurement], *, seconds: float
    ) -> MeasuredTable:
        """Add what the second pass measured."""
        table = self.tables[place]
        table.spent_s += seconds
        if table.second_pass:
            table.second_pass.spent_s += seconds
        self.add(table, rows, seconds=seconds)
        return table

    def close(self) -> ProfileHeader | None:
        """Check and write every table; the header, None on other ranks."""
        for table in self.tables:
            self._write(table, with_holdout=True)
        return self.profile.header if self.profile else None

    def save(self) -> None:
        """Write what was measured so far, if anything."""
        # The run ends for another reason, which is the one to report.
        with suppress(ProfilerError):
            for table in (*self.tables, self.table):
                if table is not None and table.schedule.rows:
                    self._write(table)

    def _write(self, table: MeasuredTable, *, with_holdout: bool = False) -> None:
        is_done = table is not self.table
        seconds = table.spent_s if is_done else HostClock().now_s() - table.started_s
        info = table.info(
            complete=is_done,
            seconds=seconds if is_done else table.spent_s + seconds,
            with_holdout=with_holdout,
        )
        if self.profile is not None:
            self.profile = self.profile.with_rows(table, info)


def deadline_s(job: Job, *, now_s: float) -> float:
    """Return the time to end at, so that the job keeps its budget; `now_s`: all ranks are ready."""
    closing_s = min(CLOSING_S, CLOSING_RATIO * job.budget_s)
    begun_s = now_s if job.begun_s is None else min(now_s, job.begun_s)
    return max(begun_s + job.budget_s - closing_s, now_s + MEASURED_RATIO * job.budget_s)


def _cases(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _requested(job: Job, benchmark: Benchmark) -> tuple[Case, ...]:
    return tuple(case for case in job.extra_cases if case.operation == benchmark.operation)


def _require_same(stored: Machine, here: Machine, *, path: Path) -> None:
    differences = list(here.differences(stored))
    if stored.world != here.world:
        differences.append(f"ranks: {here.world} here, {stored.world} there")
    if differences:
        raise MachineMismatchError(
            f"{path} cannot be resumed, {differences[0]}; measure into a new directory"
        )
