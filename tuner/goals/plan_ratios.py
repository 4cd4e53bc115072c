"""Error bands of the ratio of two plans' figures, which decide ties.

    m    predicted figure of another plan over the first one's
    w    factor by which the measured ratio may differ from m, either way

The measured ratio is expected in [m / w, m w].

    train, one setting      the bands of ratios from published pairs (tuner/search/ratios.py),
                            those that ship, whether the plans were calibrated or not
    serve, one setting      at equal traffic, aggregated: those of published pairs of layouts
                            (tuner/costs/serve/bands.py); else the wider of the two stated
                            bands of TTFT or TPOT, as half its width in the logarithm
    two settings            both stated bands as independent errors: squares of logarithms are
                            summed
    place                   the noise of the two verdicts, likewise

Plans are of one setting where model, kind of device, precision and engine are equal. What decides a
deployment (devices, cost, goodput, and the most requests/s where that is the goal) follows the time
of its steps, so it has the band of TPOT. Where both plans maximise the rate, their traffic is
compared without it.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from tuner.costs.serve.bands import ratio_bands
from tuner.costs.train.calibration import shipped
from tuner.errors import TunerError
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.plans.train import Band, Plan
from tuner.search.ratios import ratios_for, ties_ratio, uniform_ratios

RATES: Final = frozenset({"tokens_per_s", "tokens_per_s_per_device", "mfu_ratio"})
"""Figures of training that are inverse to seconds."""
TIMES: Final = frozenset({"step_time_s", "fastest_step_time_s", "run_s", "run_cost"})
SERVED: Final = frozenset(
    {
        *("num_devices", "goodput_per_device", "cost_per_hour"),
        *("cost_per_million_input_tokens", "cost_per_million_output_tokens"),
    }
)
"""Figures of a deployment that follow the time of its steps."""
FIRST_TOKEN: Final = "ttft_"
PER_TOKEN: Final = "tpot_"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRatio:
    """Measured over predicted ratio of a figure of two plans, lowest and highest."""

    band: Band
    source: str
    """Source of the band, in words."""


def train_ratio_band(first: Plan, second: Plan, figure: str) -> PlanRatio | None:
    """Return the band of a figure's ratio, second over first; None where nothing states one.

    Figures have the names of `Goal.figures`.
    """
    singles = [
        _relative(plan.predicted.step_time_s_band, plan.predicted.step_time_s)
        for plan in (first, second)
        if plan.predicted is not None
    ]
    if figure not in RATES | TIMES or len(singles) < 2:
        return None
    if _train_setting(first) != _train_setting(second):
        return _independent(singles, "stated bands of both steps")
    low, high = _one_setting(first, second, wider(*singles))
    band = (1.0 / high, 1.0 / low) if figure in RATES else (low, high)
    return PlanRatio(band=band, source="ratios of steps of one setting")


def _one_setting(first: Plan, second: Plan, single: Band) -> Band:
    """Return measured over predicted ratio of two steps, the second one's over the first one's."""
    if first.decision is None or second.decision is None:
        raise ValueError("plans with a prediction have a decision")
    measured_here = bool(first.provenance.device_kind)
    ratios = ratios_for(
        None if measured_here else shipped(),
        generation=_generation(first),
        has_experts=first.model.moe is not None,
        band=single,
    )
    return ratios.between(first.decision, second.decision, ratio=1.0)


def serve_ratio_band(first: ServePlan, second: ServePlan, figure: str) -> PlanRatio | None:
    """Return the band of a figure's ratio, second over first; None where nothing states one."""
    of_steps = SERVED | {"requests_per_s"} if _look_for_rate(first, second) else SERVED
    if figure not in of_steps and not figure.startswith((FIRST_TOKEN, PER_TOKEN)):
        return None
    singles = [
        _stated(plan.predicted, figure) for plan in (first, second) if plan.predicted is not None
    ]
    if len(singles) < 2:
        return None
    name = "TTFT" if figure.startswith(FIRST_TOKEN) else "TPOT"
    if _serve_setting(first) != _serve_setting(second):
        return _independent(singles, f"stated bands of both {name}s")
    if _is_of_published_kind(first, second):
        published = ratio_bands()[0 if name == "TTFT" else 1]
        return PlanRatio(
            band=(published.low_ratio, published.high_ratio),
            source=f"ratios of {name} of two layouts at equal load",
        )
    band = uniform_ratios(ties_ratio(wider(*singles))).other_kernels
    return PlanRatio(band=band, source=f"the wider of both stated bands of {name}")


def _is_of_published_kind(first: ServePlan, second: ServePlan) -> bool:
    """Return whether two plans differ as the published pairs do: in their layout only."""
    modes = [plan.decision.mode for plan in (first, second) if plan.decision is not None]
    traffics = [plan.goal.traffic for plan in (first, second)]
    if _look_for_rate(first, second):
        traffics = [traffic.model_copy(update={"rate": None}) for traffic in traffics]
    return modes == ["aggregated"] * 2 and traffics[0] == traffics[1]


def _look_for_rate(first: ServePlan, second: ServePlan) -> bool:
    """Return whether both plans maximise the rate, which is then no part of the spec."""
    return first.goal.objective == "rate" == second.goal.objective


def place_ratio_band(first: PlacePlan, second: PlacePlan, _figure: str) -> PlanRatio | None:
    """Return the band of any figure's ratio, second over first; None without two verdicts."""
    verdicts = [plan.verdict for plan in (first, second) if plan.verdict is not None]
    noise = math.hypot(*(verdict.noise_ratio for verdict in verdicts))
    if len(verdicts) < 2:
        return None
    return PlanRatio(band=uniform_ratios(noise).other_kernels, source="noise of both gains")


def wider(first: Band, second: Band) -> Band:
    """Return the wider band, by the ratio of its edges."""
    return max(first, second, key=ties_ratio)


def _independent(singles: list[Band], source: str) -> PlanRatio:
    width = math.exp(math.hypot(*(math.log1p(ties_ratio(band)) for band in singles)))
    return PlanRatio(
        band=(1.0 / width, width), source=f"{source}, as settings differ and share no errors"
    )


def _stated(predicted: ServePrediction, figure: str) -> Band:
    if figure.startswith(FIRST_TOKEN):
        return _relative(predicted.ttft_s_band, predicted.ttft_s.mean)
    return _relative(predicted.tpot_s_band, predicted.tpot_s.mean)


def _relative(band: Band, value: float) -> Band:
    return (band[0] / value, band[1] / value) if value > 0.0 and band[0] > 0.0 else (1.0, 1.0)


def _train_setting(plan: Plan) -> Mapping[str, Any]:
    """Return what the errors of two predictions must share to cancel."""
    engine = None if plan.goal.engine is None else plan.goal.engine.model_dump()
    return {
        **_hardware(plan, {pool.name for pool in plan.cluster.pools}),
        "precision": plan.goal.precision,
        "engine": engine or plan.emit[:1],
    }


def _serve_setting(plan: ServePlan) -> Mapping[str, Any]:
    used = {pool.name for pool in plan.cluster.pools}
    if plan.decision is not None:
        used = {group.pool for group in plan.decision.instances}
    return {
        **_hardware(plan, used),
        "weights": plan.goal.quantization,
        "engine": plan.goal.engine.model_dump(),
    }


def _hardware(plan: Plan | ServePlan, used: Set[str]) -> Mapping[str, Any]:
    return {
        "model": plan.model.model_dump(exclude={"name"}),
        "devices": {pool.device or pool.name for pool in plan.cluster.pools if pool.name in used},
    }


def _generation(plan: Plan) -> str:
    """Return the generation of the devices; empty where none is known or several are."""
    pools = plan.cluster.pools
    if any(pool.device is None for pool in pools):
        return ""
    try:
        kinds = {str(pool.sheet.generation) for pool in pools}
    except TunerError:
        return ""
    return kinds.pop() if len(kinds) == 1 else ""
