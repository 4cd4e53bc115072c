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
    first_with: dict[str, int] = {}

    def started(decision: "TrainDecision", predicted_s: float) -> None:
        said = f"{short_decision(decision)}, {format_s(predicted_s)} a step predicted"
        print_stderr(f"launching {said}")

    def ended(record: "TrialRecord") -> None:
        cause, measured_s = failure_cause(record), record.measured_step_s
        status = f"{record.status}: {record.reason}" if record.reason else record.status
        if cause and cause in first_with:
            status = f"{record.status} like trial {first_with[cause]}"
        first_with.setdefault(cause, record.number)
        took = "not measured" if measured_s is None else f"{format_s(measured_s)} measured"
        trial = f"trial {record.number} ({record.origin}), {short_decision(record.decision)}"
        print_stderr(f"{trial}: {status}; {took}, {format_s(record.predicted_step_s)} predicted")

    return Watcher(started=started, ended=ended)
