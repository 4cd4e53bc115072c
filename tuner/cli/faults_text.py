"""The text of `moetune verify --faults`."""

from collections.abc import Iterator

from tuner.verify.faults.comparison import FaultReport, PolicyResult, RunParts
from tuner.verify.faults.curve import STEPS


def faults_text(report: FaultReport) -> str:
    """Describe what runs through faults took, and what was predicted of it."""
    return "\n".join(_lines(report))


def _lines(report: FaultReport) -> Iterator[str]:
    scenario = report.scenario
    yield (
        f"{scenario.steps} steps of {report.step_s:.3f} s on {scenario.nodes} nodes, a fault every"
        f" {scenario.mean_interval:g} s (seed {scenario.seed}); restarts take"
        f" {report.restart_s:.1f} s"
    )
    if scenario.repair is not None:
        yield f"A lost node is back after {scenario.repair:g} s; spare nodes: {scenario.spares}"
    for result in report.results:
        yield ""
        yield from _policy_lines(result)
    yield ""
    chosen, best = report.chosen, report.best
    yield f"Chosen: {chosen.policy.words} (expected share {chosen.expected_ratio:.1%})"
    if chosen == best:
        yield "It is the measured best."
    else:
        yield (
            f"Measured best: {best.policy.words}; the choice reaches"
            f" {1.0 - report.lost_goodput_ratio:.1%} of its goodput."
        )


def _policy_lines(result: PolicyResult) -> Iterator[str]:
    restores = ", ".join(f"{count} from {level}" for level, count in result.restores.items())
    yield f"{result.policy.words}: {result.faults} faults, restored {restores or 'never'}"
    if result.fewer_steps:
        yield f"  {result.fewer_steps} steps with fewer nodes, {result.returns} returns to all"
    yield f"  measured  {_parts(result.measured)}"
    yield f"  replayed  {_parts(result.replayed)}: {result.replay_error:+.1%}"
    yield (
        f"  effective share {result.effective_ratio:.1%}, expected {result.expected_ratio:.1%};"
        f" wall clock {result.wall_deviations:+.1f} deviations from the expected"
        f" {result.expected_wall_s:.0f} s"
    )
    if result.expected_overhead is not None:
        yield (
            f"  overhead {result.measured.overhead_s:.1f} s, {result.deviations:+.1f} deviations"
            f" from the expected {result.expected_overhead.mean_s:.0f} s"
        )
    curve = result.curve
    if not result.is_on_curve:
        yield "  LOSSES DIFFER from those of the run without faults"
    elif not result.fewer_steps:
        yield "  every loss equals that of the run without faults"
    if curve is not None and result.fewer_steps:
        yield (
            f"  losses equal those of the run without faults for {curve.exact_steps} steps; with"
            f" fewer nodes they differ by {curve.near_error:.1e} in {STEPS} steps (limit"
            f" {curve.tolerance:.0e}), by {curve.later_error:.1e} later, and by"
            f" {curve.repeat_error:.1e} in {curve.repeats} steps that both layouts took"
        )


def _parts(parts: RunParts) -> str:
    rare = {"slowed": parts.slowed_s, "waiting": parts.waiting_s, "slower": parts.slower_s}
    others = "".join(f", {name} {time_s:.1f}" for name, time_s in rare.items() if time_s)
    return (
        f"{parts.wall_s:7.1f} s: lost {parts.lost_s:.1f}, saving {parts.saving_s:.1f},"
        f" recovery {parts.recovery_s:.1f}{others}"
    )
