"""What is proven about a placement: the bound, layer by layer where it can be, and what binds.

W workloads   L layers   E experts
"""

from collections.abc import Sequence

from solvers.placement.balance.bound import layer_bounds
from solvers.placement.balance.check import layer_times, objective
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.place_plan import LayerOutcome, PlaceCertificate
from tuner.planner.place.candidates import TRAFFIC, balance_problem
from tuner.planner.place.costing import planned_cost, robust
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.pricing import Pricing
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec


def certificate_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    outcome: Outcome[Placement],
    pricing: Pricing | None,
    *,
    solve_s: float,
) -> PlaceCertificate:
    """State the objective and the bound on the loads that were planned from."""
    if spec.goal.objective in TRAFFIC:
        return PlaceCertificate(
            status=outcome.status.value,
            objective=outcome.objective,
            bound=outcome.bound,
            gap_ratio=outcome.gap_ratio,
            solve_s=solve_s,
            method=outcome.method,
        )
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks)
    layers = _layers(spec, problem, chosen)
    if spec.goal.objective is Objective.LAYER_TIME and pricing is not None:
        value = planned_cost(spec, evidence, chosen, pricing, Dispatch.EVEN.value)
        bounds = [
            pricing.bound_s(load_PLE=one.planned_LE[None], ranks=spec.ranks) for one in evidence
        ]
        least = min(value, robust(spec, evidence, bounds))
        return PlaceCertificate(
            status="feasible",
            objective=value,
            bound=least,
            gap_ratio=(value - least) / value,
            layers=layers,
            solve_s=solve_s,
            method=outcome.method,
        )
    value = objective(problem, chosen)
    least = min(outcome.bound, value)
    return PlaceCertificate(
        status=outcome.status.value,
        objective=value,
        bound=least,
        gap_ratio=(value - least) / value,
        layers=layers,
        solve_s=solve_s,
        method=outcome.method,
    )


def _layers(
    spec: PlaceSpec, problem: BalanceProblem, chosen: Placement
) -> tuple[LayerOutcome, ...]:
    """Return each layer's share of the mean imbalance, beside its bound."""
    scale_WL = problem.weight_W[:, None] / problem.mean_WL.sum(axis=1)[:, None]
    value_L = (scale_WL * layer_times(problem, chosen)).sum(axis=0)
    bound_L = (scale_WL * layer_bounds(problem)).sum(axis=0)
    return tuple(
        LayerOutcome(layer=layer, objective=float(value), bound=float(min(bound, value)))
        for layer, value, bound in zip(spec.layer_ids, value_L, bound_L, strict=True)
    )


def binding_constraint(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement
) -> str:
    """Say what keeps the busiest rank from doing less."""
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks)
    mean_WL, bound_WL = problem.mean_WL, layer_bounds(problem)
    value_WL = layer_times(problem, chosen)
    if spec.goal.objective in TRAFFIC:
        return "the largest load that EPLB's rule gives a rank of each layer"
    limit = spec.goal.max_moved_experts
    if limit is not None or spec.goal.max_moved_bytes is not None:
        return "the limit on moved experts"
    by_slots = bound_WL > mean_WL * (1.0 + 1e-9)
    if by_slots.any():
        workload, layer = divmod(int((bound_WL / mean_WL).argmax()), bound_WL.shape[1])
        load_E = problem.load_WLE[workload, layer]
        share = float(load_E.max() / load_E.sum())
        return (
            f"slots: in layer {spec.layer_ids[layer]} expert {int(load_E.argmax())} draws"
            f" {share:.1%} of {evidence[workload].name!r}, and {int(by_slots.sum())} of"
            f" {by_slots.size} layers cannot be even with {spec.ranks.num_slots} slots"
        )
    if len(evidence) > 1 and value_WL.sum() > 1.001 * bound_WL.sum():
        return "one placement serves several workloads, each of which alone could be more even"
    return "the mean load: no rank can have less than its share"
