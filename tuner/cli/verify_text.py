"""What a verification found, as text for people."""

from collections.abc import Iterable
from pathlib import Path

from tuner.cli.plan_text import decision_lines
from tuner.cli.text import columns
from tuner.explain.words import short_decision
from tuner.units import format_ratio, format_s
from tuner.verify.records import Trial, Verified


def verified_text(verified: Verified, *, folder: Path) -> str:
    """Say which trial won, how good the model was, and where the launch files are."""
    lines = [
        columns([_row(trial) for trial in verified.trials], header=_HEADER),
        "",
        *_verdict(verified),
        *_accuracy(verified),
        *(f"note           {note}" for note in verified.notes),
    ]
    if verified.winner is not None:
        lines += ["", *decision_lines(verified.winner), f"launch files: {folder / 'launch'}"]
    return "\n".join(lines)


def verdict_text(verified: Verified) -> str:
    """Say in a few lines what the trials made of the plan."""
    return "\n".join(("what the trials say", *_verdict(verified), *_accuracy(verified)))


_HEADER = ("decision", "from", "status", "measured", "predicted", "error", "recalibrated", "error")


def _row(trial: Trial) -> tuple[str, ...]:
    measured = trial.measured_step_s
    return (
        short_decision(trial.decision),
        trial.origin,
        trial.status,
        _seconds(measured),
        _seconds(trial.predicted_step_s),
        _error(trial.predicted_step_s, measured),
        _seconds(trial.recalibrated_step_s),
        _error(trial.recalibrated_step_s, measured),
    )


def _verdict(verified: Verified) -> Iterable[str]:
    if verified.winner is None or verified.winner_step_s is None:
        yield "no trial ran: nothing is verified"
        return
    yield f"winner         {short_decision(verified.winner)}: {format_s(verified.winner_step_s)}"
    if verified.regret_ratio is None:
        yield "first choice   did not run"
    elif verified.regret_ratio == 0.0:
        yield "first choice   it is the winner"
    else:
        tie = " (a tie: less than the noise)" if verified.tie else ""
        yield f"first choice   {format_ratio(verified.regret_ratio)} slower than the winner{tie}"


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
        yield f"measured best  number {accuracy.rank_of_measured_best} in the model's order"


def _seconds(value: float | None) -> str:
    return "" if value is None else format_s(value)


def _error(predicted: float | None, measured: float | None) -> str:
    if predicted is None or not measured:
        return ""
    return f"{(predicted / measured - 1.0) * 100:+.1f} %"
