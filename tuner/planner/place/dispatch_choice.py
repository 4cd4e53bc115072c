"""Which dispatch rule the emitted engine should run: those that it offers, on judged passes.

A rule is judged by the largest rank loads that it expects, and by what whole tokens and fixed
choices make of them: the mean over draws of the largest loads of passes of the planned size, under
several tables of `static`. The least of the latter is chosen among the rules
that the deployment allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import (
    PASS_BY_PASS,
    SPLITS,
    draw,
    expected_loads,
    splits_of,
)
from solvers.placement.dispatch.static import ENGINE_SEED
from solvers.placement.ranks import Floats, Placement
from tuner.place_plan import DispatchOutcome, MadeFor
from tuner.planner.place.comparing import sources_of
from tuner.planner.place.costing import robust
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import whole_tokens
from tuner.spec.place_read import PlaceSpec
from tuner.spec.place_targets import (
    PLACE_TARGETS,
    DispatchOffer,
    PlaceTarget,
    backend_of,
    launch_misfit,
    offered,
)

DRAWS: Final = 16
"""Of each rule over its passes; the mean of 16 maxima is known to a quarter of their spread."""

SEEDS: Final = 4
"""Of `static`, the engine's own first: a recording seldom has all layers that its stream runs over,
so that no single table is sure to be the engine's, and none is hunted for."""

MOST_PASSES: Final = 4
"""Judged passes that rules are compared on: a linear program is solved for each."""

UNPRICED_RATIO: Final = 0.01
"""What a rule with a cost of its own at run time must save beyond one without: two runs of one
configuration differ by as much (verdict.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchChoice:
    """The rule that a plan is judged under, and the comparison that chose it."""

    rule: str
    """By the solvers' name."""
    outcomes: tuple[DispatchOutcome, ...]
    """The chosen rule first; empty where nothing was to be compared."""


def choose_dispatch(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, *, planned: str
) -> DispatchChoice:
    """Compare the rules of the first target of `emit` on a placement.

    Args:
        spec: with the goal's own rule, if it names one.
        evidence: every workload.
        chosen: the placement.
        planned: the rule that it was planned for, which stays where the target offers no other.
    """
    target = PLACE_TARGETS[next(iter(spec.emit), "eplb")]
    named = None if spec.goal.dispatch is None else spec.goal.dispatch.value
    compared, allowed = _compared(spec, target, named)
    if not compared or spec.ranks.num_slots == spec.num_experts:
        # Without replicas every rule does the same.
        return DispatchChoice(rule=planned, outcomes=())
    judged = [_judged(spec, evidence, chosen, offer) for offer in compared]
    against = [
        "" if named is not None else _against(spec, target, offer, is_beside=offer in allowed)
        for offer in compared
    ]
    best = min(
        (at for at, why in enumerate(against) if not why),
        key=lambda at: judged[at].imbalance_sampled + UNPRICED_RATIO * bool(compared[at].cost),
    )
    outcomes = [
        one.model_copy(
            update={
                "is_allowed": not why,
                "is_chosen": at == best,
                "words": _words(offer, one, judged[best], why, is_chosen=at == best),
            }
        )
        for at, (offer, one, why) in enumerate(zip(compared, judged, against, strict=True))
    ]
    order = sorted(range(len(outcomes)), key=lambda at: (at != best, at))
    return DispatchChoice(rule=compared[best].rule, outcomes=tuple(outcomes[at] for at in order))


def made_for(spec: PlaceSpec, choice: DispatchChoice) -> tuple[MadeFor, ...]:
    """Return what the plan's emitted placements are tied to, by target."""
    nodes = -(-spec.goal.ranks // (spec.goal.ranks_per_node or spec.goal.ranks))
    named = None if spec.goal.dispatch is None else spec.goal.dispatch.value
    marks = []
    for name in dict.fromkeys(spec.emit):
        target = PLACE_TARGETS[name]
        dispatch, backend = "", ""
        if target.offers:
            backend = backend_of(target, dispatch=named, a2a_backend=spec.goal.a2a_backend)
            beside = offered(target, None, backend)
            same = [offer for offer in beside if offer.rule == choice.rule]
            # Of an even split `dynamic` is the nearest.
            like = "dynamic" if named == "even" else named
            others = [one for one in beside if one.name == like] + [
                one for one in beside if one.is_default
            ]
            dispatch = (same + others)[0].name
        marks.append(
            MadeFor(
                engine=name,
                release=target.release,
                nodes=nodes,
                ep_size=spec.goal.ranks,
                dispatch=dispatch,
                a2a_backend=backend,
            )
        )
    return tuple(marks)


def _judged(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, offer: DispatchOffer
) -> DispatchOutcome:
    expected, sampled, tokens = [], [], []
    for one in evidence:
        load_PLE = _spread_over(one.judged_PLE)
        case = DispatchCase(
            load_PLE=load_PLE,
            placement=chosen,
            ranks=spec.ranks,
            source_HLE=sources_of(spec, one),
            seed=ENGINE_SEED,
        )
        expected.append(_imbalance(spec, expected_loads(offer.rule, case)))
        sampled.append(_imbalance(spec, _sampled(offer.rule, case)))
        top_k = one.recording.top_k or (
            spec.model.moe.top_k if spec.model is not None and spec.model.moe is not None else 1
        )
        tokens.append(float(load_PLE.sum(axis=2).mean() / top_k / spec.ranks.num_ranks))
    return DispatchOutcome(
        dispatch=offer.name,
        rule=offer.rule,
        has_backend=offer.has_backend,
        imbalance=robust(spec, evidence, expected),
        imbalance_sampled=robust(spec, evidence, sampled),
        tokens_per_rank=float(np.mean(tokens)),
        draws=DRAWS,
        is_allowed=False,
        is_chosen=False,
        words="",
    )


def _sampled(rule: str, case: DispatchCase) -> Floats:
    """Return the loads of several draws of each pass, under several fixed choices in turn."""
    shares = splits_of(rule)[1]
    draws_a_pass = -(-DRAWS // len(case.load_PLE))
    rng = np.random.default_rng(0)
    fixed: list[Floats] = []
    if rule not in PASS_BY_PASS:
        seeds = range(SEEDS) if rule == "static" else range(1)
        first = replace(case, load_PLE=case.load_PLE[:1])
        fixed = [shares(replace(first, seed=ENGINE_SEED + seed)) for seed in seeds]
    found = []
    for load_LE in case.load_PLE:
        one = replace(case, load_PLE=whole_tokens(load_LE[None]))
        splits = fixed or [shares(one)]
        found += [draw(one, splits[at % len(splits)], rng) for at in range(draws_a_pass)]
    return np.stack(found)


def _spread_over(load_PLE: Floats) -> Floats:
    """Return a few passes from the first to the last."""
    if len(load_PLE) <= MOST_PASSES:
        return load_PLE
    return load_PLE[np.linspace(0, len(load_PLE) - 1, MOST_PASSES).round().astype(np.int64)]


def _imbalance(spec: PlaceSpec, load_PLG: Floats) -> float:
    largest_PL = (load_PLG / spec.ranks.speed_G).max(axis=2)
    mean_PL = load_PLG.sum(axis=2) / spec.ranks.speed_G.sum()
    return float((largest_PL.sum(axis=1) / mean_PL.sum(axis=1)).mean())


def _compared(
    spec: PlaceSpec, target: PlaceTarget, named: str | None
) -> tuple[tuple[DispatchOffer, ...], tuple[DispatchOffer, ...]]:
    """Return the rules to judge, and those of them that run beside the deployment's backend."""
    if named == "even" or (named is None and not target.offers):
        return (), ()
    if not target.offers:
        known = named in SPLITS
        has_backend = named not in ("dynamic", None)
        alone = DispatchOffer(name=named or "", rule=named or "", has_backend=has_backend)
        return ((alone,), (alone,)) if known else ((), ())
    backend = backend_of(target, dispatch=named, a2a_backend=spec.goal.a2a_backend)
    allowed = offered(target, named, backend)
    return (target.offers if named is None else allowed), allowed


def _against(spec: PlaceSpec, target: PlaceTarget, offer: DispatchOffer, *, is_beside: bool) -> str:
    """Return why a deployment does not allow a rule that it did not name; empty: it does."""
    if not is_beside:
        only = "an all-to-all backend" if offer.has_backend else "goal.a2a_backend: none"
        return f"needs {only}"
    misfit = launch_misfit(
        target,
        offer,
        architecture=None if spec.model is None else spec.model.architecture,
        device=None if spec.cluster is None else spec.cluster.pools[0].device,
    )
    return "" if misfit is None else misfit.words


def _words(
    offer: DispatchOffer,
    one: DispatchOutcome,
    best: DispatchOutcome,
    against: str,
    *,
    is_chosen: bool,
) -> str:
    cost = f", and {offer.cost}" if offer.cost else ""
    if is_chosen:
        return "chosen" + cost
    change = one.imbalance_sampled / best.imbalance_sampled - 1.0
    costs = f"the busiest ranks do {abs(change):.1%} {'more' if change >= 0.0 else 'less'}"
    return costs + cost + (f"; {against}" if against else "")
