"""The certificate of a placement: its bound, by layer where possible, and the binding constraint.

W workloads   L layers   G ranks   E experts
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np

from solvers.family import OPTIMALITY_TOLERANCE
from solvers.placement.balance.bound import certificates, layer_bounds
from solvers.placement.balance.check import layer_times, objective, standard_error
from solvers.placement.balance.migration import moved
from solvers.placement.balance.problem import BalanceProblem, Migration
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Placement
from solvers.result import Outcome
from tuner.plans.place import LayerOutcome, PlaceCertificate
from tuner.search.place.candidates import TRAFFIC, EplbBaseline, balance_problem, solved_dispatch
from tuner.search.place.cost import (
    fit_bound_WL,
    fit_seconds,
    robust,
    robust_weights,
)
from tuner.search.place.evidence import WorkloadEvidence, mean_load_LE
from tuner.search.place.links import LinkCosts
from tuner.search.place.passes import fit_imbalances, is_per_pass
from tuner.search.place.prices import Pricing
from tuner.search.place.traffic import placement_traffic, problem_scale
from tuner.search.place.transitions import Tokens
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec
from tuner.units import format_ratio

NEAR_RATIO = 0.98
"""Share of a load limit from which on it counts as binding: experts are indivisible."""

EVEN_ENOUGH = 1.001
"""Largest load over the mean that counts as even."""


def to_certificate(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    outcome: Outcome[Placement],
    baseline: EplbBaseline,
    pricing: Pricing | None,
    links: LinkCosts,
    *,
    dispatch: str,
    method: str,
    solve_s: float,
) -> PlaceCertificate:
    """State the objective and the bound on the fit passes.

    The objective is imbalance, seconds of all layers of a pass, or traffic per token, under the
    dispatch rule that splits tokens over replicas. It is that of the chosen placement, which need
    not be the solver's; only the solver's bound is used, which holds for every placement.
    """
    if spec.goal.objective in TRAFFIC:
        value = placement_traffic(spec, evidence, chosen, baseline, links, tokens=Tokens.FIT)
        scale = problem_scale(spec, evidence, baseline, links)
        return PlaceCertificate(
            **_proven(value, max(outcome.bound, 0.0) / scale), solve_s=solve_s, method=method
        )
    if spec.goal.objective is Objective.LAYER_TIME and pricing is not None:
        return _of_time(
            spec, evidence, chosen, pricing, dispatch=dispatch, method=method, solve_s=solve_s
        )
    if is_per_pass(dispatch):
        # Tokens or weights move pass by pass, so the mean load is the only bound.
        value = robust(
            spec, evidence, fit_imbalances(evidence, chosen, ranks=spec.ranks, dispatch=dispatch)
        )
        return PlaceCertificate(
            **_proven(value, 1.0), dispatch=dispatch, solve_s=solve_s, method=method
        )
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    return PlaceCertificate(
        **_proven(objective(problem, chosen), outcome.bound),
        objective_error=standard_error(problem, chosen),
        layers=_layers(spec, *certificates(problem, chosen)),
        dispatch=solved_dispatch(dispatch).value,
        solve_s=solve_s,
        method=method,
    )


def _of_time(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    pricing: Pricing,
    *,
    dispatch: str,
    method: str,
    solve_s: float,
) -> PlaceCertificate:
    priced = fit_seconds(spec, evidence, chosen, pricing, dispatch)
    value_WL = np.stack([one.layer_L for one in priced])
    bound_WL = fit_bound_WL(evidence, pricing, spec.ranks, dispatch)
    values, bounds = value_WL.sum(axis=1).tolist(), bound_WL.sum(axis=1).tolist()
    weights_W = robust_weights(spec, evidence, values)
    return PlaceCertificate(
        **_proven(robust(spec, evidence, values), robust(spec, evidence, bounds)),
        layers=_layers(spec, weights_W @ value_WL, weights_W @ bound_WL),
        dispatch=dispatch if is_per_pass(dispatch) else solved_dispatch(dispatch).value,
        solve_s=solve_s,
        method=method,
    )


class _Proven(TypedDict):
    status: Literal["optimal", "feasible"]
    objective: float
    bound: float
    gap_ratio: float


def _proven(value: float, bound: float) -> _Proven:
    least = min(bound, value)
    gap_ratio = (value - least) / value if value > 0.0 else 0.0
    return _Proven(
        status="optimal" if gap_ratio <= OPTIMALITY_TOLERANCE else "feasible",
        objective=value,
        bound=least,
        gap_ratio=gap_ratio,
    )


def _layers(
    spec: PlaceSpec, values_L: Sequence[float] | Floats, bounds_L: Sequence[float] | Floats
) -> tuple[LayerOutcome, ...]:
    return tuple(
        LayerOutcome(layer=layer, objective=float(value), bound=float(min(bound, value)))
        for layer, value, bound in zip(spec.layer_ids, values_L, bounds_L, strict=True)
    )


def binding_constraint(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    baseline: EplbBaseline,
    migration: Migration | None,
    *,
    dispatch: str,
) -> str:
    """Name what keeps the largest rank load, or the traffic, from being smaller."""
    if spec.goal.objective in TRAFFIC:
        return _binding_traffic(spec, evidence, chosen, baseline)
    # Two experts that change places are two moves.
    if (
        migration is not None
        and moved(migration.current, chosen, spec.ranks) > migration.most_moved - 2
    ):
        return "the limit on moved experts"
    if dispatch == Dispatch.LEAST_LOADED.value:
        return "the gate and the smallest chunk of the rule: less than that moves nothing"
    even = "the mean load: no rank can have less than its share"
    if dispatch in PASS_BY_PASS and _is_even_by_pass(spec, evidence, chosen, dispatch):
        return even
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    bound_WL = layer_bounds(problem)
    slots = _binding_slots(spec, evidence, problem, bound_WL)
    if slots or dispatch in PASS_BY_PASS:
        return slots or "whole experts in few slots, however a pass is split, as far as is proven"
    value_WL = layer_times(problem, chosen)
    if value_WL.sum() <= EVEN_ENOUGH * bound_WL.sum():
        return even
    if (
        spec.ranks.slots_G * spec.ranks.speed_G.sum() < spec.ranks.speed_G * problem.num_experts
    ).any():
        return "ranks with few slots for their speed, as far as is proven"
    if problem.dispatch.is_near:
        return "near replicas take what is sent near them, as far as is proven"
    if len(evidence) > 1:
        return "one placement serves several workloads, each of which alone could be more even"
    return "whole experts in few slots, as far as is proven"


def _is_even_by_pass(
    spec: PlaceSpec, evidence: tuple[WorkloadEvidence, ...], chosen: Placement, dispatch: str
) -> bool:
    values = fit_imbalances(evidence, chosen, ranks=spec.ranks, dispatch=dispatch)
    return max(values) <= EVEN_ENOUGH


def _binding_slots(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    problem: BalanceProblem,
    bound_WL: Floats,
) -> str:
    by_slots_L = (bound_WL > problem.mean_WL * (1.0 + 1e-9)).any(axis=0)
    if not by_slots_L.any():
        return ""
    workload, layer = divmod(int((bound_WL / problem.mean_WL).argmax()), bound_WL.shape[1])
    load_E = problem.load_WLE[workload, layer]
    share = float(load_E.max() / load_E.sum())
    return (
        f"slots: in layer {spec.layer_ids[layer]} expert {int(load_E.argmax())} draws"
        f" {format_ratio(share)} of {evidence[workload].name!r}, and {int(by_slots_L.sum())} of"
        f" {bound_WL.shape[1]} layers cannot be even with {spec.ranks.num_slots} slots"
    )


def _binding_traffic(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    baseline: EplbBaseline,
) -> str:
    load_LS = np.take_along_axis(mean_load_LE(evidence), chosen.expert_LS, axis=1)
    largest_L = np.add.reduceat(load_LS, spec.ranks.first_slot_G, axis=1).max(axis=1)
    limit_L = baseline.largest_L * (1.0 + spec.goal.traffic_slack_ratio)
    at_limit = int((largest_L >= NEAR_RATIO * limit_L).sum())
    if not at_limit:
        return "the slots of a rank: no more co-activated experts fit on one"
    slack = spec.goal.traffic_slack_ratio
    more = f", plus {format_ratio(slack, digits=0)}" if slack else ""
    return (
        f"the largest load that EPLB's rule gives a rank{more}: {at_limit} of {len(limit_L)} layers"
        " reach it"
    )
