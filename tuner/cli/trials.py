"""Trials on stderr while they run: a line as one begins, a line as it ends."""

from typing import TYPE_CHECKING

from tuner.cli.text import print_stderr
from tuner.config.train_words import short_decision
from tuner.units import format_s
from tuner.verify.loop import failure_cause
from tuner.verify.verification import Watcher

if TYPE_CHECKING:
    from tuner.config.train import TrainDecision
    from tuner.verify.records import TrialRecord


def trial_lines() -> Watcher:
    """Return what prints launches as they begin and end; each cause of a failure in full once."""
    trials: dict[str, int] = {}

    def started(decision: "TrainDecision", predicted_s: float) -> None:
        said = f"{short_decision(decision)}, {format_s(predicted_s)} a step predicted"
        print_stderr(f"launching {said}")

    def ended(record: "TrialRecord") -> None:
        cause, measured_s = failure_cause(record), record.measured_step_s
        status = f"{record.status}: {record.reason}" if record.reason else record.status
        first = trials.setdefault(cause, record.number) if cause else record.number
        if first != record.number:
            status = f"{record.status} like trial {first}"
        took = "not measured" if measured_s is None else f"{format_s(measured_s)} measured"
        launched = record.decision if record.scale is None else record.scale.decision
        print_stderr(
            f"  trial {record.number}, {short_decision(launched)}: {status}: {took},"
            f" {format_s(record.predicted_step_s)} predicted"
        )

    return Watcher(started=started, ended=ended)
