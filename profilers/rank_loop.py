"""The rank loop: measure a profile table by table, case by case, on every rank in step.

Rank 0 decides the next case and its budget, broadcasts the decision, collects the rows and writes
(profilers/coordinator.py); the other ranks measure what it decided.

Time: in a first pass the time left is divided over the remaining tables by weight; cases that the
spec requests get `REQUESTED_S` each first, out of at most `REQUESTED_RATIO` of it. What a table
leaves over goes to the next ones, and in the end to a second pass over all tables
(profilers/second_pass.py): a table is complete long before it is as dense as the time allows. The
budget starts with the job and includes starting the ranks and the last writing; still, at least
`MEASURED_RATIO` of it is for measuring, however long the start took.

A table is written when its first pass is over, and the header right after it. Before that, and for
the table in progress as incomplete, new rows are written every `WRITE_EVERY_S` seconds. A later run
resumes there. Whatever raises in a rank first writes what was measured. Over gloo, a rank that died
closes its connections, on which the others fail at once; one that hangs outlasts their patience
(`PATIENCE_S`, profilers/links/team.py), unless the launcher ends the job before. Over NCCL the
others wait either way, until its watchdog aborts their processes after `PATIENCE_S`: rows since the
last write are lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profilers.benchmark import Benchmark, Setting
from profilers.clock import HostClock
from profilers.coordinator import Coordinator, ProfileOnDisk
from profilers.devices import clock_of, pick_device
from profilers.errors import LostPeersError
from profilers.job import Job
from profilers.links.team import ConnectedTeam, cores_of, share_cores
from profilers.machine import fingerprint
from profilers.pace import choose_pace
from profilers.progress import Progress
from profilers.ranks import RankInfo
from profilers.records import Machine, Measurement, ProfileHeader
from profilers.registry import load_suite
from profilers.schedule import Step
from profilers.team import SingleRank, Team


def run_rank(
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
        rendezvous: the store file of ranks of one host; None means the launcher's port.
        progress: called for every case, on rank 0.
        alive: called on every rank after a case, before it waits for the others.

    Raises:
        MachineMismatchError: the profile to resume was measured elsewhere.
        LostPeersError: the other ranks are gone.
    """
    device = pick_device(job.device, local_rank=info.local_rank)
    team: SingleRank | ConnectedTeam = SingleRank()
    coordinator = Coordinator()
    if info.world > 1:
        team = ConnectedTeam(info, device=device, rendezvous=rendezvous)
    machine = fingerprint(device_kind=device.type, world=team.world, local_world=team.local_world)
    if isinstance(team, ConnectedTeam):
        machine = _with_hosts(machine, team)
    setting = Setting(
        device=str(device),
        dtypes=job.dtypes or (("bf16",) if device.type == "cuda" else ("fp32", "bf16")),
        team=team,
        clock=clock_of(device),
        directory=Path(job.storage_directory or job.out),
        pace=choose_pace(device.type, team=team, takes_turns=machine.takes_turns),
    )
    try:
        return _measure_all(
            job,
            setting=setting,
            machine=machine,
            coordinator=coordinator,
            progress=progress,
            alive=alive,
        )
    except RuntimeError as error:
        if team.world == 1:
            raise
        # A failing case is a row; out here only communication can fail.
        raise LostPeersError(
            f"lost its peers: {_one_line(error)}; what was measured is kept in {job.out}"
        ) from error
    finally:
        team.close()


def _with_hosts(machine: Machine, team: ConnectedTeam) -> Machine:
    """Add where the ranks run, and which cores they share."""
    names = tuple(name for name, _ in team.places)
    facts: dict[str, object] = {"hosts": names, "ranks_per_node": team.local_world}
    if machine.device_kind == "cpu":
        cores = cores_of(team.seats)
        facts |= {"cores": cores, "num_devices": cores, "oversubscribed": share_cores(team.seats)}
    return machine.model_copy(update=facts)


def _measure_all(
    job: Job,
    *,
    setting: Setting,
    machine: Machine,
    coordinator: Coordinator,
    progress: Progress,
    alive: Callable[[], None],
) -> ProfileHeader | None:
    # Ranks may have been started with different options; rank 0's count.
    job = setting.team.decided(job)
    benchmarks = [benchmark for name in job.suites for benchmark in load_suite(name)(setting)]
    setting.team.barrier()
    if setting.team.rank == 0:
        weight = sum(benchmark.weight for benchmark in benchmarks)
        coordinator.profile = ProfileOnDisk.open(job, machine=machine, weight=weight)
    loop = _RankLoop(team=setting.team, coordinator=coordinator, progress=progress, alive=alive)
    try:
        for index, benchmark in enumerate(benchmarks):
            loop.table(benchmark, later=benchmarks[index + 1 :])
        loop.measure_between(benchmarks)
    except BaseException:
        # A lost rank, Ctrl-C, a cancelled job: what was measured so far is kept.
        coordinator.save()
        raise
    return coordinator.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLoop:
    """Loop that every rank runs; the coordinator on rank 0 decides."""

    team: Team
    coordinator: Coordinator
    progress: Progress
    alive: Callable[[], None]

    def table(self, benchmark: Benchmark, *, later: Sequence[Benchmark]) -> None:
        """Measure the first pass of a table."""
        table = self.coordinator.begin(benchmark, later=later)
        while step := self.team.decided(table.next_step() if table else None):
            rows, seconds = self._measure_case(benchmark, step)
            if table:
                self.coordinator.add(table, rows, seconds=seconds)
                self.progress(table.event(step))
        self.coordinator.end()

    def measure_between(self, benchmarks: Sequence[Benchmark]) -> None:
        """Measure sizes between those of the grids, in all tables, until time is up."""
        while chosen := self.team.decided(self.coordinator.next_infill()):
            place, step = chosen
            rows, seconds = self._measure_case(benchmarks[place], step)
            if self.coordinator.profile is not None:
                table = self.coordinator.add_infill(place, rows, seconds=seconds)
                self.progress(table.event(step))

    def _measure_case(self, benchmark: Benchmark, step: Step) -> tuple[list[Measurement], float]:
        """Return the rows of all ranks, and the seconds that the slowest one took."""
        begun_s = HostClock().now_s()
        local_rows = benchmark.measure(step.case, budget_s=step.budget_s)
        self.alive()
        rows = [row for from_rank in self.team.gathered(local_rows) for row in from_rank]
        return rows, HostClock().now_s() - begun_s


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
