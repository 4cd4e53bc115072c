"""The effect of slow links on a prediction.

The lower end of the error band stays, since transfers may overlap more than is known; the rest of
the prediction scales with the step. A forecast of the whole run is scaled in proportion, with an
unchanged checkpoint interval.
"""

from typing import Final

from tuner.faults.forecast import RunForecast
from tuner.plans.train import TrainPrediction

SLOW_LINKS: Final = "slow_links"
"""Their entry in `breakdown_s`."""


def slowed(predicted: TrainPrediction, slow_s: float) -> TrainPrediction:
    """Add seconds to a step and to everything derived from it."""
    if slow_s <= 0.0:
        return predicted
    step_s = predicted.step_time_s + slow_s
    ratio = step_s / predicted.step_time_s
    low_s, high_s = predicted.step_time_s_band
    fewest, most = predicted.tokens_per_s_per_device_band
    breakdown = predicted.breakdown_s
    update = {
        "step_time_s": step_s,
        "step_time_s_band": (low_s, high_s * ratio),
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device / ratio,
        "tokens_per_s_per_device_band": (fewest / ratio, most),
        "breakdown_s": breakdown | {SLOW_LINKS: breakdown.get(SLOW_LINKS, 0.0) + slow_s},
        "communication_s": predicted.communication_s + slow_s,
        "mfu_ratio": None if predicted.mfu_ratio is None else predicted.mfu_ratio / ratio,
        "run": None if predicted.run is None else _stretched(predicted.run, ratio, step_s),
    }
    return predicted.model_copy(update=update)


def _stretched(run: RunForecast, ratio: float, step_s: float) -> RunForecast:
    longer = ("effective_step_s", "expected_failures", "wall_clock_s", "device_hours", "cost")
    update: dict[str, object] = {
        name: value * ratio for name in longer if (value := getattr(run, name)) is not None
    }
    update["goodput_tokens_per_s"] = run.goodput_tokens_per_s / ratio
    if run.wall_clock_s_band is not None:
        update["wall_clock_s_band"] = tuple(end * ratio for end in run.wall_clock_s_band)
    if run.checkpoint_interval_s is not None:
        update["checkpoint_interval_steps"] = max(1, round(run.checkpoint_interval_s / step_s))
    return run.model_copy(update=update)
