"""The dispatch rule that an engine applies: planned for, chosen on fit passes, and emitted.

A plan begins with a draw per token where the engine offers several rules, and takes another one
where the same evaluator shows it to be better on the same placement. Those that a deployment does
not allow, and a runtime without the rule that no engine has, are compared likewise.
"""

from collections.abc import Sequence
from typing import Final

from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from tuner.catalog.place_rules import (
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
from tuner.search.place.cost import evaluate_workload, robust
from tuner.search.place.evaluation import MOST_SOLVED, evaluate
from tuner.search.place.evidence import spread_passes, weight_W
from tuner.search.place.problem import PlaceProblem
from tuner.spec.place import Dispatch
from tuner.spec.place_spec import PlaceSpec
from tuner.units import format_ratio

UNPRICED_RATIO: Final = 0.01
"""Share of the objective that another rule must save to replace the plan's: two runs of one
configuration differ by as much (verdict.py), and run-time costs of rules are not counted."""

_KNOBS: Final = LeastLoaded()

OFFERS_BESIDE: Final = (
    DispatchOffer(
        name="least_loaded",
        rule="least_loaded",
        has_backend=False,
        cost="a runtime of its own, as no engine that is written for has the rule: what a rank has"
        " beyond the mean goes to idle ranks with a copy of the expert's weights (LLEP: pieces of"
        f" {_KNOBS.min_chunk_tokens:,.0f} token copies or more, where the most-loaded rank has"
        f" {_KNOBS.gate_ratio:g} times the mean)",
    ),
    DispatchOffer(name="dynamic", rule="dynamic", has_backend=False),
)
"""The rule of no engine, and what runs without it."""


def planned_dispatch(spec: PlaceSpec) -> str:
    """Return the dispatch rule that a plan is solved for, by the solvers' name.

    The goal's rule, as the first target runs it with the deployment's backend. If the goal names
    none and several are offered, a draw per token: no load-blind rule has lower expected loads,
    fixed tables only vary around them. Otherwise the target's own rule.
    """
    target, named = spec.main_target, _named(spec)
    if target.offers and named != "even":
        backend = launch_backend(target, dispatch=named, a2a_backend=spec.goal.a2a_backend)
        offers = dispatch_offers(target, named, backend)
        return next((offer for offer in offers if offer.name == "dynamic"), offers[0]).rule
    return named or target.default_dispatch


def choose_dispatch(problem: PlaceProblem, placement: Placement) -> tuple[str, tuple[str, ...]]:
    """Choose among the rules of the first target of `emit` on the fit passes.

    The rule of the problem stays unless another one saves more than `UNPRICED_RATIO`.

    Returns:
        The rule, and those that were not scored with the reason, a line each.
    """
    offers = offers_of(problem.spec, placement)
    notes = tuple(
        f"dispatch {offer.name} was not scored: {refusal}"
        for offer, refusal in offers
        if refusal and offer.rule in PASS_BY_PASS
    )
    allowed = [offer.rule for offer, refusal in offers if not refusal]
    if problem.dispatch not in allowed or len(allowed) == 1:
        return (allowed or [problem.dispatch])[0], notes
    # A rule that acts on the counts of each pass is compared on passes, as all are.
    passes = [spread_passes(workload.fit_PLE, MOST_SOLVED) for workload in problem.evidence]
    ranks = problem.spec.ranks

    def imbalance(rule: str) -> float:
        outcomes = (
            evaluate(placement, load_PLE=load_PLE, ranks=ranks, dispatch=rule)
            for load_PLE in passes
        )
        return robust(problem, [outcome.imbalance for outcome in outcomes])

    values = {rule: imbalance(rule) for rule in allowed}
    best = min(allowed, key=lambda rule: values[rule])
    is_better = values[best] < (1.0 - UNPRICED_RATIO) * values[problem.dispatch]
    return best if is_better else problem.dispatch, notes


def compared_dispatches(problem: PlaceProblem, chosen: Placement) -> tuple[DispatchOutcome, ...]:
    """Compare the rules on the hold-out passes, the plan's own first.

    A linear program that the deployment does not allow is not solved.
    """
    offers = [
        (offer, refusal)
        for offer, refusal in offers_of(problem.spec, chosen)
        if not refusal or offer.rule not in PASS_BY_PASS
    ]
    offers.sort(key=lambda pair: bool(pair[1]) or pair[0].rule != problem.dispatch)
    outcomes: list[DispatchOutcome] = []
    for offer, refusal in offers:
        costs = [
            evaluate_workload(problem, workload, chosen, dispatch=offer.rule)
            for workload in problem.evidence
        ]
        seconds = [float(cost.seconds.pass_P.mean()) for cost in costs if cost.seconds is not None]
        imbalance = robust(problem, [cost.loads.imbalance for cost in costs])
        words = "chosen"
        if outcomes:
            change = imbalance / outcomes[0].imbalance - 1.0
            more = "higher" if change >= 0.0 else "lower"
            words = f"largest rank load {format_ratio(abs(change))} {more}"
        words += f", and {offer.cost}" if offer.cost else ""
        outcome = DispatchOutcome(
            dispatch=offer.name,
            rule=offer.rule,
            has_backend=offer.has_backend,
            imbalance=imbalance,
            layer_time_s=float(weight_W(problem.evidence) @ seconds) if seconds else None,
            words=words + (f"; {refusal}" if refusal else ""),
        )
        outcomes.append(outcome)
    return tuple(outcomes)


def made_for(spec: PlaceSpec, rule: str) -> tuple[MadeFor, ...]:
    """Return the launch settings that the plan's emitted placements require, by target.

    Args:
        spec: what to plan.
        rule: that the plan was evaluated under, by the solvers' name.
    """
    nodes = -(-spec.goal.ranks // (spec.goal.ranks_per_node or spec.goal.ranks))
    marks = []
    for name, target in spec.targets.items():
        dispatch, backend = _launch(spec, target, rule) if target.offers else ("", "")
        runs = rule_run(target, dispatch=dispatch, a2a_backend=backend)
        # A table of experts has no rule of its own: its reader runs what the goal names.
        is_named = spec.goal.dispatch is not None and target.dispatches is None
        mark = MadeFor(
            engine=name,
            release=target.release,
            nodes=nodes,
            ep_size=spec.goal.ranks,
            dispatch=dispatch,
            a2a_backend=backend,
            is_judged=_has_no_replicas(spec) or is_named or same_loads(rule, runs),
        )
        marks.append(mark)
    return tuple(marks)


def _launch(spec: PlaceSpec, target: PlaceTarget, rule: str) -> tuple[str, str]:
    """Return the dispatch rule and the backend that an engine with several rules is started with.

    For an even split, which the goal names or another target runs, `dynamic` without a backend has
    the same expected loads. Without replicas all rules are the same: the engine's default stays.
    """
    named = _named(spec)
    is_open = named is None and _has_no_replicas(spec)
    like = rule if named is None and rule == "even" and not is_open else named
    backend = launch_backend(target, dispatch=like, a2a_backend=spec.goal.a2a_backend)
    beside = dispatch_offers(target, None, backend)
    same = [offer for offer in beside if offer.rule == rule and not is_open]
    nearest = [offer for offer in beside if offer.name == ("dynamic" if like == "even" else like)]
    default = [offer for offer in beside if offer.is_default]
    return (same + nearest + default)[0].name, backend


def launch_refusal(problem: PlaceProblem, placement: Placement) -> str:
    """Return why the first target cannot run the rule with a placement; empty: it can."""
    offers = offers_of(problem.spec, placement)
    return next((refusal for offer, refusal in offers if offer.rule == problem.dispatch), "")


def offers_of(
    spec: PlaceSpec, placement: Placement | None = None
) -> Sequence[tuple[DispatchOffer, str]]:
    """Return the rules of the first target, each with why it is not allowed; empty: it is.

    Without a placement, as far as that is known before one exists. Nothing where all rules are the
    same: only an even split, or no replicas.
    """
    target, named = spec.main_target, _named(spec)
    if named == Dispatch.LEAST_LOADED.value:
        return [(OFFERS_BESIDE[0], ""), (OFFERS_BESIDE[1], "what engines run without it")]
    if named == "even" or not target.offers or _has_no_replicas(spec):
        return []
    backend = launch_backend(target, dispatch=named, a2a_backend=spec.goal.a2a_backend)
    beside = dispatch_offers(target, named, backend)
    offers = []
    for offer in target.offers if named is None else beside:
        # A rule that the goal names was checked with its spec.
        misfit = launch_misfit(
            target,
            offer,
            architecture=None if spec.model is None else spec.model.architecture,
            pool=None if spec.cluster is None else spec.cluster.pools[0],
        )
        refusal = "" if misfit is None or named is not None else misfit.words
        if offer not in beside:
            only = "an all-to-all backend" if offer.has_backend else "goal.a2a_backend: none"
            refusal = f"needs {only}"
        if not refusal and placement is not None:
            rows = placement.expert_LS.tolist()
            refusal = rows_misfit(target, offer, rows, ranks=spec.ranks.num_ranks) or ""
        offers.append((offer, refusal))
    return offers


def _named(spec: PlaceSpec) -> str | None:
    return None if spec.goal.dispatch is None else spec.goal.dispatch.value


def _has_no_replicas(spec: PlaceSpec) -> bool:
    return spec.ranks.num_slots == spec.num_experts
