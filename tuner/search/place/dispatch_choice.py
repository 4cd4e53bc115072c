"""Choice of the engine's dispatch rule, and a comparison with the others that it offers.

Rules are scored with whole tokens and fixed tables: the mean over draws of the largest rank loads
of passes of the planned size, under several tables of `static`. One is chosen among those that the
deployment allows, on the fit passes; the comparison that a plan prints is of the hold-out passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from solvers.placement.dispatch import launches
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import (
    PASS_BY_PASS,
    SPLITS,
    draw,
    split_of,
)
from solvers.placement.ranks import Floats, Placement
from tuner.engines.place_capabilities import PLACE_TARGETS
from tuner.engines.place_rules import (
    DispatchOffer,
    PlaceTarget,
    dispatch_offers,
    launch_backend,
    launch_misfit,
    rows_misfit,
    rule_run,
    same_loads,
)
from tuner.plans.place import DispatchOutcome, MadeFor
from tuner.search.place.cost import robust, robust_weights
from tuner.search.place.evaluation import evaluate, evaluate_loads, whole_tokens
from tuner.search.place.evidence import WorkloadEvidence, spread_passes
from tuner.spec.place import Dispatch
from tuner.spec.place_read import PlaceSpec
from tuner.units import format_ratio

DRAWS: Final = 16
"""Draws of a rule over all its passes, at least one per pass; the mean of 16 maxima is known to a
quarter of their spread. `static` has as many launches, so that each draw has a table of its own."""

MOST_PASSES: Final = 8
"""Fit passes that rules are chosen on: a linear program is solved for each."""

SIGNIFICANT_ERRORS: Final = 2.0
"""Standard errors of the mean difference by which a rule must win to replace the plan's."""

UNPRICED_RATIO: Final = 0.01
"""Gain in imbalance that a rule with a run-time cost must show beyond one without: two runs of one
configuration differ by as much (verdict.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchChoice:
    """The dispatch rule that a plan is solved for and evaluated under."""

    rule: str
    """The solvers' name."""
    notes: tuple[str, ...] = ()
    """Rules that were not scored, and why, one line each."""


def choose_dispatch(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], placement: Placement, *, planned: str
) -> DispatchChoice:
    """Choose among the rules of the first target of `emit` on the fit passes.

    The rule of the plan stays unless another one gains more than the sampling error. All ranks are
    assumed to send equally many tokens.

    Args:
        spec: with the goal's own rule, if it names one.
        evidence: every workload.
        placement: that the rules are scored on.
        planned: the rule it was solved for, which stays where the target offers no other.
    """
    offers = _offers(spec, placement)
    if not offers:
        return DispatchChoice(rule=planned)
    notes = tuple(
        f"dispatch {offer.name} was not scored: {refusal}"
        for offer, refusal in offers
        if refusal and offer.rule in PASS_BY_PASS
    )
    allowed = [offer for offer, refusal in offers if not refusal]
    start = next((one for one in allowed if one.rule == planned), allowed[0])
    if len(allowed) == 1:
        return DispatchChoice(rule=start.rule, notes=notes)

    def drawn(offer: DispatchOffer) -> list[Floats]:
        fit = [spread_passes(one.fit_PLE, MOST_PASSES) for one in evidence]
        return [_sampled_imbalance_D(spec, offer.rule, placement, load_PLE) for load_PLE in fit]

    kept, best, most = drawn(start), start, 0.0
    for offer in allowed:
        gain = _significant_gain(spec, evidence, kept, drawn(offer)) if offer is not start else 0.0
        gain -= UNPRICED_RATIO * (bool(offer.cost) - bool(start.cost))
        if gain > most:
            best, most = offer, gain
    return DispatchChoice(rule=best.rule, notes=notes)


def compared_dispatches(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, *, rule: str
) -> tuple[DispatchOutcome, ...]:
    """Compare the rules on the hold-out passes, the plan's own first.

    A linear program that the deployment does not allow is not solved.
    """
    offers = [
        (offer, refusal)
        for offer, refusal in _offers(spec, chosen)
        if not refusal or offer.rule not in PASS_BY_PASS
    ]
    best = next((at for at, (one, why) in enumerate(offers) if one.rule == rule and not why), None)
    if best is None:
        return ()
    by_offer = [_evaluate_offer(spec, evidence, chosen, offer) for offer, _ in offers]
    outcomes = [
        one.model_copy(
            update={
                "is_allowed": not why,
                "is_chosen": at == best,
                "words": _words(offer, one, by_offer[best], why, is_chosen=at == best),
            }
        )
        for at, ((offer, why), one) in enumerate(zip(offers, by_offer, strict=True))
    ]
    order = sorted(range(len(outcomes)), key=lambda at: (at != best, at))
    return tuple(outcomes[at] for at in order)


def allowed_rules(spec: PlaceSpec) -> tuple[str, ...]:
    """Return the dispatch rules that a plan may be made for, by the solvers' names."""
    return tuple(offer.rule for offer, refusal in _offers(spec) if not refusal)


def made_for(spec: PlaceSpec, rule: str) -> tuple[MadeFor, ...]:
    """Return the launch settings that the plan's emitted placements require, by target.

    Args:
        spec: what to plan.
        rule: that the plan was evaluated under, by the solvers' name.
    """
    nodes = -(-spec.goal.ranks // (spec.goal.ranks_per_node or spec.goal.ranks))
    has_no_replicas = spec.ranks.num_slots == spec.num_experts
    marks = []
    for name in dict.fromkeys(spec.emit):
        target = PLACE_TARGETS[name]
        dispatch, backend = _launch(spec, target, rule) if target.offers else ("", "")
        runs = rule_run(target, dispatch=dispatch, a2a_backend=backend)
        # A table of experts has no rule of its own: its reader runs what the goal names.
        is_named = spec.goal.dispatch is not None and target.dispatches is None
        is_evaluated = has_no_replicas or is_named or same_loads(rule, runs)
        marks.append(
            MadeFor(
                engine=name,
                release=target.release,
                nodes=nodes,
                ep_size=spec.goal.ranks,
                dispatch=dispatch,
                a2a_backend=backend,
                is_judged=is_evaluated,
            )
        )
    return tuple(marks)


def _launch(spec: PlaceSpec, target: PlaceTarget, rule: str) -> tuple[str, str]:
    """Return the dispatch rule and the backend that an engine with several rules is started with.

    For an even split, which the goal names or another target runs, `dynamic` without a backend has
    the same expected loads.
    """
    named = None if spec.goal.dispatch is None else spec.goal.dispatch.value
    # Without replicas all rules are the same: keep the engine's default.
    is_open = named is None and spec.ranks.num_slots == spec.num_experts
    like = rule if named is None and rule == "even" and not is_open else named
    backend = launch_backend(target, dispatch=like, a2a_backend=spec.goal.a2a_backend)
    beside = dispatch_offers(target, None, backend)
    same = [offer for offer in beside if offer.rule == rule and not is_open]
    nearest = [one for one in beside if one.name == ("dynamic" if like == "even" else like)]
    default = [one for one in beside if one.is_default]
    return (same + nearest + default)[0].name, backend


def launch_misfits(
    spec: PlaceSpec, placements: Mapping[str, Placement], rule: str
) -> dict[str, str]:
    """Return, by placement, why a target cannot be launched with it; empty: it can."""
    return {name: _launch_misfit(spec, one, rule) for name, one in placements.items()}


def _launch_misfit(spec: PlaceSpec, placement: Placement, rule: str) -> str:
    for mark in made_for(spec, rule):
        target = PLACE_TARGETS[mark.engine]
        for offer in dispatch_offers(target, mark.dispatch, mark.a2a_backend):
            misfit = rows_misfit(
                target, offer, placement.expert_LS.tolist(), ranks=spec.ranks.num_ranks
            )
            if misfit is not None:
                return misfit
    return ""


def _evaluate_offer(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, offer: DispatchOffer
) -> DispatchOutcome:
    moe = None if spec.model is None else spec.model.moe
    of_model = None if moe is None else moe.computed_top_k
    top_ks = [of_model or one.recording.top_k for one in evidence]
    counts_copies = None in top_ks
    expected, sampled, tokens, draws = [], [], [], []
    for one, top_k in zip(evidence, top_ks, strict=True):
        load_PLE = one.holdout_PLE
        given = evaluate(chosen, load_PLE=load_PLE, ranks=spec.ranks, dispatch=offer.rule)
        expected.append(given.imbalance)
        sampled_D = _sampled_imbalance_D(spec, offer.rule, chosen, load_PLE)
        sampled.append(float(sampled_D.mean()))
        draws.append(len(sampled_D))
        copies = float(load_PLE.sum(axis=2).mean() / spec.ranks.num_ranks)
        tokens.append(copies if counts_copies else copies / (top_k or 1))
    return DispatchOutcome(
        dispatch=offer.name,
        rule=offer.rule,
        has_backend=offer.has_backend,
        imbalance=robust(spec, evidence, expected),
        imbalance_sampled=robust(spec, evidence, sampled),
        counts_copies=counts_copies,
        tokens_per_rank=float(np.mean(tokens)),
        draws=min(draws),
        tables=DRAWS if offer.rule == Dispatch.STATIC.value else 1,
        is_allowed=False,
        is_chosen=False,
        words="",
    )


def _sampled_imbalance_D(
    spec: PlaceSpec, rule: str, placement: Placement, load_PLE: Floats
) -> Floats:
    """Return the imbalance of each draw, pass by pass, cycling through the fixed tables."""
    case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=spec.ranks)
    shares = split_of(rule)
    draws_a_pass = -(-DRAWS // len(case.load_PLE))
    rng = np.random.default_rng(0)
    fixed: list[Floats] = []
    if rule not in PASS_BY_PASS:
        first = replace(case, load_PLE=case.load_PLE[:1])
        is_static = rule == Dispatch.STATIC.value
        fixed = [*launches.splits(first, launches=DRAWS)] if is_static else [shares(first)]
    load_draws: list[Floats] = []
    for load_LE in case.load_PLE:
        one = replace(case, load_PLE=whole_tokens(load_LE[None]))
        splits = fixed or [shares(one)]
        for _ in range(draws_a_pass):
            load_draws.append(draw(one, splits[len(load_draws) % len(splits)], rng))
    return evaluate_loads(np.stack(load_draws), ranks=spec.ranks).imbalance_P


def _significant_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    kept: Sequence[Floats],
    other: Sequence[Floats],
) -> float:
    """Return a rule's gain over another one, less `SIGNIFICANT_ERRORS` standard errors.

    Draws are paired: the same passes in the same order.
    """
    values = [float(one_D.mean()) for one_D in kept]
    gains = [one_D - other_D for one_D, other_D in zip(kept, other, strict=True)]
    weights_W = robust_weights(spec, evidence, values)
    errors_W = np.array(
        [
            mean_error(gain_D, passes=min(MOST_PASSES, len(one.fit_PLE)))
            for one, gain_D in zip(evidence, gains, strict=True)
        ]
    )
    gain = float(weights_W @ np.array([gain_D.mean() for gain_D in gains]))
    return gain - SIGNIFICANT_ERRORS * float(np.linalg.norm(weights_W * errors_W))


def mean_error(value_D: Floats, *, passes: int) -> float:
    """Return the standard error of the mean of draws, equally many of each pass in order.

    Draws of one pass are correlated, so the means of passes are what counts; with a single pass
    only the spread of its draws is known.
    """
    value_P = value_D.reshape(passes, -1).mean(axis=1) if passes > 1 else value_D
    return float(value_P.std(ddof=1) / np.sqrt(len(value_P)))


def _offers(spec: PlaceSpec, placement: Placement | None = None) -> list[tuple[DispatchOffer, str]]:
    """Return the rules of the first target, each with why it is not allowed; empty: it is.

    Without a placement, as far as that is known before one exists. Nothing where all rules are the
    same: only an even split, or no replicas.
    """
    target = PLACE_TARGETS[next(iter(spec.emit), "eplb")]
    named = None if spec.goal.dispatch is None else spec.goal.dispatch.value
    compared, allowed = _compared(spec, target, named)
    if spec.ranks.num_slots == spec.num_experts:
        return []
    return [
        (
            offer,
            ""
            if named is not None
            else _refusal(spec, target, offer, placement, is_beside=offer in allowed),
        )
        for offer in compared
    ]


def _compared(
    spec: PlaceSpec, target: PlaceTarget, named: str | None
) -> tuple[tuple[DispatchOffer, ...], tuple[DispatchOffer, ...]]:
    """Return the rules to compare, and those that run with the deployment's backend."""
    if named == "even" or (named is None and not target.offers):
        return (), ()
    if not target.offers:
        known = named in SPLITS
        has_backend = named not in ("dynamic", None)
        single = DispatchOffer(name=named or "", rule=named or "", has_backend=has_backend)
        return ((single,), (single,)) if known else ((), ())
    backend = launch_backend(target, dispatch=named, a2a_backend=spec.goal.a2a_backend)
    allowed = dispatch_offers(target, named, backend)
    return (target.offers if named is None else allowed), allowed


def _refusal(
    spec: PlaceSpec,
    target: PlaceTarget,
    offer: DispatchOffer,
    placement: Placement | None,
    *,
    is_beside: bool,
) -> str:
    """Return why a deployment does not allow a rule; empty: it does."""
    if not is_beside:
        only = "an all-to-all backend" if offer.has_backend else "goal.a2a_backend: none"
        return f"needs {only}"
    misfit = launch_misfit(
        target,
        offer,
        architecture=None if spec.model is None else spec.model.architecture,
        pool=None if spec.cluster is None else spec.cluster.pools[0],
    )
    if misfit is not None:
        return misfit.words
    if placement is None:
        return ""
    rows = placement.expert_LS.tolist()
    return rows_misfit(target, offer, rows, ranks=spec.ranks.num_ranks) or ""


def _words(
    offer: DispatchOffer,
    one: DispatchOutcome,
    best: DispatchOutcome,
    refusal: str,
    *,
    is_chosen: bool,
) -> str:
    cost = f", and {offer.cost}" if offer.cost else ""
    if is_chosen:
        return "chosen" + cost
    change = one.imbalance_sampled / best.imbalance_sampled - 1.0
    costs = (
        f"largest rank load {format_ratio(abs(change))} {'higher' if change >= 0.0 else 'lower'}"
    )
    return costs + cost + (f"; {refusal}" if refusal else "")
