"""Phase timers of a framework's log beside predicted seconds.

    verl       step:7 - ... - timing_s/gen:61.2 - ...   (also as keys of JSON)
    NeMo-RL    bullets of the block `Timing`, `policy_training: 25.05s (37.6%)`, or
               timing/train/policy_training as keys of JSON

The first step, which compiles and captures, does not count where there are others; medians do.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from tuner.errors import SpecError
from tuner.estimate.rl.records import PhaseTimer
from tuner.simulate.rl.step import Phases

_NUMBER: Final = r"([0-9]{1,9}(?:\.[0-9]{1,12})?(?:e-?[0-9]{1,2})?)"
_TIMERS: Final = (
    re.compile(rf"timing_s/(\w{{1,60}})[\"']?\s*[:=]\s*(?:np\.float\d+\()?{_NUMBER}(?![\w.])"),
    re.compile(rf"timing/train/([\w/]{{1,80}})[\"']?\s*[:=]\s*{_NUMBER}(?![\w.])"),
    re.compile(rf"(?m)^\W{{0,8}}([A-Za-z][\w/ ]{{1,80}}):\s*{_NUMBER}s\b"),
)
PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "rollout": ("gen", "generation", "exposed_generation"),
    "forward": ("old_log_prob", "ref", "values", "policy_and_reference_logprobs"),
    "train": ("update_actor", "update_critic", "policy_training"),
    "switch": (
        *("update_weights", "weight_sync", "prepare_for_generation/total"),
        *("training_prep", "logprob_inference_prep"),
    ),
    "step": ("step", "total_step_time", "Total step time"),
}
"""Timers of the frameworks by phase."""


def read_timers(text: str, *, source: str) -> tuple[dict[str, float], int]:
    """Return the median seconds of every timer, and the number of steps.

    Raises:
        SpecError: the log has none.
    """
    seconds: dict[str, list[float]] = {}
    for pattern in _TIMERS:
        for name, number in pattern.findall(text):
            seconds.setdefault(name.strip(), []).append(float(number))
    known = {name for names in PHASES.values() for name in names}
    phases = {name: values for name, values in seconds.items() if name in known}
    if not phases:
        raise SpecError(
            f"{source}: no phase timers such as timing_s/gen or policy_training; give the log of"
            " the driver, with the console among its loggers"
        )
    steps = max(map(len, phases.values()))
    kept = {name: values[1:] if len(values) > 1 else values for name, values in phases.items()}
    return {name: statistics.median(values) for name, values in kept.items()}, steps


def compare_timers(
    measured: Mapping[str, float], phases: Phases, *, factor: float
) -> tuple[PhaseTimer, ...]:
    """Return the timers of every phase that the log has beside the predicted seconds.

    Args:
        measured: seconds by timer.
        phases: predicted.
        factor: of the band, up and down.
    """
    exposes = "exposed_generation" in measured
    predicted = {
        "rollout": max(phases.rollout_s - phases.trainer_s, 0.0) if exposes else phases.rollout_s,
        "forward": phases.forward_s,
        "train": phases.train_s,
        "switch": phases.sync_s + phases.offload_s,
        "step": phases.step_s,
    }
    return tuple(
        _timer(phase, names, measured, predicted[phase], factor)
        for phase, known in PHASES.items()
        if (names := [name for name in known if name in measured])
    )


def _timer(
    phase: str,
    names: Sequence[str],
    measured: Mapping[str, float],
    predicted_s: float,
    factor: float,
) -> PhaseTimer:
    measured_s = sum(measured[name] for name in names)
    ratio = measured_s / max(predicted_s, 1e-3)
    return PhaseTimer(
        phase=phase,
        timers=tuple(names),
        measured_s=measured_s,
        predicted_s=predicted_s,
        ratio=ratio,
        is_off=ratio > factor,
    )
