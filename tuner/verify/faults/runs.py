"""The runs of a scenario: one without faults, and two of each policy, the first one short."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from profilers.steps.config import StepConfig
from tuner.errors import SpecError
from tuner.verify.faults.calibration import (
    PolicySeconds,
    durations,
    expected_durations,
    measure_policy,
    replay_durations,
    short,
    short_faults,
    short_steps,
)
from tuner.verify.faults.comparison import FaultReport, PolicyResult, policy_result
from tuner.verify.faults.measured import slow_windows
from tuner.verify.faults.nodes import emulated_nodes
from tuner.verify.faults.scenario import (
    Fault,
    FaultKind,
    Scenario,
    StatedPolicy,
    draw_faults,
)
from tuner.verify.faults.supervisor import (
    FaultRunError,
    LaunchLog,
    checkpointed,
    run_through_faults,
)
from tuner.verify.termination import ensure_ended

LEAST_DEADLINE_S: Final = 600.0
PATIENCE: Final = 20.0
"""Times the seconds of the scenario's faults."""
RESTART_S: Final = 60.0
"""More than any restart takes."""


def run_scenario(
    config: StepConfig,
    scenario: Scenario,
    *,
    groups: Sequence[Path] = (),
    on_message: Callable[[str], None] = lambda _line: None,
) -> FaultReport:
    """Run a configuration of the reference step through the faults of a scenario.

    Args:
        config: its steps and checkpoints are the scenario's.
        scenario: of faults and policies.
        groups: a control group for each node, whose limits hold for its ranks; none: no limits.
        on_message: gets a line for every run.

    Raises:
        SpecError: the ranks cannot be spread over the nodes.
        FaultRunError: a run does not reach its end.
    """
    world = config.parallelism.world
    if world % scenario.nodes:
        raise SpecError(f"nodes: {scenario.nodes} do not divide the {world} ranks of the plan")
    if scenario.link is not None and config.device != "cpu":
        raise SpecError("link: emulated links carry ranks on processors only; leave it out")
    with (
        tempfile.TemporaryDirectory(prefix="moetune-faults-") as scratch,
        ensure_ended(scratch),
    ):
        runs = _Runs(
            config=config,
            scenario=scenario,
            folder=Path(scratch),
            groups=groups,
            say=on_message,
        )
        return runs.report()


class _Runs:
    """The runs of a scenario, one after the other."""

    def __init__(
        self,
        *,
        config: StepConfig,
        scenario: Scenario,
        folder: Path,
        groups: Sequence[Path],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._scenario = config, scenario
        self._folder, self._groups, self._say = folder, groups, say
        self._ranks_per_node = config.parallelism.world // scenario.nodes
        self._number = 0

    def report(self) -> FaultReport:
        """Measure durations, then every policy, and compare."""
        scenario = self._scenario
        unbroken = measure_policy(self._run(scenario.policies[0], (), steps=scenario.steps))
        step_s = unbroken.run.training_s / scenario.steps
        self._say(f"without faults: {scenario.steps} steps of {step_s:.3f} s")
        faults = draw_faults(scenario, ranks_per_node=self._ranks_per_node)
        if faults[0].at_s > unbroken.run.training_s:
            raise FaultRunError(
                f"the first fault comes after {faults[0].at_s:.0f} s, and {scenario.steps} steps"
                f" take {unbroken.run.training_s:.0f} s: state more steps or a shorter"
                " mean_interval"
            )
        calibrated = [self._calibrated(one, step_s=step_s) for one in scenario.policies]
        if FaultKind.SLOW_LINK in scenario.faults and not any(
            one.slow_steps_s for one in calibrated
        ):
            raise FaultRunError(
                "no step lies wholly beside a slow link, so that its length is not known: state a"
                " longer link_slow"
            )
        results = tuple(
            self._result(policy, own, calibrated, faults=faults, unbroken=unbroken)
            for policy, own in zip(scenario.policies, calibrated, strict=True)
        )
        seconds = durations(*calibrated).seconds
        return FaultReport(
            scenario=scenario,
            step_s=step_s,
            restart_s=max(seconds.restart_s.values()),
            results=results,
        )

    def _calibrated(self, policy: StatedPolicy, *, step_s: float) -> PolicySeconds:
        faults = short_faults(self._scenario, mean_step_s=step_s)
        steps = short_steps(self._scenario, mean_step_s=step_s)
        own = measure_policy(self._run(short(policy), faults, steps=steps))
        slow = f", beside a slow link {max(own.slow_steps_s):.3f} s" if own.slow_steps_s else ""
        self._say(
            f"durations of {policy.words}: step {own.step_s:.3f} s{slow},"
            f" restart {own.run.recovery_s:.2f} s"
        )
        return own

    def _result(
        self,
        policy: StatedPolicy,
        own: PolicySeconds,
        calibrated: Sequence[PolicySeconds],
        *,
        faults: Sequence[Fault],
        unbroken: PolicySeconds,
    ) -> PolicyResult:
        launches = self._run(policy, faults, steps=self._scenario.steps)
        during = measure_policy(launches)
        others = [one for one in calibrated if one is not own]
        before = expected_durations(own, others, unbroken=unbroken)
        result = policy_result(
            policy,
            during.run,
            scenario=self._scenario,
            before=before,
            during=replay_durations(during, own, *others),
            done=_done(launches),
            windows=slow_windows(launches),
            ranks_per_node=self._ranks_per_node,
            losses=unbroken.run.losses,
        )
        self._say(f"{policy.words}: {result.effective_ratio:.1%} of {result.measured.wall_s:.1f} s")
        return result

    def _run(self, policy: StatedPolicy, faults: Sequence[Fault], *, steps: int) -> list[LaunchLog]:
        scenario, own = self._scenario, self._folder / f"run-{self._number}"
        self._number += 1
        restarts_s = (len(faults) + 1) * (RESTART_S + scenario.mean_interval)
        with emulated_nodes(
            scenario.nodes,
            ranks=self._config.parallelism.world,
            link_bytes_per_s=scenario.link,
            groups=self._groups,
        ) as nodes:
            launches = run_through_faults(
                checkpointed(self._config, policy, steps=steps, nodes=nodes, folder=own),
                faults,
                folder=own,
                nodes=nodes,
                scenario=scenario,
                deadline_s=max(LEAST_DEADLINE_S, PATIENCE * restarts_s),
            )
        shutil.rmtree(own / "shared", ignore_errors=True)
        return launches


def _done(launches: Sequence[LaunchLog]) -> tuple[Fault, ...]:
    """Return the faults that were done, with the seconds since the first step when they were."""
    # The first launch may have ended before its first step.
    begin_s = next(one.restored_at_s for one in launches if one.restored_at_s is not None)
    return tuple(
        replace(one.fault, at_s=one.time_s - begin_s)
        for launch in launches
        for one in launch.faults
    )
