"""Which answer is better: by the goal, and by whether published runs stand behind its mode.

Bands of aggregated and disaggregated launches are made from published runs, those of other modes
are guesses (tuner/costs/serving/bands.py). A mode without runs is chosen over one with them only
where it takes less at the far end of its band too:

    far end     steps h times as long, so a capacity of 1 / h: its program is solved once more with
                (1 + spare) h - 1 in place of the spare capacity that playing asked for
    a tie       goes to the mode with runs

Not covered: latencies at the far end of a band, which modes with runs are not held to either.
"""

import math
from collections.abc import Sequence

from tuner.costs.serving.bands import Bands, bands_of, joined
from tuner.costs.serving.engine import Engine
from tuner.planner.serve.program import BOUND_TOLERANCE, Spare
from tuner.planner.serve.solve_mode import Found, Question, solved_with, variants_of
from tuner.serve_plan import PUBLISHED_MODES
from tuner.spec.serving.goal import ServeGoal


def ranked(found: Sequence[Found], question: Question) -> tuple[Found, ...]:
    """Order answers, best first; those that the rule above holds back come last."""
    order = sorted(found, key=lambda one: rank_of(one, question.spec.goal))
    first = next((at for at, one in enumerate(order) if one.mode in PUBLISHED_MODES), 0)
    least = worth_of(order[first], question.spec.goal) if order else 0.0
    held_back = [
        one for one in order[:first] if far_worth(one, question) >= least * (1.0 - BOUND_TOLERANCE)
    ]
    return (*(one for one in order if one not in held_back), *held_back)


def far_worth(found: Found, question: Question) -> float:
    """Return what the goal wants least of at the far end of the band; infinite beyond the pools."""
    longer = max(bands_around(found, question).tpot.high_ratio, 1.0)
    if found.rate_per_s is not None:
        return longer / found.rate_per_s
    spare = Spare(
        prefill_ratio=(1.0 + found.spare.prefill_ratio) * longer - 1.0,
        others_ratio=(1.0 + found.spare.others_ratio) * longer - 1.0,
    )
    return min(
        (
            solved.outcome.objective
            for variant in variants_of(question, found.mode)
            if (
                solved := solved_with(
                    variant, found.mode, spare, router=found.router, may_refuse=True
                )
            )
            is not None
        ),
        default=math.inf,
    )


def bands_around(found: Found, question: Question) -> Bands:
    """Return the bands of an answer's TTFT and TPOT; of several engines, what holds for each."""
    goal = question.spec.goal
    engines = {Engine(goal.engine_on(group.option.site.pool.name).name) for group in found.groups}
    return joined(
        [
            bands_of(
                engine,
                mode=found.mode,
                has_kernels=not any(group.option.site.machine.estimated for group in found.groups),
                decoder=found.groups[0].option.iteration.decoder,
            )
            for engine in sorted(engines)
        ]
    )


def rank_of(found: Found, goal: ServeGoal) -> tuple[float, float]:
    """Order answers by the goal's objective; the least is best."""
    price = found.price_per_hour or 0.0
    if goal.objective == "rate":
        return worth_of(found, goal), float(found.devices)
    if goal.objective == "cost":
        return price, float(found.devices)
    if goal.objective == "devices":
        return float(found.devices), price
    goodput = found.played.requests_per_s * found.played.met_ratio
    return -goodput / found.devices, price


def worth_of(found: Found, goal: ServeGoal) -> float:
    """Return what the goal wants least of: money an hour, devices, or seconds a request."""
    if goal.objective == "rate":
        return math.inf if found.rate_per_s is None else 1.0 / found.rate_per_s
    return (found.price_per_hour or 0.0) if goal.objective == "cost" else float(found.devices)


def gain_ratio(worth: float, best: Found, goal: ServeGoal) -> float:
    """Return what is saved against the chosen answer; negative where it takes more."""
    return 1.0 - worth / max(worth_of(best, goal), 1e-9)


def lost_by(other: Found, best: Found, goal: ServeGoal) -> str:
    """Say what an answer takes beside the chosen one, or serves."""
    if goal.objective == "rate":
        rates = [0.0 if one.rate_per_s is None else one.rate_per_s for one in (other, best)]
        return f"{rates[0]:.4g} requests/s, the chosen one serves {rates[1]:.4g}"
    told = f"{counted(other.devices)}, the chosen one takes {best.devices}"
    if other.devices == best.devices:
        told = "as many devices as the chosen one"
    if goal.objective == "cost":
        prices = (other.price_per_hour or 0.0, best.price_per_hour or 0.0)
        told += f"; {prices[0]:.4g} an hour against {prices[1]:.4g}"
    elif goal.objective == "goodput":
        each = [-rank_of(one, goal)[0] for one in (other, best)]
        told += f"; {each[0]:.4g} good requests/s a device against {each[1]:.4g}"
    return told


def held_back_by(other: Found, best: Found, goal: ServeGoal) -> str:
    """Say why an answer that can be launched is not chosen though it takes less; else nothing."""
    if other.mode in PUBLISHED_MODES or rank_of(other, goal) > rank_of(best, goal):
        return ""
    return (
        f"; no published run stands behind {other.mode}, and where steps are as long as its band"
        " allows it takes no less: measure it before relying on it"
    )


def counted(devices: int) -> str:
    """Name a number of devices."""
    return f"{devices} device{'s' * (devices != 1)}"
