"""One rank's part in measuring a profile: table after table, case after case.

Every rank walks through this in step. Rank 0 decides the next case and its budget, broadcasts the
decision, collects the rows and writes (profilers/coordinator.py); the others measure what they are
told.

Time: in a first round, what is left is divided over the tables still to come, by weight; cases that
were asked for get `ASKED_S` each first, out of at most `ASKED_RATIO` of it. What a table leaves
over goes to the next ones, and in the end to a second round over all tables
(profilers/second_pass.py): a table is complete long before it is as full as the time allows. The
budget begins where the job does and holds the start of the ranks and the last writing; yet at least
`MEASURED_RATIO` of it is for measuring, however long the start took.

A table is written when its first round is over, and the header right after it; then, and in the
table in progress, as incomplete, what is new is written every `KEPT_S` seconds. A later run resumes
there. Whatever ends a run first writes what was measured.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profilers.benchmark import Bench, Setting
from profilers.coordinator import Book, Desk
from profilers.cores import Cores
from profilers.devices import clock_of, pick_device, small_products
from profilers.errors import LostPeersError, RankError
from profilers.heartbeat import GONE_S, Heartbeat
from profilers.job import Job
from profilers.links.team import ConnectedTeam, cores_of, share_cores
from profilers.machine import fingerprint
from profilers.progress import Progress
from profilers.ranks import RankInfo
from profilers.records import Machine, ProfileHeader
from profilers.registry import load_suite
from profilers.schedule import Step
from profilers.sentinel import Sentinel
from profilers.team import Alone, Team
from profilers.timing import HostClock
from profilers.visits import Visit

LOOK_S = 2.0
"""For learning how fast the machine is undisturbed..."""
LOOK_RATIO = 0.03
"""...but no more of the budget than this."""
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
    desk = Desk()
    if info.world > 1:
        team = ConnectedTeam(info, device=device, rendezvous=rendezvous)
        if rendezvous is None:
            heart = _beating(team, info, out=job.out, desk=desk)
    machine = fingerprint(device_kind=device.type, world=team.world, local_world=team.local_world)
    if isinstance(team, ConnectedTeam):
        machine = _with_hosts(machine, team)
    setting = Setting(
        device=str(device),
        dtypes=job.dtypes or (("bf16",) if device.type == "cuda" else ("fp32", "bf16")),
        team=team,
        clock=clock_of(device),
        directory=Path(job.storage_directory or job.out),
        takes_turns=machine.takes_turns,
    )
    setting = replace(setting, sentinel=_sentinel(setting))
    still = alive if heart is None else heart.case_done
    try:
        found = _measure_all(
            job, setting=setting, machine=machine, desk=desk, progress=progress, alive=still
        )
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


def _sentinel(setting: Setting) -> Sentinel | None:
    """Somebody to look at the machine, for a rank that is alone on its processor.

    What disturbs several ranks disturbs them in a step as well, and stays in their times.
    """
    if setting.device != "cpu" or setting.team.world > 1:
        return None
    cores = Cores.of_this_thread()
    return Sentinel(work=small_products(), clock=setting.clock, cores=cores)


def _with_hosts(machine: Machine, team: ConnectedTeam) -> Machine:
    """Add where the ranks run, and which cores they share."""
    names = tuple(name for name, _ in team.places)
    found: dict[str, object] = {"hosts": names, "ranks_per_node": team.local_world}
    if machine.device_kind == "cpu":
        cores = cores_of(team.seats)
        found |= {"cores": cores, "num_devices": cores, "oversubscribed": share_cores(team.seats)}
    return machine.model_copy(update=found)


def _beating(team: ConnectedTeam, info: RankInfo, *, out: str, desk: Desk) -> Heartbeat:
    """Let the ranks of a launcher watch each other."""
    names = {rank: f"rank {rank} on {host}" for rank, (host, _) in enumerate(team.places) if rank}

    def lost(who: str) -> None:
        if info.rank == 0:
            desk.keep()
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
    desk: Desk,
    progress: Progress,
    alive: Callable[[], None],
) -> ProfileHeader | None:
    # Ranks may have been started with other options; the first one's hold for all.
    job = setting.team.decided(job)
    benches = [bench for name in job.suites for bench in load_suite(name)(setting)]
    setting.team.barrier()
    if setting.team.rank == 0:
        weight = sum(bench.weight for bench in benches)
        desk.book = Book.opened(job, machine=machine, weight=weight)
    measuring = _Measuring(
        team=setting.team,
        desk=desk,
        progress=progress,
        alive=alive,
        sentinel=setting.sentinel,
    )
    try:
        if setting.sentinel:
            setting.sentinel.look_around(seconds=min(LOOK_S, LOOK_RATIO * job.budget_s))
        for index, bench in enumerate(benches):
            measuring.table(bench, later=benches[index + 1 :])
        measuring.between(benches)
    except BaseException:
        # A rank that left, Ctrl-C, a cancelled job: what was measured by then stays.
        desk.keep()
        raise
    finally:
        if setting.sentinel:
            setting.sentinel.cores.leave()
    return desk.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """What every rank does; rank 0 decides, at its desk, and the others do as they are told."""

    team: Team
    desk: Desk
    progress: Progress
    alive: Callable[[], None]
    sentinel: Sentinel | None
    """Of a rank alone."""

    def table(self, bench: Bench, *, later: Sequence[Bench]) -> None:
        """Measure the first round of a table."""
        table = self.desk.begin(bench, later=later)
        while step := self.team.decided(table.next_step() if table else None):
            visit = self._visit(bench, step)
            if table:
                self.desk.add(table, visit)
                self.progress(table.event(step))
        self.desk.end()

    def between(self, benches: Sequence[Bench]) -> None:
        """Measure sizes between those of the grids, in all tables, until time is up."""
        while chosen := self.team.decided(self.desk.next_fill()):
            place, step = chosen
            begun_s = HostClock().now_s()
            visit = self._visit(benches[place], step)
            if self.desk.book is not None:
                seconds = HostClock().now_s() - begun_s
                table = self.desk.filled(place, visit, seconds=seconds)
                self.progress(table.event(step))

    def _visit(self, bench: Bench, step: Step) -> Visit:
        if self.sentinel:
            self.sentinel.begin(bench.operation)
        mine = bench.measure(step.case, budget_s=step.budget_s)
        self.alive()
        return Visit(
            rows=tuple(row for from_one in self.team.gathered(mine) for row in from_one),
            quickest_s=self.sentinel.visit_quickest_s if self.sentinel else 0.0,
            slowness=self.sentinel.visit_slowness if self.sentinel else 1.0,
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
