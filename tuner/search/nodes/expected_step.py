"""Expected steps on measured links, including the risk of running out of memory, and the choice.

The objective is that of the choice without measured links (tuner/search/train/memory_risk.py):

    expected   seconds of a step, slow links included, plus the expected cost of running out

The chosen decision was preferred to others within `TOLERANCE_RATIO` of it, so another must be
better by more than that. An advantage on usual links was already considered, so only what the slow
links add to it counts. Equal links therefore change no choice.

The lower end of an error band stays, since transfers may overlap more than is known; the rest of a
prediction scales with the step. A forecast of the whole run is scaled in proportion, with an
unchanged checkpoint interval.

Letters: C decisions, the chosen one first.
"""

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.faults.forecast import RunForecast
from tuner.faults.interval import interval_steps
from tuner.plans.train import Plan, Roomier, TrainPrediction
from tuner.search.train.memory_risk import Chances, LossPrices
from tuner.search.train.preference import MEMORY_STEPS, TOLERANCE_RATIO, fit_C

SLOW_LINKS: Final = "slow_links"
"""Entry of slow links in `breakdown_s`."""


def slowed(predicted: TrainPrediction, slow_s: float) -> TrainPrediction:
    """Add seconds to a step and to everything derived from it."""
    if slow_s <= 0.0:
        return predicted
    step_s = predicted.step_time_s + slow_s
    ratio = step_s / predicted.step_time_s
    low_s, high_s = predicted.step_time_s_band
    lowest, highest = predicted.tokens_per_s_per_device_band
    breakdown = predicted.breakdown_s
    update = {
        "step_time_s": step_s,
        "step_time_s_band": (low_s, high_s * ratio),
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device / ratio,
        "tokens_per_s_per_device_band": (lowest / ratio, highest),
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
        update |= _saving_steps(run, run.checkpoint_interval_s, step_s)
    return run.model_copy(update=update)


def _saving_steps(run: RunForecast, interval_s: float, step_s: float) -> dict[str, object]:
    """Steps between checkpoints with another step; those on hosts still divide the others."""
    levels, background_s = run.checkpoint_levels, 0.0
    if run.checkpoint_in_background:
        background_s = (run.checkpoint_write_s or 0.0) - (run.checkpoint_stall_s or 0.0)
    steps = interval_steps(interval_s, background_s=background_s, step_s=step_s)
    if levels is None or levels.host_interval_s is None or not levels.host_interval_steps:
        return {"checkpoint_interval_steps": steps}
    segments = round(interval_s / levels.host_interval_s)
    stall_s = levels.host_stall_s or 0.0
    host_background_s = (levels.host_write_s or 0.0) - stall_s
    # One writer writes all copies of a period, one after the other (two_levels.py).
    together_s = background_s + (segments - 1) * (host_background_s - stall_s)
    on_hosts = interval_steps(
        levels.host_interval_s,
        background_s=max(host_background_s, together_s / segments),
        step_s=step_s,
    )
    updated_levels = levels.model_copy(update={"host_interval_steps": on_hosts})
    return {"checkpoint_interval_steps": segments * on_hosts, "checkpoint_levels": updated_levels}


LEAST_GAIN_RATIO: Final = 0.01
"""Share of an expected step by which links must increase another decision's advantage."""


def expected_steps_s(
    predicted_C: Sequence[TrainPrediction],
    *,
    prices: LossPrices,
    slow_s_C: Floats | float = 0.0,
    roomier: Roomier | None = None,
) -> Floats:
    """Seconds per step with the expected cost of running out of memory, [C].

    Args:
        predicted_C: on usual links.
        prices: of running out of memory.
        slow_s_C: seconds that slow links add to each step.
        roomier: another fallback with more headroom, on usual links. Slow links are assumed to add
            to its step what they add to the least affected of the others.
    """
    step_s = np.array([predicted.step_time_s for predicted in predicted_C]) + slow_s_C
    ever, at_start = _ever_C(predicted_C), _at_start_C(predicted_C)
    if roomier is not None:
        # It has headroom, and its own expected step is not returned.
        step_s = np.append(step_s, roomier.step_time_s + np.min(slow_s_C))
        ever, at_start = np.append(ever, roomier.out_of_memory_probability), np.append(at_start, 0)
    with_losses_s = prices.expected_s(step_s, Chances(at_start_C=at_start, ever_C=ever))
    return with_losses_s[: len(predicted_C)]


def fallback_outside(plan: Plan, compared: Collection[TrainDecision]) -> Roomier | None:
    """The plan's decision with headroom; None if it is among those compared."""
    roomier = plan.roomier
    return None if roomier is None or roomier.decision in compared else roomier


def replacement_index(
    predicted_C: Sequence[TrainPrediction], *, usual_s_C: Floats, on_links_s_C: Floats
) -> int | None:
    """Return the index of the decision that replaces the first one; None: it stays.

    Among those within the tolerance of the best, the lower chance of running out of memory wins,
    then the lower expected step.

    Args:
        predicted_C: on usual links.
        usual_s_C: expected steps on usual links.
        on_links_s_C: expected steps on the measured links.
    """
    ever_C = _ever_C(predicted_C)
    known_C = usual_s_C[0] / usual_s_C * (1.0 + LEAST_GAIN_RATIO)
    ahead_C = np.maximum(1.0 + TOLERANCE_RATIO, known_C)
    better = np.flatnonzero(fit_C(ever_C) & (on_links_s_C * ahead_C < on_links_s_C[0]))
    if not len(better):
        return None
    least_s = float(on_links_s_C[better].min())
    better = better[on_links_s_C[better] <= least_s * (1.0 + TOLERANCE_RATIO)]
    memory_step = np.searchsorted(MEMORY_STEPS, ever_C[better])
    return int(better[np.lexsort((on_links_s_C[better], memory_step))[0]])


def _ever_C(predicted_C: Sequence[TrainPrediction]) -> Floats:
    """Chances of running out of memory; 0 where no errors of peaks are published."""
    return np.array([predicted.out_of_memory_probability or 0.0 for predicted in predicted_C])


def _at_start_C(predicted_C: Sequence[TrainPrediction]) -> Floats:
    return np.array(
        [predicted.out_of_memory_at_start_probability or 0.0 for predicted in predicted_C]
    )
