"""Measured runs through faults against simulated ones.

    replayed     the simulation with the durations of the run itself and the faults of the scenario
                 at the times at which they were done: its lost, saving and recovery seconds
    expected     mean and deviation over many scenarios that differ in their seed and in the speed
                 of the machine, with durations that were measured before

What steps take beyond their median beside slow links counts as slowed, beside background writes as
saving; what the median with fewer nodes is longer than that with all counts as slower.

The policy of the largest expected effective share is the choice; what it lost against the best is
measured.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from profilers.records import Record
from tuner.faults.levels import FailureClass, SavePolicy
from tuner.faults.simulation import Failure, Outage, Run, SimulatedRun, Slowdown, simulate
from tuner.verify.faults.calibration import Durations
from tuner.verify.faults.curve import Curve
from tuner.verify.faults.measured import MeasuredRun, Step, Window
from tuner.verify.faults.scenario import (
    CLASSES,
    Fault,
    FaultKind,
    Scenario,
    StatedPolicy,
    draw_faults,
)

RUNS: Final = 400
"""Simulated for an expectation."""

Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class RunParts(Record):
    """Seconds of a run, measured or simulated."""

    wall_s: Amount
    lost_s: Amount
    slowed_s: Amount = 0.0
    """By slow links."""
    saving_s: Amount
    recovery_s: Amount
    waiting_s: Amount = 0.0
    """For repairs."""
    slower_s: Amount = 0.0
    """By steps with fewer nodes."""

    @property
    def overhead_s(self) -> float:
        """What faults and checkpoints took."""
        busy_s = self.lost_s + self.slowed_s + self.saving_s + self.recovery_s
        return busy_s + self.waiting_s + self.slower_s


class Expectation(Record):
    """Seconds of many simulated runs, which differ in their faults and in the machine's speed."""

    mean_s: Amount
    deviation_s: Amount

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Expectation":
        """Return that of simulated runs, two or more."""
        return cls(mean_s=statistics.fmean(seconds), deviation_s=statistics.stdev(seconds))

    def deviations(self, measured_s: float) -> float:
        """How many deviations a measured time lies from the mean."""
        distance_s = measured_s - self.mean_s
        return distance_s / self.deviation_s if self.deviation_s else math.copysign(0, distance_s)


class PolicyResult(Record):
    """One policy."""

    policy: StatedPolicy
    faults: int
    """That were done to the run."""
    restores: dict[str, int]
    """How often each level was restored."""
    measured: RunParts
    replayed: RunParts
    effective_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    """Measured share of the wall clock that advanced training."""
    expected_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    expected_wall_s: Amount
    deviation_s: Amount
    """Of the wall clock, between scenarios and between speeds of the machine."""
    expected_overhead: Expectation | None = None
    """Of all parts but training together; absent from older reports."""
    is_on_curve: bool
    """Every loss equals that of the run without faults, to the last bit; from the first step with
    fewer nodes on as `curve` says."""
    fewer_steps: Annotated[int, Field(ge=0)] = 0
    """That were taken with fewer nodes."""
    returns: Annotated[int, Field(ge=0)] = 0
    """To all nodes, at a checkpoint."""
    curve: Curve | None = None
    """Absent from older reports."""

    @property
    def replay_error(self) -> float:
        """Replayed over measured overhead, less one; 0 of a run that has none in either."""
        measured_s, replayed_s = self.measured.overhead_s, self.replayed.overhead_s
        if not measured_s:
            return math.inf if replayed_s else 0.0
        return replayed_s / measured_s - 1.0

    @property
    def deviations(self) -> float:
        """How many deviations the measured overhead lies from the expected one.

        Older reports hold no expected overhead: of those, `wall_deviations`.
        """
        if self.expected_overhead is None:
            return self.wall_deviations
        return self.expected_overhead.deviations(self.measured.overhead_s)

    @property
    def wall_deviations(self) -> float:
        """The same of the wall clock, which also follows the speed of the machine."""
        wall = Expectation(mean_s=self.expected_wall_s, deviation_s=self.deviation_s)
        return wall.deviations(self.measured.wall_s)


class FaultReport(Record):
    """Conclusions of a scenario; `faults.json` of the plan's folder."""

    scenario: Scenario
    step_s: Amount
    """Without faults."""
    restart_s: Amount
    results: tuple[PolicyResult, ...]

    @property
    def chosen(self) -> PolicyResult:
        """The policy of the largest expected share."""
        return max(self.results, key=lambda one: one.expected_ratio)

    @property
    def best(self) -> PolicyResult:
        """The policy of the largest measured share."""
        return max(self.results, key=lambda one: one.effective_ratio)

    @property
    def lost_goodput_ratio(self) -> float:
        """What the chosen policy lost against the best, measured."""
        return 1.0 - self.chosen.effective_ratio / self.best.effective_ratio


def policy_result(
    policy: StatedPolicy,
    measured: MeasuredRun,
    *,
    scenario: Scenario,
    before: Durations,
    during: Durations,
    done: Sequence[Fault],
    windows: Sequence[Window],
    ranks_per_node: int,
    curve: Curve,
) -> PolicyResult:
    """Compare a measured run with its prediction.

    Args:
        policy: of the run.
        measured: the run.
        scenario: of which it suffered the faults.
        before: durations, measured before.
        during: durations of the run itself.
        done: faults, with the times at which they were done.
        windows: in which links were slow.
        ranks_per_node: of its nodes.
        curve: its losses against those of a run without faults.
    """
    own = policy.policy()
    replayed = _simulated(own, during, done, scenario)
    slower = np.random.default_rng(scenario.seed).standard_normal(RUNS)
    drawn = [
        _simulated(
            own, before.at_speed(by), draw_faults(other, ranks_per_node=ranks_per_node), other
        )
        for other, by in zip(_other_seeds(scenario), slower.tolist(), strict=True)
    ]
    wall = Expectation.of([one.wall_s for one in drawn])
    step_s = during.seconds.step_s
    slow = [one for one in measured.steps if any(each.is_beside(one) for each in windows)]
    slowed_s = sum(one.seconds for one in slow) - len(slow) * step_s
    slowed_s = max(0.0, slowed_s - _slower_s(slow, during))
    slower_s = _slower_s(measured.steps, during)
    beside_writes_s = 0.0
    if policy.asynchronous:
        longer_s = measured.training_s - scenario.steps * step_s
        beside_writes_s = max(0.0, longer_s - slowed_s - slower_s)
    trained_s = measured.training_s - slowed_s - beside_writes_s - slower_s
    restores = Counter(one.level.value for one in measured.restarts if not one.is_return)
    return PolicyResult(
        policy=policy,
        faults=len(done),
        restores=dict(restores),
        measured=RunParts(
            wall_s=measured.wall_s,
            lost_s=measured.lost_s,
            slowed_s=slowed_s,
            saving_s=measured.saving_s + beside_writes_s,
            recovery_s=measured.recovery_s,
            waiting_s=measured.waiting_s,
            slower_s=slower_s,
        ),
        replayed=_parts(replayed),
        effective_ratio=min(1.0, max(0.0, trained_s) / measured.wall_s),
        expected_ratio=statistics.fmean(
            (one.training_s - max(0.0, one.slower_s)) / one.wall_s for one in drawn
        ),
        expected_wall_s=wall.mean_s,
        deviation_s=wall.deviation_s,
        expected_overhead=Expectation.of([_parts(one).overhead_s for one in drawn]),
        is_on_curve=curve.is_kept,
        fewer_steps=sum(not one.is_full for one in measured.steps),
        returns=sum(one.is_return for one in measured.restarts),
        curve=curve,
    )


def _slower_s(steps: Sequence[Step], durations: Durations) -> float:
    """Return what those of some steps that had fewer nodes took longer than with all."""
    if durations.fewer is None:
        return 0.0
    longer_s = durations.fewer.layout.seconds.step_s - durations.seconds.step_s
    return max(0.0, longer_s) * sum(not one.is_full for one in steps)


def _parts(run: SimulatedRun) -> RunParts:
    return RunParts(
        wall_s=run.wall_s,
        lost_s=run.lost_s,
        slowed_s=run.slowed_s,
        saving_s=run.saving_s,
        recovery_s=run.recovery_s,
        waiting_s=run.waiting_s,
        slower_s=max(0.0, run.slower_s),
    )


def _other_seeds(scenario: Scenario) -> Iterator[Scenario]:
    for seed in range(RUNS):
        yield scenario.model_copy(update={"seed": scenario.seed + 1 + seed})


def _simulated(
    policy: SavePolicy, durations: Durations, faults: Sequence[Fault], scenario: Scenario
) -> SimulatedRun:
    run = Run(
        steps=scenario.steps,
        seconds=durations.seconds,
        repair_s=scenario.repair or 0.0,
        spare_nodes=scenario.spares,
        fewer=durations.fewer,
        start_limit_s=scenario.start_limit,
        ring_nodes=scenario.nodes,
        waits_for_writes=True,
    )
    failures = [
        Failure(
            at_s=one.at_s,
            kind=_class_of(one.kind, policy),
            node=one.node,
            silence_s=scenario.hang if one.kind is FaultKind.FREEZE else 0.0,
        )
        for one in faults
        if one.kind in CLASSES
    ]
    outages = [
        Outage(begin_s=one.at_s, end_s=one.at_s + scenario.disk_full)
        for one in faults
        if one.kind is FaultKind.FILL_DISK
    ]
    slowdowns = [
        Slowdown(
            begin_s=one.at_s,
            end_s=one.at_s + scenario.link_slow,
            factor=durations.slow_factor,
            node=one.node,
        )
        for one in faults
        if one.kind is FaultKind.SLOW_LINK
    ]
    return simulate(policy, run, failures=failures, outages=outages, slowdowns=slowdowns)


def _class_of(kind: FaultKind, policy: SavePolicy) -> FailureClass:
    """Without replicas, a node that is lost takes all copies of its state along."""
    has_no_replica = policy.replicas == 0 and kind is FaultKind.LOSE_TOGETHER
    return FailureClass.NODE if has_no_replica else CLASSES[kind]
