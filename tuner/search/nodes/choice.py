"""Replacement of the chosen decision by a runner-up that suffers less from slow links.

The search assumes that every link is the usual one, so a runner-up may send less over slow links.
The runners-up of a plan are priced with the best node order found for their layout, on the same
links as the decision; those that cannot be ordered say so. Runners-up are compared by the expected
step including the risk of running out of memory, as without measured links (expected_step.py). The
certificate stays that of the fastest decision on usual links.

Notes on the replaced decision's gradient buckets and overlap of the all-to-all are dropped; the
cost of headroom is computed again (headroom.py).

Not covered: decisions that the plan does not list; chains over several pools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from profilers.imports.link_matrix import LinkMatrix
from tuner.config.knobs import overlaps_contend
from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.plans.train import Alternative, Band, Plan, Preference, TrainPrediction
from tuner.search.layout_groups import by_layout
from tuner.search.nodes.expected_step import (
    SLOW_LINKS,
    expected_steps_s,
    fallback_outside,
    replacement_index,
    slowed,
)
from tuner.search.nodes.node_order import order_nodes, slow_links_s
from tuner.search.nodes.traffic import NodeTraffic, obstacle, traffic
from tuner.search.ratios import has_same_kernels, is_tie, turned
from tuner.search.reasons import binding_constraint, why_lost
from tuner.search.train.memory_risk import loss_prices
from tuner.search.train.preference import memory_step
from tuner.spec.cluster import Pool
from tuner.units import format_ratio, format_s

AT_USUAL_LINKS: Final = "priced on usual links"
"""Note on a runner-up whose nodes cannot be ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnLinks:
    """A plan with the decision that is preferred on its links, and the node order."""

    plan: Plan
    nodes: tuple[str, ...] | None
    """Nodes in the order of ranks; None where no order was searched for."""
    slow_s_of: Mapping[TrainDecision, float] = field(default_factory=dict)
    """Seconds per step that slow links cost each decision in its best order."""


def choose_on_links(
    plan: Plan, links: LinkMatrix, *, pool: Pool, time_limit_s: float
) -> PlanOnLinks:
    """Return the plan with the decision that is preferred on these links, often the same.

    Args:
        plan: of one pool, with a decision.
        links: of the pool's nodes.
        pool: of the spec.
        time_limit_s: of all orders together.
    """
    assert plan.decision is not None
    assert plan.predicted is not None
    chosen_traffic = _traffic(plan, plan.decision, plan.predicted, pool)
    if chosen_traffic is None:
        return PlanOnLinks(plan=plan, nodes=None)
    others = [
        (runner_up, sent)
        for runner_up in plan.runners_up
        if (sent := _traffic(plan, runner_up.decision, runner_up.predicted, pool)) is not None
        and sent.num_nodes <= len(links.nodes)
    ]
    # Decisions with the same layout on the nodes share an order.
    share_s = time_limit_s / len(
        {_node_layout(sent) for sent in (chosen_traffic, *(sent for _, sent in others))}
    )
    ordered = order_nodes(chosen_traffic, links, pool=pool, time_limit_s=share_s)
    nodes_of = {_node_layout(chosen_traffic): ordered.nodes}
    slow_s_of = {plan.decision: ordered.slow_s}
    for alternative, sent in others:
        if _node_layout(sent) not in nodes_of:
            order = order_nodes(sent, links, pool=pool, time_limit_s=share_s)
            nodes_of[_node_layout(sent)] = order.nodes
        slow_s = slow_links_s(sent, links, nodes_of[_node_layout(sent)], pool=pool)
        slow_s_of[alternative.decision] = slow_s
    best = _replacement(plan, [runner_up for runner_up, _ in others], slow_s_of)
    if best is None:
        return PlanOnLinks(plan=plan, nodes=ordered.nodes, slow_s_of=slow_s_of)
    replacement, sent = others[best]
    instead = _with_replacement(
        plan, replacement, former_slow_s=ordered.slow_s, slow_s=slow_s_of[replacement.decision]
    )
    return PlanOnLinks(plan=instead, nodes=nodes_of[_node_layout(sent)], slow_s_of=slow_s_of)


def _replacement(
    plan: Plan, others: Sequence[Alternative], slow_s_of: Mapping[TrainDecision, float]
) -> int | None:
    """Index of the runner-up that replaces the decision; None where none does."""
    assert plan.decision is not None
    assert plan.predicted is not None
    predicted = [plan.predicted, *(runner_up.predicted for runner_up in others)]
    slow_s = [slow_s_of[plan.decision], *(slow_s_of[runner_up.decision] for runner_up in others)]
    prices = loss_prices(plan.goal)
    roomier = fallback_outside(plan, [plan.decision, *(runner_up.decision for runner_up in others)])
    index = replacement_index(
        predicted,
        usual_s_C=expected_steps_s(predicted, prices=prices, roomier=roomier),
        on_links_s_C=expected_steps_s(
            predicted, prices=prices, slow_s_C=np.array(slow_s), roomier=roomier
        ),
    )
    return None if index is None else index - 1


def runners_up_on_links(plan: Plan, slow_s_of: Mapping[TrainDecision, float]) -> Plan:
    """Return a plan whose runners-up are priced on the same links as its decision.

    Args:
        plan: its prediction includes slow links already.
        slow_s_of: seconds per step that slow links cost each decision.
    """
    assert plan.decision is not None
    assert plan.predicted is not None
    runners_up = [_slowed(plan.predicted, runner_up, slow_s_of) for runner_up in plan.runners_up]
    former_slow_s = plan.predicted.breakdown_s.get(SLOW_LINKS, 0.0)
    usual_s = plan.predicted.step_time_s - former_slow_s
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
    chosen: TrainPrediction, runner_up: Alternative, slow_s_of: Mapping[TrainDecision, float]
) -> Alternative:
    """Add the cost of slow links to a runner-up."""
    if SLOW_LINKS in runner_up.predicted.breakdown_s:
        return runner_up
    slow_s = slow_s_of.get(runner_up.decision)
    if slow_s is None:
        return runner_up.model_copy(update={"lost_by": f"{runner_up.lost_by}; {AT_USUAL_LINKS}"})
    predicted = slowed(runner_up.predicted, slow_s)
    return runner_up.model_copy(
        update={"predicted": predicted, "lost_by": why_lost(chosen, predicted)}
    )


def _compared(
    chosen: TrainPrediction, before: Alternative, now: Alternative, *, usual_s: float
) -> Alternative:
    """Scale a runner-up's ratio band by the change of its ratio."""
    if now.ratio_band is None or SLOW_LINKS in before.predicted.breakdown_s:
        return now
    moved = now.predicted.step_time_s / chosen.step_time_s
    moved /= before.predicted.step_time_s / usual_s
    low, high = now.ratio_band
    band = low * moved, high * moved
    return now.model_copy(update={"ratio_band": band, "within_band": is_tie(band)})


def _node_layout(sent: NodeTraffic) -> tuple[int, int, int]:
    """Layout of a decision on the nodes."""
    return sent.nodes_of_stage, sent.groups, sent.block


def _with_replacement(
    plan: Plan, replacement: Alternative, *, former_slow_s: float, slow_s: float
) -> Plan:
    """Swap the decision with a runner-up."""
    assert plan.decision is not None
    assert plan.predicted is not None
    former = plan.preferred
    fastest_s = plan.predicted.step_time_s if former is None else former.fastest_step_s
    lost = f"{format_s(slow_s)} a step lost to slow links, not {format_s(former_slow_s)}"
    former_slow = slowed(plan.predicted, former_slow_s)
    band = replacement.ratio_band and turned(
        replacement.ratio_band,
        before=replacement.predicted.step_time_s / plan.predicted.step_time_s,
        after=former_slow.step_time_s / (replacement.predicted.step_time_s + slow_s),
    )
    left = Alternative(
        decision=plan.decision,
        predicted=former_slow,
        within_band=replacement.within_band if band is None else is_tie(band),
        ratio_band=band,
        lost_by=f"slow links: {format_s(former_slow_s)}",
    )
    fastest = plan.decision if former is None else former.fastest
    riskier = _riskier(plan.predicted, replacement.predicted)
    preferred, gap_ratio = None, None
    if replacement.decision != fastest:
        preferred = Preference(
            fastest=fastest,
            fastest_step_s=fastest_s,
            slower_ratio=max(0.0, replacement.predicted.step_time_s / fastest_s - 1.0),
            reasons=(lost, *riskier),
        )
        bound_s = plan.certificate.bound or 0.0
        gap_ratio = max(0.0, 1.0 - bound_s / replacement.predicted.step_time_s)
    notes = _notes(plan, replacement)
    if preferred is None:
        notes.append(
            f"measured links: in place of {short_decision(plan.decision)}: "
            f"{', '.join((lost, *riskier))}"
        )
    known = _known_bands(plan)
    return plan.model_copy(
        update={
            "decision": replacement.decision,
            "predicted": replacement.predicted,
            "binding_constraint": _binding(plan, replacement),
            "provenance": plan.provenance.model_copy(update={"notes": tuple(notes)}),
            **by_layout(
                replacement.decision,
                (
                    left,
                    *(
                        _compare_with_replacement(plan, runner_up, replacement, known)
                        for runner_up in plan.runners_up
                        if runner_up is not replacement
                    ),
                ),
            ),
            "preferred": preferred,
            "certificate": plan.certificate.model_copy(update={"decision_gap_ratio": gap_ratio}),
        }
    )


def _riskier(before: TrainPrediction, now: TrainPrediction) -> tuple[str, ...]:
    """Note that the new decision is likelier to run out of memory."""
    was, chance = before.out_of_memory_probability, now.out_of_memory_probability
    if was is None or chance is None or memory_step(chance) <= memory_step(was):
        return ()
    return (
        f"though it has a {format_ratio(chance)} chance of running out of memory, not "
        f"{format_ratio(was)}",
    )


def _known_bands(plan: Plan) -> dict[bool, Band]:
    """Return bands of measured over predicted ratios by whether kernels are the same."""
    assert plan.decision is not None
    assert plan.predicted is not None
    known = {}
    for runner_up in plan.runners_up:
        if runner_up.ratio_band is not None:
            ratio = runner_up.predicted.step_time_s / plan.predicted.step_time_s
            low, high = runner_up.ratio_band
            known[has_same_kernels(plan.decision, runner_up.decision)] = low / ratio, high / ratio
    return known


def _compare_with_replacement(
    plan: Plan, runner_up: Alternative, replacement: Alternative, known: Mapping[bool, Band]
) -> Alternative:
    """Compare a runner-up with the replacement.

    If no pair of the plan has the band for two such decisions, use that of the runner-up and the
    replaced decision.
    """
    assert plan.decision is not None
    if runner_up.ratio_band is None:
        return runner_up
    was_same = has_same_kernels(plan.decision, runner_up.decision)
    is_same = has_same_kernels(replacement.decision, runner_up.decision)
    low, high = known.get(is_same, known[was_same])
    ratio = runner_up.predicted.step_time_s / replacement.predicted.step_time_s
    band = low * ratio, high * ratio
    return runner_up.model_copy(update={"ratio_band": band, "within_band": is_tie(band)})


def _binding(plan: Plan, replacement: Alternative) -> str:
    """Return the binding constraint of the new decision; a memory limit stays binding."""
    if plan.binding_constraint.startswith("memory_per_device"):
        return plan.binding_constraint
    return binding_constraint(
        replacement.predicted,
        fastest_s=replacement.predicted.step_time_s,
        unlimited_s=None,
        memory_limit_bytes=replacement.predicted.memory_limit_bytes or 0,
    )


def _notes(plan: Plan, replacement: Alternative) -> list[str]:
    """Return the plan's notes without those that apply to the replaced decision only."""
    decision, kept = replacement.decision, []
    for note in plan.provenance.notes:
        if note.startswith("gradient buckets of "):
            continue
        if note.startswith("overlapped all-to-all wants ") and not overlaps_contend(decision):
            continue
        kept.append(note)
    return kept


def _traffic(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction, pool: Pool
) -> NodeTraffic | None:
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
