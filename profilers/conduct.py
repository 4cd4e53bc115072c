"""One rank's part in measuring a profile: table after table, case after case.

Every rank walks through this in step. Rank 0 decides the next case and its budget, broadcasts the
decision, collects the rows and writes; the others measure what they are told. A table is written
when it is complete and the header right after it; a crash loses seconds of the one in progress.

Time: what is left is divided over the tables still to come, by weight; cases that were asked for
get `ASKED_S` each first, out of at most `ASKED_RATIO` of it. What a table leaves over goes to the
next ones. The table in progress is written as well, as incomplete, every `KEPT_S` seconds; a later
run resumes there.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from profilers.bench import Bench, Setting
from profilers.devices import clock_of, pick_device
from profilers.errors import LostPeersError, MachineMismatchError, RankError
from profilers.heartbeat import GONE_S, Heartbeat
from profilers.job import Job
from profilers.links.team import ConnectedTeam
from profilers.machine import fingerprint
from profilers.progress import Progress, ProgressEvent
from profilers.ranks import RankInfo
from profilers.records import Case, Machine, Measurement, ProfileHeader, Status, TableInfo
from profilers.registry import load_suite
from profilers.schedule import Plan, Step, key
from profilers.store import clear_unlisted, holds_profile, read_profile, write_header, write_table
from profilers.team import Alone, Team
from profilers.timing import HostClock

ASKED_S = 0.6
ASKED_RATIO = 0.6
KEPT_S = 10.0
BLAME_S = GONE_S + 5.0
"""How long a rank that lost its peers waits to learn who left."""


def conduct(
    job: Job,
    *,
    info: RankInfo,
    rendezvous: Path | None,
    progress: Progress,
    alive: Callable[[], None],
) -> ProfileHeader | None:
    """Measure, as one rank; the header on rank 0, None on the others.

    Args:
        job: what to measure.
        info: which rank this is.
        rendezvous: a file through which ranks of one host meet; None means the launcher's port.
        progress: told about every case, on rank 0.
        alive: called on every rank when it is done with a case, before it waits for the others.

    Raises:
        MachineMismatchError: the profile to resume was measured elsewhere.
        LostPeersError: the other ranks are gone.
    """
    device = pick_device(job.device, local_rank=info.local_rank)
    team: Alone | ConnectedTeam = Alone()
    heart: Heartbeat | None = None
    if info.world > 1:
        team = ConnectedTeam(info, device=device, rendezvous=rendezvous)
        if rendezvous is None:
            heart = _beating(team, info, out=job.out)
    usual = ("bf16",) if device.type == "cuda" else ("fp32", "bf16")
    setting = Setting(
        device=str(device),
        dtypes=job.dtypes or usual,
        team=team,
        clock=clock_of(device),
        directory=Path(job.storage_directory or job.out),
    )
    machine = fingerprint(device_kind=device.type, world=team.world, local_world=team.local_world)
    if isinstance(team, ConnectedTeam):
        hosts = tuple(host for host, _ in team.places)
        machine = machine.model_copy(update={"hosts": hosts, "ranks_per_node": team.local_world})
    still = alive if heart is None else heart.case_done
    try:
        found = _measure_all(job, setting=setting, machine=machine, progress=progress, alive=still)
    except RuntimeError as error:
        if team.world == 1:
            raise
        # What fails inside a case is a row; out here only talking to the others can fail.
        who = heart.blamed(patience_s=BLAME_S) if heart is not None else ""
        if who:
            raise RankError(f"{who}; what was measured is kept in {job.out}") from error
        raise LostPeersError(f"lost its peers: {_one_line(error)}") from error
    else:
        if heart is not None:
            # Nobody stops to beat before the last is done.
            team.barrier()
        return found
    finally:
        if heart is not None:
            heart.stop()
        team.close()


def _beating(team: ConnectedTeam, info: RankInfo, *, out: str) -> Heartbeat:
    """Let the ranks of a launcher watch each other."""
    names = {rank: f"rank {rank} on {host}" for rank, (host, _) in enumerate(team.places) if rank}

    def lost(who: str) -> None:
        if info.rank == 0:
            sys.stderr.write(f"moetune: {who}; what was measured is kept in {out}\n")
            sys.stderr.flush()
        # The main thread waits in a collective that nobody will complete.
        os._exit(RankError.exit_code)

    heart = Heartbeat(
        team.own_store(info),
        rank=info.rank,
        names=names if info.rank == 0 else {0: f"rank 0 on {team.places[0][0]}"},
        lost=lost,
    )
    heart.start()
    return heart


def _measure_all(
    job: Job,
    *,
    setting: Setting,
    machine: Machine,
    progress: Progress,
    alive: Callable[[], None],
) -> ProfileHeader | None:
    benches = [bench for name in job.suites for bench in load_suite(name)(setting)]
    setting.team.barrier()
    book = _Book.opened(job, machine=machine) if setting.team.rank == 0 else None
    for index, bench in enumerate(benches):
        table = book.table(bench, later=benches[index + 1 :]) if book else None
        _measure_table(bench, table=table, team=setting.team, progress=progress, alive=alive)
        if book and table:
            book = book.with_table(table)
    return book.header if book else None


def _measure_table(
    bench: Bench,
    *,
    table: "_Table | None",
    team: Team,
    progress: Progress,
    alive: Callable[[], None],
) -> None:
    """Measure what rank 0 decides until it decides to end; `table` is None on the others."""
    while True:
        step = team.decided(table.next_step() if table else None)
        if step is None:
            return
        mine = bench.measure(step.case, budget_s=step.budget_s)
        alive()
        rows = team.gathered(mine)
        if table:
            table.plan.rows += [row for from_one in rows for row in from_one]
            table.keep()
            progress(table.event(step))


@dataclass(slots=True, kw_only=True)
class _Table:
    """The table in progress; only rank 0 has one."""

    bench: Bench
    plan: Plan
    started_s: float
    end_s: float
    deadline_s: float
    earlier_s: float
    """Seconds that earlier runs spent on it."""
    book: "_Book"

    kept_s: float = 0.0
    """When its rows were last written."""

    def keep(self) -> None:
        """Write the rows so far, now and then."""
        now_s = HostClock().now_s()
        if now_s - max(self.kept_s, self.started_s) >= KEPT_S:
            self.book.keep(self)
            self.kept_s = now_s

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

    def info(self, *, complete: bool = True) -> TableInfo:
        plan = self.plan
        errors = {key(row.case): row.error for row in plan.rows if row.status is not Status.OK}
        notes = [
            self.bench.note(),
            f"{plan.skipped} cases skipped: the time budget was spent" if plan.skipped else "",
            f"{len(errors)} cases failed, e.g. {min(errors.values())}" if errors else "",
        ]
        return TableInfo(
            rows=len(plan.rows),
            complete=complete,
            seconds=self.earlier_s + HostClock().now_s() - self.started_s,
            note="; ".join(note for note in notes if note),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Book:
    """The profile as it lies on disk; only rank 0 has one."""

    job: Job
    header: ProfileHeader
    known: Mapping[str, tuple[Measurement, ...]]
    """Rows that an earlier run measured."""
    deadline_s: float

    @classmethod
    def opened(cls, job: Job, *, machine: Machine) -> "_Book":
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
        deadline_s = HostClock().now_s() + job.budget_s
        return cls(job=job, header=header, known=known, deadline_s=deadline_s)

    def table(self, bench: Bench, *, later: Sequence[Bench]) -> _Table:
        """Begin a table, or go on with one; of a complete one only asked cases are measured."""
        before = self.header.tables.get(bench.operation)
        is_done = before is not None and before.complete
        plan = Plan(
            asked=_asked(self.job, bench),
            grid=() if is_done else bench.cases(),
            refined_axes=() if is_done else bench.refined_axes,
            rows=list(self.known.get(bench.operation, ())),
        )
        if before is None:
            self._write(bench.operation, TableInfo(rows=0, complete=False, seconds=0.0))
        now_s = HostClock().now_s()
        left_s = max(0.0, self.deadline_s - now_s)
        share_s = _share_s(self.job, bench, later=later, left_s=left_s)
        return _Table(
            bench=bench,
            plan=plan,
            started_s=now_s,
            end_s=now_s + share_s,
            deadline_s=self.deadline_s,
            earlier_s=before.seconds if before else 0.0,
            book=self,
        )

    def keep(self, table: _Table) -> None:
        """Write a table in progress."""
        write_table(Path(self.job.out), table.plan.rows, operation=table.bench.operation)
        self._write(table.bench.operation, table.info(complete=False))

    def with_table(self, table: _Table) -> "_Book":
        """Write a table that is done, then the header that counts it."""
        operation = table.bench.operation
        known, before = self.known.get(operation), self.header.tables.get(operation)
        if before and before.complete and known and len(known) == len(table.plan.rows):
            return self
        write_table(Path(self.job.out), table.plan.rows, operation=operation)
        header = self._write(operation, table.info())
        return replace(self, header=header)

    def _write(self, operation: str, info: TableInfo) -> ProfileHeader:
        tables = self.header.tables | {operation: info}
        header = self.header.model_copy(update={"tables": tables})
        write_header(Path(self.job.out), header)
        return header


def _share_s(job: Job, bench: Bench, *, later: Sequence[Bench], left_s: float) -> float:
    """Seconds for one table out of what is left for it and the later ones."""
    asked = len(_asked(job, bench))
    all_asked = asked + sum(len(_asked(job, other)) for other in later)
    reserved_s = min(ASKED_S * all_asked, ASKED_RATIO * left_s)
    weights = bench.weight + sum(other.weight for other in later)
    share_s = (left_s - reserved_s) * bench.weight / weights
    return share_s + (reserved_s * asked / all_asked if all_asked else 0.0)


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
