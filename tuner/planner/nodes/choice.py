"""A runner-up in the place of the chosen decision, where slow links hurt that one more.

The search takes every link for the usual one, so among its best may be one that sends less over
the links that are slow. The runners-up that a plan lists are priced with the best order found for
how they lie on the nodes, so that all their seconds are of the same links as the decision's; what
an obstacle keeps from being ordered says so. They are compared by the step that is expected with
running out of memory, as they were without measured links (expected_step.py). What the certificate
is about stays the fastest decision with usual links.

What the plan says of the replaced decision alone (its buckets, what it offloads, what binds it)
goes with it; what more room costs is said anew (headroom.py).

Not covered: decisions that the plan does not list; chains over several pools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from profilers.imports.link_matrix import LinkMatrix
from tuner.plan import Alternative, Band, Plan, Preference, TrainDecision, TrainPrediction
from tuner.planner.analytic.memory_risk import loss_prices
from tuner.planner.analytic.preference import memory_step
from tuner.planner.layout_groups import by_layout
from tuner.planner.nodes.expected_step import expected_steps_s, fallback_beside, place_taken_by
from tuner.planner.nodes.node_order import order_nodes, slow_in_order_s
from tuner.planner.nodes.slow_links import SLOW_LINKS, slowed
from tuner.planner.nodes.traffic import Traffic, obstacle, traffic
from tuner.planner.ratios import has_same_kernels, is_tie, turned
from tuner.planner.reasons import binding_constraint, why_lost
from tuner.spec.cluster import Pool
from tuner.train_words import short_decision
from tuner.units import format_ratio, format_s

AT_USUAL_LINKS: Final = "priced on usual links"
"""Of a runner-up whose nodes cannot be put in order."""

UNCHECKED_HOST: Final = (
    "offloading needs free host memory on each node, which the cluster does not state and the plan"
    " does not check"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastHurt:
    """A plan whose decision is the fastest on its links, and the order that showed it."""

    plan: Plan
    nodes: tuple[str, ...] | None
    """In the order of ranks; None where no order was looked for."""
    slow_s_of: Mapping[TrainDecision, float] = field(default_factory=dict)
    """Seconds of a step that slow links cost decisions in their best orders."""


def least_hurt(plan: Plan, links: LinkMatrix, *, pool: Pool, time_limit_s: float) -> LeastHurt:
    """Return the plan with the decision that is fastest on these links, often as it is.

    Args:
        plan: of one pool, with a decision.
        links: of the pool's nodes.
        pool: of the spec.
        time_limit_s: for all orders that are tried.
    """
    assert plan.decision is not None
    assert plan.predicted is not None
    own = _traffic(plan, plan.decision, plan.predicted, pool)
    if own is None:
        return LeastHurt(plan=plan, nodes=None)
    others = [
        (other, sent)
        for other in plan.runners_up
        if (sent := _traffic(plan, other.decision, other.predicted, pool)) is not None
        and sent.num_nodes <= len(links.nodes)
    ]
    # An order is as good for all that lie on the nodes alike, so each kind is ordered once.
    share_s = time_limit_s / len({_kind(sent) for sent in (own, *(sent for _, sent in others))})
    ordered = order_nodes(own, links, pool=pool, time_limit_s=share_s)
    nodes_of = {_kind(own): ordered.nodes}
    slow_s_of = {plan.decision: ordered.slow_s}
    for other, sent in others:
        if _kind(sent) not in nodes_of:
            found = order_nodes(sent, links, pool=pool, time_limit_s=share_s)
            nodes_of[_kind(sent)] = found.nodes
        slow_s = slow_in_order_s(sent, links, nodes_of[_kind(sent)], pool=pool)
        slow_s_of[other.decision] = slow_s
    best = _place_taken_by(plan, [other for other, _ in others], slow_s_of)
    if best is None:
        return LeastHurt(plan=plan, nodes=ordered.nodes, slow_s_of=slow_s_of)
    other, sent = others[best]
    instead = _instead(plan, other, own_slow_s=ordered.slow_s, slow_s=slow_s_of[other.decision])
    return LeastHurt(plan=instead, nodes=nodes_of[_kind(sent)], slow_s_of=slow_s_of)


def _place_taken_by(
    plan: Plan, others: Sequence[Alternative], slow_s_of: Mapping[TrainDecision, float]
) -> int | None:
    """Which of the runners-up is to be run instead of the decision; None where none is."""
    assert plan.decision is not None
    assert plan.predicted is not None
    predicted = [plan.predicted, *(other.predicted for other in others)]
    slow_s = [slow_s_of[plan.decision], *(slow_s_of[other.decision] for other in others)]
    prices = loss_prices(plan.goal)
    roomier = fallback_beside(plan, [plan.decision, *(other.decision for other in others)])
    taken = place_taken_by(
        predicted,
        usual_s_C=expected_steps_s(predicted, prices=prices, roomier=roomier),
        on_links_s_C=expected_steps_s(
            predicted, prices=prices, slow_s_C=np.array(slow_s), roomier=roomier
        ),
    )
    return None if taken is None else taken - 1


def runners_up_on_links(plan: Plan, slow_s_of: Mapping[TrainDecision, float]) -> Plan:
    """Return a plan whose runners-up are priced on the links that its decision is priced on.

    Args:
        plan: whose prediction has its slow links already.
        slow_s_of: what slow links cost decisions, seconds of a step.
    """
    assert plan.decision is not None
    assert plan.predicted is not None
    runners_up = [_slowed(plan.predicted, one, slow_s_of) for one in plan.runners_up]
    own_slow_s = plan.predicted.breakdown_s.get(SLOW_LINKS, 0.0)
    usual_s = plan.predicted.step_time_s - own_slow_s
    return plan.model_copy(
        update=by_layout(
            plan.decision,
            [
                _compared(plan.predicted, before, now, usual_s=usual_s)
                for before, now in zip(plan.runners_up, runners_up, strict=True)
            ],
        )
    )


def _slowed(
    chosen: TrainPrediction, one: Alternative, slow_s_of: Mapping[TrainDecision, float]
) -> Alternative:
    """A runner-up with what slow links cost it."""
    if SLOW_LINKS in one.predicted.breakdown_s:
        return one
    slow_s = slow_s_of.get(one.decision)
    if slow_s is None:
        return one.model_copy(update={"lost_by": f"{one.lost_by}; {AT_USUAL_LINKS}"})
    predicted = slowed(one.predicted, slow_s)
    return one.model_copy(update={"predicted": predicted, "lost_by": why_lost(chosen, predicted)})


def _compared(
    chosen: TrainPrediction, before: Alternative, now: Alternative, *, usual_s: float
) -> Alternative:
    """Move the band of a runner-up's ratio with the ratio."""
    if now.ratio_band is None or SLOW_LINKS in before.predicted.breakdown_s:
        return now
    moved = now.predicted.step_time_s / chosen.step_time_s
    moved /= before.predicted.step_time_s / usual_s
    low, high = now.ratio_band
    band = low * moved, high * moved
    return now.model_copy(update={"ratio_band": band, "within_band": is_tie(band)})


def _kind(sent: Traffic) -> tuple[int, int, int]:
    """How a decision lies on the nodes."""
    return sent.nodes_of_stage, sent.groups, sent.block


def _instead(plan: Plan, other: Alternative, *, own_slow_s: float, slow_s: float) -> Plan:
    """Put a runner-up where the decision was, and the decision among the runners-up."""
    assert plan.decision is not None
    assert plan.predicted is not None
    former = plan.preferred
    fastest_s = plan.predicted.step_time_s if former is None else former.fastest_step_s
    lost = f"{format_s(slow_s)} a step lost to slow links, not {format_s(own_slow_s)}"
    former_slow = slowed(plan.predicted, own_slow_s)
    band = other.ratio_band and turned(
        other.ratio_band,
        before=other.predicted.step_time_s / plan.predicted.step_time_s,
        after=former_slow.step_time_s / (other.predicted.step_time_s + slow_s),
    )
    left = Alternative(
        decision=plan.decision,
        predicted=former_slow,
        within_band=other.within_band if band is None else is_tie(band),
        ratio_band=band,
        lost_by=f"slow links: {format_s(own_slow_s)}",
    )
    fastest = plan.decision if former is None else former.fastest
    riskier = _riskier(plan.predicted, other.predicted)
    preferred, gap_ratio = None, None
    if other.decision != fastest:
        preferred = Preference(
            fastest=fastest,
            fastest_step_s=fastest_s,
            slower_ratio=max(0.0, other.predicted.step_time_s / fastest_s - 1.0),
            reasons=(lost, *riskier),
        )
        bound_s = plan.certificate.bound or 0.0
        gap_ratio = max(0.0, 1.0 - bound_s / other.predicted.step_time_s)
    notes = _notes(plan, other)
    if preferred is None:
        notes.append(
            f"measured links: in place of {short_decision(plan.decision)}: "
            f"{', '.join((lost, *riskier))}"
        )
    known = _known_bands(plan)
    return plan.model_copy(
        update={
            "decision": other.decision,
            "predicted": other.predicted,
            "binding_constraint": _binding(plan, other),
            "provenance": plan.provenance.model_copy(update={"notes": tuple(notes)}),
            **by_layout(
                other.decision,
                (
                    left,
                    *(
                        _against(plan, one, other, known)
                        for one in plan.runners_up
                        if one is not other
                    ),
                ),
            ),
            "preferred": preferred,
            "certificate": plan.certificate.model_copy(update={"decision_gap_ratio": gap_ratio}),
        }
    )


def _riskier(before: TrainPrediction, now: TrainPrediction) -> tuple[str, ...]:
    """Say it where the new decision is likelier to run out of memory."""
    was, chance = before.out_of_memory_probability, now.out_of_memory_probability
    if was is None or chance is None or memory_step(chance) <= memory_step(was):
        return ()
    return (
        f"though it has a {format_ratio(chance)} chance of running out of memory, not "
        f"{format_ratio(was)}",
    )


def _known_bands(plan: Plan) -> dict[bool, Band]:
    """Return measured over predicted ratios by whether the kernels are the same."""
    assert plan.decision is not None
    assert plan.predicted is not None
    known = {}
    for one in plan.runners_up:
        if one.ratio_band is not None:
            ratio = one.predicted.step_time_s / plan.predicted.step_time_s
            low, high = one.ratio_band
            known[has_same_kernels(plan.decision, one.decision)] = low / ratio, high / ratio
    return known


def _against(
    plan: Plan, one: Alternative, other: Alternative, known: Mapping[bool, Band]
) -> Alternative:
    """Compare a runner-up with the one that takes the decision's place.

    Where no pair of the plan shows the band that two such decisions have, that of the runner-up
    with the replaced decision stands in.
    """
    assert plan.decision is not None
    if one.ratio_band is None:
        return one
    was_same = has_same_kernels(plan.decision, one.decision)
    is_same = has_same_kernels(other.decision, one.decision)
    low, high = known.get(is_same, known[was_same])
    ratio = one.predicted.step_time_s / other.predicted.step_time_s
    band = low * ratio, high * ratio
    return one.model_copy(update={"ratio_band": band, "within_band": is_tie(band)})


def _binding(plan: Plan, other: Alternative) -> str:
    """Say what binds the new decision; what memory keeps from all of them still holds."""
    if plan.binding_constraint.startswith("memory_per_device"):
        return plan.binding_constraint
    return binding_constraint(
        other.predicted,
        unlimited_s=None,
        memory_limit_bytes=other.predicted.memory_limit_bytes or 0,
    )


def _notes(plan: Plan, other: Alternative) -> list[str]:
    """Return the plan's notes without those on the replaced decision that do not hold any more."""
    decision, kept = other.decision, []
    is_cut = decision.tensor_model_parallel_size > 1 or decision.context_parallel_size > 1
    for note in plan.provenance.notes:
        if note.startswith("gradient buckets of "):
            continue
        if note.startswith("overlapped all-to-all wants ") and not (
            decision.a2a_overlap and is_cut
        ):
            continue
        if note.startswith("offloading needs "):
            continue
        kept.append(note)
    if decision.optimizer_offload or decision.activation_offload:
        kept.append(UNCHECKED_HOST)
    return kept


def _traffic(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction, pool: Pool
) -> Traffic | None:
    if obstacle(decision, pool):
        return None
    return traffic(
        decision,
        predicted,
        model=plan.model,
        goal=plan.goal,
        pool=pool,
        ranks=range(decision.pipeline_model_parallel_size),
    )
