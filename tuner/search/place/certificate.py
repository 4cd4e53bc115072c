"""The certificate of a placement: its bound, by layer where possible, and the binding constraint.

W workloads   L layers   G ranks   E experts
"""

from collections.abc import Sequence

import numpy as np

from solvers.family import OPTIMALITY_TOLERANCE
from solvers.placement.balance.bound import certificates, layer_bounds
from solvers.placement.balance.check import LAUNCH_SEED, objective, standard_error
from solvers.placement.balance.migration import moved
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Placement
from solvers.result import Outcome
from tuner.plans.place import LayerOutcome, PlaceCertificate
from tuner.search.place.cost import (
    evaluate_workload,
    fit_cost,
    robust,
    robust_weights,
    traffic_scale,
)
from tuner.search.place.evaluation import is_per_pass, scoring_passes
from tuner.search.place.evidence import Split, mean_load_LE
from tuner.search.place.problem import PlaceProblem, solved_dispatch, traffic_problem
from tuner.spec.place import Dispatch, Objective
from tuner.units import format_ratio

NEAR_RATIO = 0.98
"""Share of a load limit from which on it counts as binding: experts are indivisible."""

EVEN_ENOUGH = 1.001
"""Largest load over the mean that counts as even."""


def to_certificate(
    problem: PlaceProblem, chosen: Placement, outcome: Outcome[Placement], *, method: str
) -> PlaceCertificate:
    """State the objective and the bound on the fit passes.

    The objective is imbalance, seconds of all layers of a pass, or traffic per token, under the
    dispatch rule that splits tokens over replicas. It is that of the chosen placement, which need
    not be the solver's; only the solver's bound is used, which holds for every placement. It
    also holds for a rule that was chosen after the solver ran: traffic depends on no rule, and the
    bound of loads (solvers/placement/balance/bound.py, without `active_load`) on how many copies
    of an expert there are, whatever share of its tokens each one gets.
    """
    spec, dispatch, error = problem.spec, problem.dispatch, 0.0
    layers: tuple[Sequence[float] | Floats, Sequence[float] | Floats] = (), ()
    is_split_by_pass = is_per_pass(dispatch)
    if spec.goal.is_about_traffic:
        value = fit_cost(problem, chosen)
        bound = max(outcome.bound, 0.0) / traffic_scale(problem, traffic_problem(problem))
    elif spec.goal.objective is Objective.LAYER_TIME:
        value, bound, layers = _of_time(problem, chosen)
    elif is_split_by_pass:
        # Tokens or weights move pass by pass, so the mean load is the only bound.
        value, bound = fit_cost(problem, chosen), 1.0
    else:
        stated = problem.balance()
        value, bound = objective(stated, chosen), outcome.bound
        error = standard_error(stated, chosen)
        layers = certificates(stated, chosen)
    least = min(bound, value)
    gap_ratio = (value - least) / value if value > 0.0 else 0.0
    rule = dispatch if is_split_by_pass else solved_dispatch(dispatch).value
    return PlaceCertificate(
        status="optimal" if gap_ratio <= OPTIMALITY_TOLERANCE else "feasible",
        objective=value,
        bound=least,
        gap_ratio=gap_ratio,
        objective_error=error,
        layers=tuple(
            LayerOutcome(layer=layer, objective=float(cost), bound=float(min(low, cost)))
            for layer, cost, low in zip(spec.layer_ids, *layers, strict=False)
        ),
        dispatch="even" if spec.goal.is_about_traffic else rule,
        solve_s=problem.deadline.elapsed_s,
        method=method,
    )


def _of_time(
    problem: PlaceProblem, chosen: Placement
) -> tuple[float, float, tuple[Floats, Floats]]:
    """Return seconds on the fit passes and their bound, in all and by layer."""
    values, bounds = [], []
    for workload in problem.evidence:
        cost = evaluate_workload(problem, workload, chosen, split=Split.FIT, seed=LAUNCH_SEED)
        assert cost.seconds is not None
        assert problem.pricing is not None
        values.append(cost.seconds.layer_L)
        load_PLE = scoring_passes(workload, problem.dispatch)
        bound_X = problem.pricing.bound_L(
            load_LE=load_PLE.reshape(-1, load_PLE.shape[2]), ranks=problem.spec.ranks
        )
        bounds.append(bound_X.reshape(load_PLE.shape[:2]).mean(axis=0))
    value_WL, bound_WL = np.stack(values), np.stack(bounds)
    totals = value_WL.sum(axis=1).tolist()
    weights_W = robust_weights(problem, totals)
    by_layer = weights_W @ value_WL, weights_W @ bound_WL
    return robust(problem, totals), robust(problem, bound_WL.sum(axis=1).tolist()), by_layer


def binding_constraint(problem: PlaceProblem, chosen: Placement) -> str:
    """Name what keeps the largest rank load, or the traffic, from being smaller."""
    spec, dispatch, migration = problem.spec, problem.dispatch, problem.migration
    if spec.goal.is_about_traffic:
        return _binding_traffic(problem, chosen)
    # Two experts that change places are two moves.
    limit = None if migration is None else migration.most_moved - 2
    if limit is not None and moved(spec.current, chosen, spec.ranks) > limit:
        return "the limit on moved experts"
    if dispatch == Dispatch.LEAST_LOADED.value:
        return "the gate and the smallest chunk of the rule: less than that moves nothing"
    costs = [
        evaluate_workload(problem, workload, chosen, split=Split.FIT)
        for workload in problem.evidence
    ]
    if max(cost.loads.imbalance for cost in costs) <= EVEN_ENOUGH:
        return "the mean load: no rank can have less than its share"
    slots = _binding_slots(problem)
    if slots:
        return slots
    if problem.balance().dispatch.is_near and dispatch not in PASS_BY_PASS:
        return "near replicas take what is sent near them, as far as is proven"
    if len(problem.evidence) > 1:
        return "one placement serves several workloads, each of which alone could be more even"
    return "whole experts in few slots, as far as is proven"


def _binding_slots(problem: PlaceProblem) -> str:
    stated, spec = problem.balance(), problem.spec
    over_WL = layer_bounds(stated) / stated.mean_WL
    by_slots_L = (over_WL > 1.0 + 1e-9).any(axis=0)
    if not by_slots_L.any():
        return ""
    workload, layer = divmod(int(over_WL.argmax()), over_WL.shape[1])
    load_E = stated.load_WLE[workload, layer]
    share = float(load_E.max() / load_E.sum())
    return (
        f"slots: in layer {spec.layer_ids[layer]} expert {int(load_E.argmax())} draws"
        f" {format_ratio(share)} of {problem.evidence[workload].name!r}, and"
        f" {int(by_slots_L.sum())} of {over_WL.shape[1]} layers cannot be even with"
        f" {spec.ranks.num_slots} slots"
    )


def _binding_traffic(problem: PlaceProblem, chosen: Placement) -> str:
    ranks, slack = problem.spec.ranks, problem.spec.goal.traffic_slack_ratio
    load_LS = np.take_along_axis(mean_load_LE(problem.evidence), chosen.expert_LS, axis=1)
    largest_L = np.add.reduceat(load_LS, ranks.first_slot_G, axis=1).max(axis=1)
    limit_L = problem.baseline.largest_L * (1.0 + slack)
    at_limit = int((largest_L >= NEAR_RATIO * limit_L).sum())
    if not at_limit:
        return "the slots of a rank: no more co-activated experts fit on one"
    more = f", plus {format_ratio(slack, digits=0)}" if slack else ""
    return (
        f"the largest load that EPLB's rule gives a rank{more}: {at_limit} of {len(limit_L)} layers"
        " reach it"
    )
