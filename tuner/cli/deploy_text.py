"""The result of verifying a deployment as text."""

from collections.abc import Iterator
from pathlib import Path

from tuner.cli.serve_text import group_text
from tuner.cli.text import columns, labelled
from tuner.engines.metrics.benchmark_run import Spread
from tuner.plans.folder import TRIALS_NAME
from tuner.units import format_ratio, format_s
from tuner.verify.deployments.records import ServeTrial, ServeVerified
from tuner.verify.kept_logs import kept_logs_line

_HEADER = (
    "deployment",
    "from",
    "status",
    "TTFT",
    "predicted",
    "error",
    "TPOT",
    "predicted",
    "error",
    "requests/s",
    "SLO",
)


def serving_verified_text(verified: ServeVerified, *, folder: Path) -> str:
    """Say which deployment won, how accurate the model was, and where the launch files are."""
    lines = [
        columns([_row(trial) for trial in verified.trials], header=_HEADER),
        *_reasons(verified),
        "",
        *_verdict(verified),
        *(f"note           {note}" for note in verified.notes),
    ]
    if verified.winner is not None:
        lines.append("")
        for group in verified.winner.instances:
            lines += labelled(group.role.value, group_text(group))
        lines.append(f"launch files: {folder / 'launch'}")
    lines += kept_logs_line(folder / TRIALS_NAME)
    return "\n".join(lines)


def _row(trial: ServeTrial) -> tuple[str, ...]:
    rate = trial.measured_requests_per_s
    slo = {None: "-", True: "met", False: "missed"}[trial.holds_targets]
    return (
        short_deployment(trial),
        trial.origin,
        trial.status,
        _seconds(trial.measured_ttft_s),
        _seconds(trial.predicted_ttft_s),
        _error(trial.predicted_ttft_s, trial.measured_ttft_s),
        _seconds(trial.measured_tpot_s),
        _seconds(trial.predicted_tpot_s),
        _error(trial.predicted_tpot_s, trial.measured_tpot_s),
        "-" if rate is None else f"{rate:.4g}",
        slo,
    )


def short_deployment(trial: ServeTrial) -> str:
    """Name a deployment in a few letters: `2 x 8 prefill + 1 x 16 decode`."""
    groups = trial.decision.instances
    text = " + ".join(f"{one.count} x {one.devices} {one.role.value}" for one in groups)
    # The roles identify these two modes only.
    is_named_by_roles = trial.decision.mode in ("aggregated", "disaggregated")
    return text if is_named_by_roles else f"{text} ({trial.decision.mode})"


def _reasons(verified: ServeVerified) -> Iterator[str]:
    for trial in verified.trials:
        message = trial.reason or "; ".join(trial.misses)
        if message:
            yield f"  {short_deployment(trial)}: {message}"


def _verdict(verified: ServeVerified) -> Iterator[str]:
    won = next((one for one in verified.trials if one.decision == verified.winner), None)
    if won is None:
        ran = any(one.runs for one in verified.trials)
        yield (
            "no launched deployment meets the SLO"
            if ran
            else "no deployment could be measured: nothing is verified"
        )
    else:
        yield f"winner         {short_deployment(won)}, by {verified.objective}"
        for name, spread in (("TTFT", won.measured_ttft), ("TPOT", won.measured_tpot)):
            if spread is not None:
                yield f"  {name:<13}{_spread(spread)}, median of {_runs(won.runs)}"
        if verified.regret_ratio is None:
            yield "first choice   did not run, or misses the SLO"
        elif verified.trials[0].decision == verified.winner:
            yield "first choice   it is the winner"
        else:
            yield f"first choice   {format_ratio(verified.regret_ratio)} behind the winner"
        if verified.tie:
            yield "tie            another deployment is as good, within the noise of the runs"
    if verified.factors is not None:
        yield (
            f"calibration    TTFT x {verified.factors.ttft:.3g}, TPOT x {verified.factors.tpot:.3g}"
            f" of the prediction, median of {verified.factors.num_deployments}"
        )
        accuracy = verified.accuracy
        yield (
            f"within band    TTFT of {accuracy.ttft_within_band}, TPOT of"
            f" {accuracy.tpot_within_band} of {accuracy.num_deployments}"
        )


def _spread(spread: Spread) -> str:
    times_s = {"mean": spread.mean, "P50": spread.p50, "P90": spread.p90, "P99": spread.p99}
    return ", ".join(
        f"{name} {format_s(time_s)}" for name, time_s in times_s.items() if time_s is not None
    )


def _runs(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else format_s(time_s)


def _error(predicted_s: float, measured_s: float | None) -> str:
    return "-" if not measured_s else f"{100.0 * (predicted_s / measured_s - 1.0):+.1f} %"
