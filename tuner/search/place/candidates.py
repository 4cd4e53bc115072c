"""Candidate placements: the current one, EPLB's policies, and the objective's solver.

    W workloads   L layers   E experts   M = L - 1 pairs of layers   G ranks

EPLB is given the mean load of the workloads, as an engine that adds up its counters would; the
better of its two policies on the fit passes is the EPLB baseline of every comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from solvers.placement.balance.check import CHOICE_SEED, layer_times
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem, Migration, ReplicaDispatch, Robust
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.registry import BALANCE
from solvers.result import Outcome
from tuner.errors import SpecError
from tuner.search.place.evidence import (
    WorkloadEvidence,
    load_WLE,
    mean_load_LE,
    weight_W,
)
from tuner.search.place.links import LinkCosts
from tuner.search.place.methods import TrafficProblem, solve_balance, solve_traffic
from tuner.search.place.passes import fit_imbalances, is_per_pass
from tuner.search.place.token_levels import link_levels
from tuner.search.place.transitions import Tokens, flow_MEE
from tuner.spec.place import Objective, PlaceGoal, TrafficObjective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

TRAFFIC = (Objective.CO_ACTIVATION, Objective.LAYER_CHAIN)
"""Objectives about traffic; they place every expert once, and cap a rank's load at EPLB's."""

MOST_STATED: Final = 2
"""Traffic problems that are cached: the plan's, used for each candidate, and one more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EplbBaseline:
    """The better of EPLB's policies."""

    placement: Placement
    name: str
    largest_L: Floats
    """Load of the most-loaded rank, at the mean load."""


def balance_problem(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    dispatch: str,
    active_load: float = 0.0,
    migration: Migration | None = None,
) -> BalanceProblem:
    """Build the balance problem of some workloads under a dispatch rule."""
    return BalanceProblem(
        load_WLE=load_WLE(evidence),
        weight_W=weight_W(evidence),
        ranks=ranks,
        robust=Robust(goal.robust.value),
        tail_ratio=goal.tail_ratio,
        active_load=active_load,
        migration=migration,
        dispatch=solved_dispatch(dispatch),
    )


def solved_dispatch(rule: str) -> ReplicaDispatch:
    """Return the rule that a search places for, given a rule of the solvers' sampling.py.

    The expected loads of a draw per token are those of an even split, with near replicas or
    without. The linear program re-splits each pass, which a search does not model: it is searched
    as an even split, which is no bound, and scored by the program itself (cost.py).
    """
    if rule == ReplicaDispatch.STATIC.value:
        return ReplicaDispatch.STATIC
    return ReplicaDispatch.NEAR if rule.startswith("near_") else ReplicaDispatch.EVEN


def eplb_baseline(
    evidence: Sequence[WorkloadEvidence],
    *,
    ranks: Ranks,
    groups: int | None,
    dispatch: str = ReplicaDispatch.EVEN.value,
) -> EplbBaseline:
    """Place by EPLB's policies on the mean load and keep the better one under a dispatch rule.

    Under a rule that acts pass by pass they are compared on the fit passes.
    """
    mean_LE = mean_load_LE(evidence)
    rules = policies(mean_LE, ranks=ranks, groups=groups)
    mean = BalanceProblem(
        load_WLE=mean_LE[None],
        weight_W=np.ones(1),
        ranks=ranks,
        dispatch=solved_dispatch(dispatch),
    )
    largest = {
        name: layer_times(mean, placement, seed=CHOICE_SEED)[0] for name, placement in rules.items()
    }
    values = {name: float(largest_L.sum()) for name, largest_L in largest.items()}
    if len(rules) > 1 and is_per_pass(dispatch):
        values = {
            name: float(
                weight_W(evidence)
                @ fit_imbalances(evidence, placement, ranks=ranks, dispatch=dispatch)
            )
            for name, placement in rules.items()
        }
    best = min(values, key=lambda name: values[name])
    return EplbBaseline(placement=rules[best], name=best, largest_L=largest[best])


def policies(mean_LE: Floats, *, ranks: Ranks, groups: int | None) -> dict[str, Placement]:
    """Place by EPLB's policies, by name; the hierarchical one where it applies."""
    placements = {"eplb": eplb(mean_LE, ranks=ranks)}
    is_uniform = (ranks.slots_G == ranks.slots_G[0]).all()
    if groups is not None and is_uniform and groups % ranks.num_nodes == 0 and ranks.num_nodes > 1:
        placements["eplb hierarchical"] = eplb(mean_LE, ranks=ranks, num_groups=groups)
    return placements


@lru_cache(maxsize=MOST_STATED)
def node_local_replicas(
    evidence: tuple[WorkloadEvidence, ...], *, goal: PlaceGoal, ranks: Ranks, dispatch: str
) -> Mapping[str, Placement]:
    """Place all replicas of an expert on one node, a candidate for a linear program.

    Such replicas are near only to the ranks that hold them, so the program steers all other tokens.
    EPLB's hierarchical policy with each expert as a group of its own places them so. For the
    balance of loads it stands beside EPLB's policies alone: a search models an even split only and
    overfits the few passes that programs are solved for (1.106 against 1.104 times the mean load on
    hold-out passes of six drawn recordings, EPLB's better policy 1.116). Layer time also counts
    weight reads and the all-to-all, so there the placements found stay candidates.
    """
    experts = evidence[0].recording.num_experts
    is_uniform = (ranks.slots_G == ranks.slots_G[0]).all() and experts % ranks.num_nodes == 0
    limited = goal.max_moved_experts is not None or goal.max_moved_bytes is not None
    free = goal.objective not in TRAFFIC and goal.method is Method.AUTO and not limited
    if dispatch != "near_lp" or ranks.num_nodes == 1 or not (is_uniform and free):
        return {}
    return {"replicas on one node": eplb(mean_load_LE(evidence), ranks=ranks, num_groups=experts)}


def solve_objective(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    baseline: EplbBaseline,
    dispatch: str,
    links: LinkCosts,
    active_load: float,
    migration: Migration | None,
    time_limit_s: float,
) -> Outcome[Placement]:
    """Place for the goal's objective under a dispatch rule.

    Args:
        evidence: the workloads.
        goal: with the method.
        ranks: that hold the slots.
        baseline: EPLB's placement.
        dispatch: the dispatch rule.
        links: that traffic is priced on.
        active_load: cost of reading an expert's weights, in token copies.
        migration: the limit on moved experts.
        time_limit_s: of the whole solve.

    Raises:
        SpecError: the recordings lack what the objective needs, experts are replicated where it
            takes single ones only, or the goal's method cannot take the problem.
    """
    if goal.objective in TRAFFIC:
        return solve_traffic(
            traffic_problem(
                tuple(evidence), goal=goal, ranks=ranks, baseline=baseline, links=links
            ),
            goal=goal,
            eplb_placement=baseline.placement,
            time_limit_s=time_limit_s,
        )
    problem = balance_problem(
        evidence,
        goal=goal,
        ranks=ranks,
        dispatch=dispatch,
        active_load=active_load,
        migration=migration,
    )
    return solve_balance(
        problem, goal=goal, eplb_placement=baseline.placement, time_limit_s=time_limit_s
    )


def layer_time_candidates(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    baseline: EplbBaseline,
    dispatch: str,
    links: LinkCosts,
    migration: Migration | None,
    time_limit_s: float,
) -> dict[str, Placement]:
    """Return candidates that the search for layer time misses, by name.

    The search models token copies and weight reads. Where the all-to-all dominates, the balance of
    copies alone counts; where a token is sent once per rank and domain, the number of ranks does.
    """
    experts = evidence[0].recording.num_experts
    candidates = {}
    is_merged = (
        goal.is_merged
        and migration is None
        and ranks.num_slots == experts
        and all(one.fit_LTK is not None for one in evidence)
    )
    limit_s = time_limit_s / (2.0 if is_merged else 1.0)
    problem = balance_problem(
        evidence, goal=goal, ranks=ranks, dispatch=dispatch, migration=migration
    )
    balanced = BALANCE.solve(problem, time_limit_s=limit_s)
    if balanced.solution is not None:
        candidates["balance of copies"] = balanced.solution
    if is_merged:
        together = traffic_problem(
            tuple(evidence), goal=goal, ranks=ranks, baseline=baseline, links=links
        )
        solved = solve_traffic(
            together, goal=goal, eplb_placement=baseline.placement, time_limit_s=limit_s
        )
        if solved.solution is not None:
            candidates["co-activation"] = solved.solution
    return candidates


@lru_cache(maxsize=MOST_STATED)
def traffic_problem(
    evidence: tuple[WorkloadEvidence, ...],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> TrafficProblem:
    """Build the problem of the fit tokens of weighted workloads.

    A chain has each workload's transitions as shares of its tokens, co-activation as many sampled
    tokens as its weight says.
    """
    _refuse_replicas(goal, ranks, evidence)
    weights = weight_W(evidence)
    if goal.objective is Objective.LAYER_CHAIN:
        flows = [flow_MEE(one, Tokens.FIT) for one in evidence]
        sample = np.einsum("w,wmef->mef", weights, np.stack(flows))
    else:
        samples = [fit_tokens(one) for one in evidence]
        # The smallest sample relative to its weight sets the number of tokens.
        most = min(each.shape[1] / w for each, w in zip(samples, weights, strict=True))
        sample = np.concatenate(
            [each[:, : max(1, int(most * w))] for each, w in zip(samples, weights, strict=True)],
            axis=1,
        )
    return sampled_problem(sample, evidence, goal=goal, ranks=ranks, baseline=baseline, links=links)


def fit_tokens(one: WorkloadEvidence) -> Ints:
    """Return the sampled tokens of a workload that co-activation is planned from.

    Raises:
        SpecError: the recording holds none.
    """
    if one.fit_LTK is None:
        raise SpecError(
            f"goal.workloads: {one.name!r} holds no sampled tokens, which objective"
            " co_activation is about; record it with `moetune profile --suite routing`"
        )
    return one.fit_LTK


def sampled_problem(
    sample: Floats | Ints,
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> TrafficProblem:
    """Build the problem of given transitions [M][E][E], or of given tokens [L][T][K]."""
    is_peak = goal.traffic is TrafficObjective.MOST_LOADED
    load_LE = mean_load_LE(evidence)
    most_load_L = baseline.largest_L * (1.0 + goal.traffic_slack_ratio)
    if goal.objective is Objective.LAYER_CHAIN:
        return ChainProblem(
            flow_TEE=sample.astype(np.float64),
            load_LE=load_LE,
            ranks=ranks,
            cost_GG=links.cost_GG.copy(),
            most_load_L=most_load_L,
            measure=Measure.MOST_LOADED_PAIR if is_peak else Measure.TOTAL,
        )
    return CoactivationProblem(
        expert_LTK=sample.astype(np.int64),
        load_LE=load_LE,
        ranks=ranks,
        levels=link_levels(links, is_peak=is_peak),
        most_load_L=most_load_L,
    )


def _refuse_replicas(goal: PlaceGoal, ranks: Ranks, evidence: Sequence[WorkloadEvidence]) -> None:
    experts = evidence[0].recording.num_experts
    if ranks.num_slots != experts:
        raise SpecError(
            f"goal.objective: {goal.objective.value} places every expert once, and"
            f" {ranks.num_slots} slots hold {experts} experts; set redundant_experts to 0, or plan"
            " for balance or layer_time"
        )


def migration_limit(spec: PlaceSpec, *, expert_bytes: float | None) -> Migration | None:
    """Return the goal's limit on moved experts, None without one.

    Raises:
        SpecError: bytes without the size of an expert, or an objective that keeps no limit.
    """
    goal = spec.goal
    limits = [] if goal.max_moved_experts is None else [goal.max_moved_experts]
    if goal.max_moved_bytes is not None:
        if expert_bytes is None:
            raise SpecError("goal.max_moved_bytes: needs model, to size an expert")
        limits.append(int(goal.max_moved_bytes // expert_bytes))
    if not limits:
        return None
    if goal.objective in TRAFFIC:
        raise SpecError(
            f"goal.objective: {goal.objective.value} keeps no limit on moved experts; plan for"
            " balance or layer_time, or drop the limit"
        )
    return Migration(current=spec.current, most_moved=min(limits))
