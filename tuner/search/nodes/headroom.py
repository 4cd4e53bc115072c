"""A plan's fields on memory headroom, once its decisions are priced on measured links.

    preferred   the expected steps of the decision and of the fastest, both on these links
    roomier     the fastest with headroom, where the decision may run out of memory: a runner-up on
                these links, or the earlier result, which is compared on usual links

If no decision with headroom was found, that remains true for any decision.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tuner.config.train import TrainDecision
from tuner.plans.train import Alternative, Plan, Preference, Roomier, TrainPrediction
from tuner.search.nodes.expected_step import SLOW_LINKS, expected_steps_s, fallback_outside
from tuner.search.train.memory_risk import LIKELY, SMALL, loss_prices
from tuner.search.train.preference import is_excluded


def with_headroom_on_links(plan: Plan, *, before: Plan, priced: Collection[TrainDecision]) -> Plan:
    """Update the headroom fields after pricing the links.

    Args:
        plan: its decision and runners-up include slow links.
        before: the same plan without links, maybe with another decision.
        priced: decisions whose slow links are known.
    """
    assert plan.predicted is not None
    others = [runner_up for runner_up in plan.runners_up if runner_up.decision in priced]
    update: dict[str, Any] = {"preferred": _preference(plan, others)}
    if plan.decision != before.decision:
        update |= _headroom_fields(plan, before, others)
    return plan.model_copy(update=update)


def _preference(plan: Plan, others: list[Alternative]) -> Preference | None:
    """The comparison with the fastest; without expected steps where the fastest's is unknown."""
    assert plan.decision is not None
    assert plan.predicted is not None
    preference = plan.preferred
    if preference is None:
        return None
    known = {plan.decision: plan.predicted} | {
        runner_up.decision: runner_up.predicted for runner_up in others
    }
    chances = [value.out_of_memory_probability for value in known.values()]
    is_known = preference.fastest in known and None not in chances
    figures: dict[str, float | None] = {
        "expected_step_s": None,
        "fastest_expected_step_s": None,
        "fastest_out_of_memory_probability": None,
        "fastest_tried_first_step_s": None,
    }
    if not is_known:
        return preference.model_copy(update=figures)
    if plan.roomier is not None or min(chance or 0.0 for chance in chances) <= SMALL:
        step_s = _expected_s(plan, known)
        figures["expected_step_s"] = step_s[plan.decision]
        figures["fastest_expected_step_s"] = step_s[preference.fastest]
    chosen_chance, fastest_chance = (
        known[which].out_of_memory_probability or 0.0
        for which in (plan.decision, preference.fastest)
    )
    figures["fastest_out_of_memory_probability"] = fastest_chance
    if is_excluded(fastest_chance, beside=chosen_chance):
        tries = {which: known[which] for which in (preference.fastest, plan.decision)}
        figures["fastest_tried_first_step_s"] = _expected_s(plan, tries)[preference.fastest]
    return preference.model_copy(update=figures)


def _expected_s(
    plan: Plan, known: Mapping[TrainDecision, TrainPrediction]
) -> dict[TrainDecision, float]:
    """Expected seconds per step of decisions on these links."""
    slow_s = [value.breakdown_s.get(SLOW_LINKS, 0.0) for value in known.values()]
    step_s = expected_steps_s(
        [value.model_copy(update={"step_time_s": _usual_s(value)}) for value in known.values()],
        prices=loss_prices(plan.goal),
        slow_s_C=np.array(slow_s),
        roomier=fallback_outside(plan, known),
    )
    return dict(zip(known, map(float, step_s), strict=True))


def _headroom_fields(plan: Plan, before: Plan, others: list[Alternative]) -> dict[str, Any]:
    """Headroom fields for a decision that replaced another."""
    assert plan.predicted is not None
    assert before.predicted is not None
    chance = plan.predicted.out_of_memory_probability or 0.0
    roomier = _roomier(plan, before, others) if chance > SMALL else None
    ratio = before.roomier_within_ratio
    if ratio is not None:
        searched_s = (1.0 + ratio) * before.predicted.step_time_s
        ratio = max(0.0, searched_s / _usual_s(plan.predicted) - 1.0) or None
    return {
        "roomier": roomier,
        "roomier_within_ratio": ratio,
        "no_roomier": before.no_roomier and roomier is None and chance > SMALL,
        "relaxations": before.relaxations if chance > LIKELY else (),
    }


def _roomier(plan: Plan, before: Plan, others: list[Alternative]) -> Roomier | None:
    """The decision with headroom that is least slower."""
    assert plan.predicted is not None
    step_s = plan.predicted.step_time_s
    run_s = loss_prices(plan.goal).run_s(step_s)

    def of(roomier: Roomier, ratio: float) -> Roomier:
        slower_ratio = max(0.0, ratio - 1.0)
        return roomier.model_copy(
            update={"slower_ratio": slower_ratio, "slower_s": slower_ratio * run_s}
        )

    candidates = [
        of(_as_roomier(runner_up), runner_up.predicted.step_time_s / step_s)
        for runner_up in others
        if (runner_up.predicted.out_of_memory_probability or 0.0) <= SMALL
    ]
    if before.roomier is not None and before.roomier.decision != plan.decision:
        candidates.append(of(before.roomier, before.roomier.step_time_s / _usual_s(plan.predicted)))
    return min(candidates, key=lambda candidate: candidate.slower_ratio, default=None)


def _as_roomier(runner_up: Alternative) -> Roomier:
    return Roomier(
        decision=runner_up.decision,
        step_time_s=runner_up.predicted.step_time_s,
        slower_ratio=0.0,
        slower_s=0.0,
        peak_memory_bytes=max(runner_up.predicted.peak_memory_bytes),
        out_of_memory_probability=runner_up.predicted.out_of_memory_probability or 0.0,
    )


def _usual_s(predicted: TrainPrediction) -> float:
    """Seconds of a step without its slow links."""
    return predicted.step_time_s - predicted.breakdown_s.get(SLOW_LINKS, 0.0)
