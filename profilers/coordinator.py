"""Rank 0's side of measuring a profile: what is decided, what is known, and what lies on disk.

A `Table` is one table in the making, a `Book` the profile as it lies on disk, and the `Desk` holds
both for whoever measures and for whoever has to end the run. Ranks other than the first have an
empty desk.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from profilers.adaptive import Infill
from profilers.benchmark import Bench
from profilers.errors import MachineMismatchError, ProfilerError
from profilers.held_out import checked
from profilers.job import Job
from profilers.progress import ProgressEvent
from profilers.records import (
    Case,
    Checked,
    Machine,
    Measurement,
    ProfileHeader,
    Status,
    TableInfo,
)
from profilers.schedule import MAX_CASE_S, Plan, Step, key
from profilers.second_pass import FILL_S, LATE_RATIO, Fill, next_fill, next_late
from profilers.store import clear_unlisted, holds_profile, read_profile, write_header, write_table
from profilers.timing import HostClock
from profilers.visits import Visit

CLOSING_S = 2.0
"""Kept back for judging and writing the tables, and for the ranks to leave..."""
CLOSING_RATIO = 0.1
"""...but no more of the budget than this."""
MEASURED_RATIO = 0.5
SEED = 20
"""Of the sizes that are drawn: ranks of one job and repeated jobs measure alike."""
ASKED_S = 0.6
ASKED_RATIO = 0.6
SHARE_RATIO = 2.0
"""A table's first round takes no more than this times its share of the budget by weight: what
earlier tables left over is for sizes in between, not for the dearest cases of the last table."""
KEPT_S = 10.0
TOLD_RATIO = 1.05
"""A machine that was less slowed is as good as undisturbed."""


@dataclass(slots=True, kw_only=True)
class Table:
    """One table in the making."""

    bench: Bench
    plan: Plan
    fill: Fill | None
    """Its part in the second round; None where nothing lies between its sizes."""
    started_s: float
    end_s: float
    deadline_s: float
    spent_s: float
    """Seconds of earlier runs; of this one's, once its first round is over."""
    before: Checked | None
    """What an earlier run found at sizes that it left out."""
    kept_s: float
    """When its rows were last written."""

    def next_step(self) -> Step | None:
        return self.plan.next(left_s=self.end_s - HostClock().now_s())

    def event(self, step: Step) -> ProgressEvent:
        done = len({key(row.case) for row in self.plan.rows}) + self.plan.skipped
        return ProgressEvent(
            table=self.bench.operation,
            done=done,
            total=done + self.plan.left,
            left_s=max(0.0, self.deadline_s - HostClock().now_s()),
            case=step.case.id,
        )

    def info(self, *, complete: bool, seconds: float, judged: bool = False) -> TableInfo:
        """Describe it; `judged` also predicts the sizes that were left out of its fits."""
        plan, fill = self.plan, self.fill
        errors = {key(row.case): row.error for row in plan.rows if row.status is not Status.OK}
        slower = f"cases took {plan.slowness:.2f} times as long as undisturbed, which is taken out"
        notes = [
            self.bench.note(),
            slower if plan.slowness >= TOLD_RATIO else "",
            f"{_cases(plan.skipped)} skipped: the time budget was spent" if plan.skipped else "",
            f"{_cases(len(errors))} failed, e.g. {min(errors.values())}" if errors else "",
            fill.infill.disturbed() if judged and fill else "",
        ]
        found = checked(plan.rows, left_out=fill.infill.checks) if judged and fill else None
        return TableInfo(
            rows=len(plan.rows),
            complete=complete,
            seconds=seconds,
            note="; ".join(note for note in notes if note),
            checked=found or self.before,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """The profile as it lies on disk."""

    job: Job
    header: ProfileHeader
    known: Mapping[str, tuple[Measurement, ...]]
    """Rows that an earlier run measured."""
    deadline_s: float
    weight: float
    """Of all tables together."""

    @classmethod
    def opened(cls, job: Job, *, machine: Machine, weight: float) -> "Book":
        """Start a profile, or take up the one to resume."""
        out = Path(job.out)
        known: dict[str, tuple[Measurement, ...]] = {}
        header = ProfileHeader(
            moetune_version=_version(),
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

    def table(self, bench: Bench, *, later: Sequence[Bench]) -> Table:
        """Begin a table, or go on with one; of a complete one only asked cases are measured."""
        before = self.header.tables.get(bench.operation)
        is_done = before is not None and before.complete
        is_filled = bool(bench.refined_axes) and not is_done
        plan = Plan(
            asked=_asked(self.job, bench),
            grid=() if is_done else bench.cases(),
            rows=list(self.known.get(bench.operation, ())),
            grid_case_s=FILL_S if is_filled else MAX_CASE_S,
        )
        if before is None:
            self.with_info(bench.operation, TableInfo(rows=0, complete=False, seconds=0.0))
        now_s = HostClock().now_s()
        left_s = max(0.0, self.deadline_s - now_s)
        infill = Infill(
            rows=plan.rows,
            rng=np.random.default_rng(SEED),
            gains=plan.visits.gains,
            cost_s=plan.cost_s,
            is_shared=self.header.machine.takes_turns,
        )
        return Table(
            bench=bench,
            plan=plan,
            fill=Fill(weight=bench.weight, plan=plan, infill=infill) if is_filled else None,
            started_s=now_s,
            end_s=now_s + self._share_s(bench, later=later, left_s=left_s),
            deadline_s=self.deadline_s,
            spent_s=before.seconds if before else 0.0,
            before=before.checked if before else None,
            kept_s=now_s,
        )

    def with_rows(self, table: Table, info: TableInfo) -> "Book":
        """Write a table, then the header that counts it."""
        operation = table.bench.operation
        before = self.header.tables.get(operation)
        if before and before.complete and not table.plan.visits.is_changed:
            return self
        write_table(Path(self.job.out), table.plan.rows, operation=operation)
        return self.with_info(operation, info)

    def with_info(self, operation: str, info: TableInfo) -> "Book":
        """Write the header with another word on one table."""
        tables = self.header.tables | {operation: info}
        header = self.header.model_copy(update={"tables": tables})
        write_header(Path(self.job.out), header)
        return replace(self, header=header)

    def _share_s(self, bench: Bench, *, later: Sequence[Bench], left_s: float) -> float:
        """Seconds for the first round of a table out of what is left for it and the later ones."""
        asked = len(_asked(self.job, bench))
        all_asked = asked + sum(len(_asked(self.job, other)) for other in later)
        reserved_s = min(ASKED_S * all_asked, ASKED_RATIO * left_s)
        weights = bench.weight + sum(other.weight for other in later)
        share_s = (left_s - reserved_s) * bench.weight / weights
        most_s = SHARE_RATIO * self.job.budget_s * bench.weight / self.weight
        return min(share_s, most_s) + (reserved_s * asked / all_asked if all_asked else 0.0)


@dataclass(slots=True)
class Desk:
    """Where rank 0's work lies, for whoever measures and for whoever has to end the run."""

    book: Book | None = None
    table: Table | None = None
    """In its first round."""
    tables: list[Table] = field(default_factory=list)
    """Through their first round."""
    quickest_s: float = 0.0
    """What the sentinel takes undisturbed, as far as is known; 0: nobody looked."""
    late_end_s: float | None = None
    """Until when the second round takes up what the first one skipped; None before it."""

    def begin(self, bench: Bench, *, later: Sequence[Bench]) -> Table | None:
        """Begin the first round of a table; None on other ranks."""
        self.table = self.book.table(bench, later=later) if self.book else None
        return self.table

    def add(self, table: Table, visit: Visit) -> None:
        """Take note of a visit, and write what is known now and then."""
        table.plan.add(visit)
        self.quickest_s = visit.quickest_s or self.quickest_s
        now_s = HostClock().now_s()
        if now_s - table.kept_s >= KEPT_S:
            self._write(table)
            table.kept_s = now_s

    def end(self) -> None:
        """End the first round of the table in progress; it counts as complete from here on."""
        table = self.table
        if table is not None:
            table.spent_s += HostClock().now_s() - table.started_s
            self.tables.append(table)
            self.table = None
            self._write(table)

    def next_fill(self) -> tuple[int, Step] | None:
        """Choose a table by its place and a size for it; None ends the second round."""
        if self.book is None:
            return None
        now_s = HostClock().now_s()
        left_s = self.book.deadline_s - now_s
        if self.late_end_s is None:
            self.late_end_s = now_s + LATE_RATIO * left_s
        plans = [table.plan for table in self.tables]
        return next_late(plans, left_s=self.late_end_s - now_s) or next_fill(
            [table.fill for table in self.tables], left_s=left_s
        )

    def filled(self, place: int, visit: Visit, *, seconds: float) -> Table:
        """Take note of what the second round measured."""
        table = self.tables[place]
        table.spent_s += seconds
        if table.fill:
            table.fill.spent_s += seconds
        self.add(table, visit)
        return table

    def close(self) -> ProfileHeader | None:
        """Judge and write every table; the header, None on other ranks."""
        for table in self.tables:
            self._write(table, judged=True)
        return self.book.header if self.book else None

    def keep(self) -> None:
        """Write what was measured by now, if anything."""
        # The run ends for another reason, which is the one to tell.
        with suppress(ProfilerError):
            for table in (*self.tables, self.table):
                if table is not None and table.plan.rows:
                    self._write(table)

    def _write(self, table: Table, *, judged: bool = False) -> None:
        visits = table.plan.visits
        if self.quickest_s and visits.quickest_s:
            visits.rescale(self.quickest_s)
        is_done = table is not self.table
        seconds = table.spent_s if is_done else HostClock().now_s() - table.started_s
        info = table.info(
            complete=is_done,
            seconds=seconds if is_done else table.spent_s + seconds,
            judged=judged,
        )
        if self.book is not None:
            self.book = self.book.with_rows(table, info)


def deadline_s(job: Job, *, now_s: float) -> float:
    """When to end, so that the whole job takes its budget; `now_s` is when all ranks are ready."""
    closing_s = min(CLOSING_S, CLOSING_RATIO * job.budget_s)
    begun_s = now_s if job.begun_s is None else min(now_s, job.begun_s)
    return max(begun_s + job.budget_s - closing_s, now_s + MEASURED_RATIO * job.budget_s)


def _cases(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _asked(job: Job, bench: Bench) -> tuple[Case, ...]:
    return tuple(case for case in job.extra_cases if case.operation == bench.operation)


def _require_same(stored: Machine, here: Machine, *, path: Path) -> None:
    differences = list(here.differences(stored))
    if stored.world != here.world:
        differences.append(f"ranks: {here.world} here, {stored.world} there")
    if differences:
        raise MachineMismatchError(
            f"{path} cannot be resumed, {differences[0]}; measure into a new directory"
        )


def _version() -> str:
    try:
        return version("moetune")
    except PackageNotFoundError:
        return "unknown"
