"""The result of a verification as text."""

from collections.abc import Iterable
from pathlib import Path

from tuner.cli.plan_text import decision_lines
from tuner.cli.text import columns
from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.plans.folder import TRIALS_NAME
from tuner.report.printable import printable
from tuner.units import format_ratio, format_s
from tuner.verify.identical_failures import failure_cause
from tuner.verify.kept_logs import kept_logs_line
from tuner.verify.records import Extrapolated, Trial, Verified


def verified_text(verified: Verified, *, folder: Path) -> str:
    """Say which trial won, how accurate the model was, and where the launch files are."""
    lines = [
        columns([_row(trial) for trial in verified.trials], header=_HEADER),
        "",
        *_failures(verified),
        *_extrapolations(verified),
        *_verdict(verified),
        *_accuracy(verified),
        *(f"note           {note}" for note in verified.notes),
    ]
    if verified.winner is not None:
        lines += ["", *decision_lines(verified.winner), f"launch files: {folder / 'launch'}"]
    lines += kept_logs_line(folder / TRIALS_NAME)
    return "\n".join(lines)


def verdict_text(verified: Verified) -> str:
    """Return the verdict of the trials in a few lines."""
    return "\n".join(("verification", *_verdict(verified), *_accuracy(verified)))


_HEADER = ("decision", "from", "status", "measured", "predicted", "error", "recalibrated", "error")


def _row(trial: Trial) -> tuple[str, ...]:
    measured = trial.measured_step_s
    return (
        short_decision(trial.decision) + scale_text(trial),
        trial.origin,
        trial.status,
        _seconds(measured),
        _seconds(trial.predicted_step_s),
        _error(trial.predicted_step_s, measured),
        _seconds(trial.recalibrated_step_s),
        _error(trial.recalibrated_step_s, measured),
    )


def _failures(verified: Verified) -> Iterable[str]:
    """Why trials failed, each reason once."""
    by_cause: dict[str, list[Trial]] = {}
    for trial in verified.trials:
        if trial.status != "ok":
            by_cause.setdefault(
                failure_cause(trial) or f"{trial.status}: {trial.reason}", []
            ).append(trial)
    for trials in by_cause.values():
        count = f"{len(trials)} trial{'s' * (len(trials) > 1)}"
        yield f"failed         {count} {trials[0].status}: {printable(trials[0].reason)}"


def _verdict(verified: Verified) -> Iterable[str]:
    if verified.winner is None or verified.winner_step_s is None:
        yield "no trial ran: nothing is verified"
        return
    message = format_s(verified.winner_step_s)
    if verified.winner_extrapolated is not None:
        message = f"{extrapolated_text(verified.winner_extrapolated)}, extrapolated"
    yield f"winner         {short_decision(verified.winner)}: {message}"
    if all(trial.decision != verified.winner for trial in verified.trials):
        yield "               no trial of it was launched, at full or smaller scale"
    if verified.regret_ratio is None:
        yield "first choice   did not run"
    elif verified.regret_ratio == 0.0:
        yield "first choice   it is the winner"
    else:
        tie = f" (a tie: less than the {_doubt(verified)})" if verified.tie else ""
        yield f"first choice   {format_ratio(verified.regret_ratio)} slower than the winner{tie}"


def _doubt(verified: Verified) -> str:
    """Name the error that makes the first choice and the winner a tie."""
    is_measured = all(trial.scale is None for trial in verified.trials)
    return "noise" if is_measured else "extrapolation error"


def scale_text(trial: Trial) -> str:
    """Say at which scale a trial launched the job; nothing for the full scale."""
    scale, whole = trial.scale, trial.decision
    if scale is None:
        return ""
    parts = [f"{scale.num_devices} of {whole.num_devices} devices"]
    num_layers = sum(whole.pipeline_layout)
    if len(scale.layers) < num_layers:
        parts.append(f"{len(scale.layers)} of {num_layers} layers")
    return f", on {', '.join(parts)}"


def extrapolated_text(extrapolated: Extrapolated) -> str:
    """Format a step time with its error, e.g. `12.3 s ± 6.0 %`."""
    return f"{format_s(extrapolated.step_time_s)} ± {format_ratio(extrapolated.error_ratio)}"


def _extrapolations(verified: Verified) -> Iterable[str]:
    """Extrapolated step times of jobs that were launched at a smaller scale only."""
    by_decision: dict[TrainDecision, list[Trial]] = {}
    for trial in verified.trials:
        if trial.extrapolated is not None:
            by_decision.setdefault(trial.decision, []).append(trial)
    for decision, trials in by_decision.items():
        extrapolated = trials[0].extrapolated
        assert extrapolated is not None
        largest = max(trials, key=_size)
        yield (
            f"extrapolated   {short_decision(decision)}: {extrapolated_text(extrapolated)}"
            f"{scale_text(largest).replace(', on', ', from', 1)}"
        )
        yield from (f"               not launched: {one}" for one in extrapolated.unseen)
    if by_decision:
        yield "               (± is the 90 % error band)"
        yield ""


def _size(trial: Trial) -> tuple[int, int]:
    return (0, 0) if trial.scale is None else (trial.scale.num_devices, len(trial.scale.layers))


def _accuracy(verified: Verified) -> Iterable[str]:
    accuracy = verified.accuracy
    if accuracy.predicted_median_ape is not None:
        yield f"step time      median error {format_ratio(accuracy.predicted_median_ape)}" + (
            ""
            if accuracy.recalibrated_median_ape is None
            else f", {format_ratio(accuracy.recalibrated_median_ape)} recalibrated from the others"
        )
    if accuracy.activation_max_ape is not None:
        yield f"activations    largest error {format_ratio(accuracy.activation_max_ape)}"
    if accuracy.rank_of_measured_best is not None:
        yield f"measured best  ranked {accuracy.rank_of_measured_best} by the model"


def _seconds(value: float | None) -> str:
    return "" if value is None else format_s(value)


def _error(predicted: float | None, measured: float | None) -> str:
    if predicted is None or not measured:
        return ""
    return f"{(predicted / measured - 1.0) * 100:+.1f} %"
