"""The runs of a scenario: one without faults, and two of each policy, the first one short."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from profilers.steps.config import StepConfig
from tuner.errors import SpecError
from tuner.faults.levels import FailureClass, Level
from tuner.verify.faults.calibration import (
    FewerSeconds,
    PolicySeconds,
    durations,
    expected_durations,
    measure_fewer,
    measure_policy,
    replay_durations,
    short,
    short_faults,
    short_repair,
    short_steps,
    with_expected_fewer,
    with_replayed_fewer,
)
from tuner.verify.faults.comparison import FaultReport, PolicyResult, policy_result
from tuner.verify.faults.curve import measure_curve
from tuner.verify.faults.fewer_nodes import fewer_nodes_policy, with_fewer_nodes
from tuner.verify.faults.measured import slow_windows
from tuner.verify.faults.nodes import emulated_nodes
from tuner.verify.faults.scenario import (
    Fault,
    FaultKind,
    Scenario,
    StatedPolicy,
    WithoutSpareAction,
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
    fewer: StepConfig | None = None,
    groups: Sequence[Path] = (),
    on_message: Callable[[str], None] = lambda _line: None,
) -> FaultReport:
    """Run a configuration of the reference step through the faults of a scenario.

    Args:
        config: its steps and checkpoints are the scenario's.
        scenario: of faults and policies.
        fewer: the layout without a spare node, on whole nodes and one less at most; None: that of
            as many replicas as there are nodes for (tuner/verify/faults/fewer_nodes.py).
        groups: a control group for each node, whose limits hold for its ranks; none: no limits.
        on_message: gets a line for every run.

    Raises:
        SpecError: the ranks cannot be spread over the nodes, or the run cannot continue with fewer.
        FaultRunError: a run does not reach its end.
    """
    world = config.parallelism.world
    if world % scenario.nodes:
        raise SpecError(f"nodes: {scenario.nodes} do not divide the {world} ranks of the plan")
    if scenario.link is not None and config.device != "cpu":
        raise SpecError("link: emulated links carry ranks on processors only; leave it out")
    if any(map(_continues, scenario.runs())):
        ranks_per_node = world // scenario.nodes
        fewer = fewer or with_fewer_nodes(config, ranks_per_node=ranks_per_node)
        ranks = fewer.parallelism.world
        if ranks % ranks_per_node or ranks > world - ranks_per_node:
            raise SpecError(
                f"fewer-nodes/: {ranks} ranks do not fill {scenario.nodes - 1} or fewer nodes of"
                f" {ranks_per_node}; plan again, or use without_spare: wait"
            )
    with (
        tempfile.TemporaryDirectory(prefix="moetune-faults-") as scratch,
        ensure_ended(scratch),
    ):
        runs = _Runs(
            config=config,
            fewer=fewer,
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
        fewer: StepConfig | None,
        scenario: Scenario,
        folder: Path,
        groups: Sequence[Path],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._fewer, self._scenario = config, fewer, scenario
        self._policies = scenario.runs()
        self._folder, self._groups, self._say = folder, groups, say
        self._ranks_per_node = config.parallelism.world // scenario.nodes
        self._number = 0

    def report(self) -> FaultReport:
        """Measure durations, then every policy, and compare."""
        scenario = self._scenario
        unbroken = measure_policy(self._run(_saving(self._policies[0]), (), steps=scenario.steps))
        step_s = unbroken.run.training_s / scenario.steps
        self._say(f"without faults: {scenario.steps} steps of {step_s:.3f} s")
        faults = draw_faults(scenario, ranks_per_node=self._ranks_per_node)
        if faults[0].at_s > unbroken.run.training_s:
            raise FaultRunError(
                f"the first fault comes after {faults[0].at_s:.0f} s, and {scenario.steps} steps"
                f" take {unbroken.run.training_s:.0f} s: state more steps or a shorter"
                " mean_interval"
            )
        calibrated = self._calibrated(step_s=step_s)
        short_runs = [one.own for one in calibrated.values()]
        if FaultKind.SLOW_LINK in scenario.faults and not any(
            one.slow_steps_s for one in short_runs
        ):
            raise FaultRunError(
                "no step lies wholly beside a slow link, so that its length is not known: state a"
                " longer link_slow"
            )
        results = tuple(
            self._result(policy, calibrated, faults=faults, unbroken=unbroken)
            for policy in self._policies
        )
        seconds = durations(*short_runs).seconds
        return FaultReport(
            scenario=scenario,
            step_s=step_s,
            restart_s=max(seconds.restart_s.values()),
            results=results,
        )

    def _calibrated(self, *, step_s: float) -> dict[StatedPolicy, "_Calibrated"]:
        """Measure the durations of each policy once, whatever it does without a spare node."""
        continued = {_saving(one) for one in self._policies if _continues(one)}
        calibrated = {}
        for policy in dict.fromkeys(map(_saving, self._policies)):
            own, fewer = self._calibrated_policy(policy, step_s=step_s), None
            if policy in continued:
                fewer = self._calibrated_fewer(policy, own, step_s=step_s)
            calibrated[policy] = _Calibrated(own=own, fewer=fewer)
        return calibrated

    def _calibrated_policy(self, policy: StatedPolicy, *, step_s: float) -> PolicySeconds:
        faults = short_faults(self._scenario, mean_step_s=step_s)
        steps = short_steps(self._scenario, mean_step_s=step_s)
        own = measure_policy(self._run(short(policy), faults, steps=steps))
        slow = f", beside a slow link {max(own.slow_steps_s):.3f} s" if own.slow_steps_s else ""
        self._say(
            f"durations of {policy.words}: step {own.step_s:.3f} s{slow},"
            f" restart {own.run.recovery_s:.2f} s"
        )
        return own

    def _calibrated_fewer(
        self, policy: StatedPolicy, own: PolicySeconds, *, step_s: float
    ) -> FewerSeconds:
        restart_s = durations(own).seconds.restart_s[Level.SHARED, FailureClass.NODE]
        scenario, faults, steps = short_repair(
            self._scenario, mean_step_s=step_s, restart_s=restart_s
        )
        continued = short(policy).model_copy(update={"without_spare": WithoutSpareAction.CONTINUE})
        fewer = measure_fewer(self._run(continued, faults, steps=steps, scenario=scenario))
        if fewer is None:
            raise FaultRunError("no two steps were taken with fewer nodes before the repair")
        self._say(
            f"  with fewer nodes: step {fewer.step_ratio:.2f} times as long, restart"
            f" {fewer.own.restarts[0].recovery_s:.2f} s"
        )
        return fewer

    def _result(
        self,
        policy: StatedPolicy,
        calibrated: Mapping[StatedPolicy, "_Calibrated"],
        *,
        faults: Sequence[Fault],
        unbroken: PolicySeconds,
    ) -> PolicyResult:
        launches = self._run(policy, faults, steps=self._scenario.steps)
        during_run = measure_policy(launches)
        saving = _saving(policy)
        own = calibrated[saving].own
        others = [one.own for key, one in calibrated.items() if key != saving]
        before = expected_durations(own, others, unbroken=unbroken)
        during = replay_durations(during_run, own, *others)
        if _continues(policy):
            fewer = {key: one.fewer for key, one in calibrated.items() if one.fewer}
            short_run = fewer.pop(saving)
            rest = fewer.values()
            own_policy, idle = self._fewer_policy(policy), self._idle_nodes
            before = with_expected_fewer(before, own_policy, short_run, *rest, idle_nodes=idle)
            during = with_replayed_fewer(
                during, own_policy, measure_fewer(launches), short_run, *rest, idle_nodes=idle
            )
        result = policy_result(
            policy,
            during_run.run,
            scenario=self._scenario,
            before=before,
            during=during,
            done=_done(launches),
            windows=slow_windows(launches),
            ranks_per_node=self._ranks_per_node,
            curve=measure_curve(
                during_run.run, unbroken.run.losses, precision=self._config.precision
            ),
        )
        self._say(f"{policy.words}: {result.effective_ratio:.1%} of {result.measured.wall_s:.1f} s")
        return result

    @property
    def _fewer_nodes(self) -> int:
        assert self._fewer is not None
        return self._fewer.parallelism.world // self._ranks_per_node

    @property
    def _idle_nodes(self) -> int:
        return self._scenario.nodes - 1 - self._fewer_nodes

    def _fewer_policy(self, policy: StatedPolicy) -> StatedPolicy:
        return fewer_nodes_policy(policy, nodes=self._fewer_nodes)

    def _run(
        self,
        policy: StatedPolicy,
        faults: Sequence[Fault],
        *,
        steps: int,
        scenario: Scenario | None = None,
    ) -> list[LaunchLog]:
        scenario, own = scenario or self._scenario, self._folder / f"run-{self._number}"
        self._number += 1
        each_s = RESTART_S + scenario.mean_interval + (scenario.repair or 0.0)
        with emulated_nodes(
            scenario.nodes,
            ranks=self._config.parallelism.world,
            link_bytes_per_s=scenario.link,
            groups=self._groups,
        ) as nodes:
            fewer = None
            if _continues(policy):
                assert self._fewer is not None
                fewer = checkpointed(
                    self._fewer, self._fewer_policy(policy), steps=steps, nodes=nodes, folder=own
                )
            launches = run_through_faults(
                checkpointed(self._config, policy, steps=steps, nodes=nodes, folder=own),
                faults,
                folder=own,
                nodes=nodes,
                scenario=scenario,
                deadline_s=max(LEAST_DEADLINE_S, PATIENCE * (len(faults) + 1) * each_s),
                fewer=fewer,
            )
        shutil.rmtree(own / "shared", ignore_errors=True)
        return launches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calibrated:
    """Durations of one policy."""

    own: PolicySeconds
    fewer: FewerSeconds | None
    """None: it never goes on with fewer nodes."""


def _saving(policy: StatedPolicy) -> StatedPolicy:
    """Return what a policy says of saving."""
    return policy.model_copy(update={"without_spare": None})


def has_fewer_nodes(scenario: Scenario) -> bool:
    """Whether some run goes on with fewer nodes."""
    return any(_continues(policy) for policy in scenario.runs())


def _continues(policy: StatedPolicy) -> bool:
    return policy.without_spare is WithoutSpareAction.CONTINUE


def _done(launches: Sequence[LaunchLog]) -> tuple[Fault, ...]:
    """Return the faults that were done, with the seconds since the first step when they were."""
    # The first launch may have ended before its first step.
    begin_s = next(one.restored_at_s for one in launches if one.restored_at_s is not None)
    return tuple(
        replace(one.fault, at_s=one.time_s - begin_s)
        for launch in launches
        for one in launch.faults
    )
