"""What a run through faults took, from the events of its launches.

    wall        from the first step of the first launch to the end of the last step
    training    every step once, as it took when it was taken for the last time; comparison.py
                separates what steps beside a slow link took longer
    saving      stalls of checkpoints that the run did not go back behind
    waiting     from a fault until a lost node was repaired, where the run waited for that
    recovery    from each fault that ended a launch, or from then on, until training went on; and
                from the checkpoint from which a run on fewer nodes went on with all
    lost        the rest: steps and stalls that were repeated or cut off

as in tuner/faults/simulation.py, so that a measured and a simulated run have the same parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Final

from tuner.errors import TunerError
from tuner.faults.levels import FailureClass, Level
from tuner.verify.faults.events import Event, RankEvents
from tuner.verify.faults.scenario import CLASSES, FaultKind
from tuner.verify.faults.supervisor import LaunchLog

LEVELS: Final = {level.value: level for level in Level} | {"none": Level.SHARED}
"""The start of a run counts as on shared storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRestart:
    """One restart that succeeded."""

    level: Level
    kind: FailureClass
    """The worst fault that it followed; of a return to all nodes, the least."""
    is_frozen: bool
    """The fault kept its peers waiting until the supervisor saw it."""
    step: int
    seconds: float
    """From the fault to the first step."""
    unnoticed_s: float
    """Of them, until the launch was ended."""
    waited_s: float = 0.0
    """Of them, for repairs."""
    launches: int
    """That it took: more than one where faults came during it."""
    is_full: bool = True
    """Whether training went on with all nodes."""
    is_return: bool = False
    """No fault made it necessary: all nodes were there again."""

    @property
    def recovery_s(self) -> float:
        """Without waiting."""
        return self.seconds - self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Parts of a run, in seconds."""

    wall_s: float
    training_s: float
    saving_s: float
    recovery_s: float
    waiting_s: float = 0.0
    restarts: tuple[MeasuredRestart, ...]
    steps: tuple["Step", ...]
    """All of them, as they were taken for the last time."""
    repeats: tuple["Repeat", ...] = ()
    """Steps that were taken again from the same state."""

    @property
    def losses(self) -> tuple[float, ...]:
        """Of every step."""
        return tuple(step.loss for step in self.steps)

    @property
    def lost_s(self) -> float:
        """Steps and stalls that were repeated or cut off."""
        others_s = self.training_s + self.saving_s + self.recovery_s + self.waiting_s
        return max(0.0, self.wall_s - others_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a launch, rank 0's."""

    number: int
    seconds: float
    """Wall clock since the step or stall before it."""
    loss: float
    end_s: float
    is_full: bool = True
    """Whether all nodes took it."""

    @property
    def begin_s(self) -> float:
        """Since 1970, as its end."""
        return self.end_s - self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A step of two launches, of which the later one restored a checkpoint of the earlier."""

    since: int
    """Steps since the checkpoint, its own not counted."""
    loss: float
    before: float
    """Of the earlier launch."""
    is_changed: bool
    """They have other layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A time, since 1970, in which a node's link was slow."""

    begin_s: float
    end_s: float

    def is_beside(self, other: "Step | Stall") -> bool:
        """Whether some of a step or a stall is in it."""
        return self.begin_s < other.end_s and self.end_s > other.begin_s

    def has(self, step: Step) -> bool:
        """Whether all of a step is in it."""
        return self.begin_s <= step.begin_s and step.end_s <= self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What a checkpoint stopped training for."""

    level: Level
    step: int
    seconds: float
    end_s: float

    @property
    def begin_s(self) -> float:
        """Since 1970, as its end."""
        return self.end_s - self.seconds


def measured_run(launches: Sequence[LaunchLog]) -> MeasuredRun:
    """Measure a run that reached its last step.

    Raises:
        TunerError: a launch that took steps has no event of its start.
    """
    working = [one for one in launches if one.restored_at_s is not None]
    if not working:
        raise TunerError("no launch of the run took a step")
    last_steps = _last_kept_steps(working)
    training: dict[int, Step] = {}
    saving_s = 0.0
    for launch, last_kept in zip(working, last_steps, strict=True):
        for step in steps_of(launch):
            if last_kept is None or step.number <= last_kept:
                training[step.number] = step
        saving_s += sum(
            stall.seconds
            for stall in stalls_of(launch)
            if last_kept is None or stall.step <= last_kept
        )
    begin_s = working[0].restored_at_s
    assert begin_s is not None
    restarts = tuple(_restarts(launches))
    last = max(training)
    ordered = [training[number] for number in sorted(training)]
    # A checkpoint of the last step is beyond the run.
    after_s = sum(stall.seconds for stall in stalls_of(working[-1]) if stall.step == last)
    return MeasuredRun(
        wall_s=training[last].end_s - begin_s,
        training_s=sum(step.seconds for step in ordered),
        saving_s=saving_s - after_s,
        recovery_s=sum(one.recovery_s for one in restarts),
        waiting_s=sum(one.waited_s for one in restarts),
        restarts=restarts,
        steps=tuple(ordered),
        repeats=tuple(_repeats(working)),
    )


def steps_of(launch: LaunchLog) -> Iterator[Step]:
    """Return the steps of a launch with their wall clock."""
    since_s = launch.restored_at_s
    for event in launch.ranks[0].events:
        if event["event"] == "step_done":
            assert since_s is not None
            yield Step(
                number=int(event["step"]),
                seconds=max(0.0, float(event["time_s"]) - since_s),
                loss=float(event["loss"]),
                end_s=float(event["time_s"]),
                is_full=launch.is_full,
            )
        if event["event"] in ("step_done", "training_resumed"):
            since_s = float(event["time_s"])


def stalls_of(launch: LaunchLog) -> Iterator[Stall]:
    """Return what checkpoints stopped a launch for; saves of both levels stop it once."""
    for event in launch.ranks[0].of("training_resumed"):
        yield Stall(
            level=LEVELS[event["level"]],
            step=int(event["step"]),
            seconds=float(event["stall_s"]),
            end_s=float(event["time_s"]),
        )


def slow_windows(launches: Sequence[LaunchLog]) -> list[Window]:
    """Return when links were slow."""
    return [
        Window(begin_s=one.time_s, end_s=one.time_s + one.lasts_s)
        for launch in launches
        for one in launch.faults
        if one.fault.kind is FaultKind.SLOW_LINK
    ]


def durable_of(launch: LaunchLog) -> dict[tuple[Level, int], float]:
    """Return when each checkpoint of a launch was durable, since 1970."""
    events = launch.ranks[0].of("durable")
    return {(LEVELS[one["level"]], int(one["step"])): float(one["time_s"]) for one in events}


def _repeats(working: Sequence[LaunchLog]) -> Iterator[Repeat]:
    for earlier, later in pairwise(working):
        restored = _restored_step(later)
        if _restored_step(earlier) > restored:
            continue
        before = {step.number: step.loss for step in steps_of(earlier)}
        for step in steps_of(later):
            if step.number in before:
                yield Repeat(
                    since=step.number - restored - 1,
                    loss=step.loss,
                    before=before[step.number],
                    is_changed=earlier.is_full is not later.is_full,
                )


def _restored(rank: RankEvents) -> Event:
    return rank.of("restored")[0]


def _restored_step(launch: LaunchLog) -> int:
    return int(_restored(launch.ranks[0])["step"])


def _last_kept_steps(working: Sequence[LaunchLog]) -> list[int | None]:
    """Return the last step of each launch that no later restart went back behind; None: all."""
    kept: list[int | None] = [None]
    for later in reversed(working[1:]):
        restored = _restored_step(later)
        kept.append(restored if kept[-1] is None else min(restored, kept[-1]))
    return kept[::-1]


def _restarts(launches: Sequence[LaunchLog]) -> Iterator[MeasuredRestart]:
    failed: list[LaunchLog] = []
    # Launches before the first one that trains are before the run.
    for launch in dropwhile(lambda one: one.restored_at_s is None, launches):
        if failed and launch.restored_at_s is not None:
            first = failed[0]
            assert first.failed_at_s is not None
            assert first.noticed_at_s is not None
            kinds = [_ending_kind(one) for one in failed if not one.is_return]
            event = _restored(launch.ranks[0])
            yield MeasuredRestart(
                level=LEVELS[event["level"]],
                kind=max(
                    (CLASSES[kind] for kind in kinds),
                    key=list(FailureClass).index,
                    default=FailureClass.PROCESS,
                ),
                is_frozen=kinds[:1] == [FaultKind.FREEZE],
                step=int(event["step"]),
                seconds=launch.restored_at_s - first.failed_at_s,
                # A wait for nodes begins with the failure, and is counted by itself.
                unnoticed_s=0.0 if first.waited_s else first.noticed_at_s - first.failed_at_s,
                waited_s=sum(one.waited_s for one in failed),
                launches=len(failed),
                is_full=launch.is_full,
                is_return=not kinds,
            )
            failed = []
        if launch.failed_at_s is not None:
            failed.append(launch)


def _ending_kind(launch: LaunchLog) -> FaultKind:
    """Return the fault that ended a launch; one that ended by itself counts as killed."""
    kinds = [one.fault.kind for one in launch.faults if one.fault.kind in CLASSES]
    return kinds[0] if kinds else FaultKind.KILL
