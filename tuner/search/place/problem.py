"""A placement's spec with its evidence, the problems that solvers are given, and their methods.

    W workloads   L layers   E experts   M = L - 1 pairs of layers   G ranks   J groups of a level

EPLB is given the mean load of the workloads, as an engine that adds up its counters would; the
better of its two policies on the fit passes is the EPLB baseline of every comparison.

Co-activation counts the domains and ranks that a token's experts touch. Tokens start evenly on all
ranks; a token is sent once to each domain that it needs, then once to each rank that it needs
there. So a copy into group j of a level costs the mean over the ranks s that it may come from

    domain j    1 / G * sum over s outside j of the mean of cost(s, g) over g in j
    rank j      sum over s of its domain of cost(s, j), over the ranks of the domain

which is 0 from j itself. So a slow link makes both of its endpoints more expensive. With
`busiest` the group that receives most counts instead of all, as in HierMoE's padded two-hop
all-to-all.

All published methods are behind one interface: `auto` takes the default of the objective's family.
A method that the goal names decides the plan, even if EPLB's placement or today's is better.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from solvers.family import Family
from solvers.placement.balance.bound import bound as balance_bound
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem, Migration, ReplicaDispatch, Robust
from solvers.placement.chain.bound import lower_bound as chain_bound
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.registry import BALANCE, CHAIN, COACTIVATION
from solvers.result import Claim, Outcome, Status
from tuner.errors import SpecError
from tuner.search.place.evaluation import evaluate, scoring_passes
from tuner.search.place.evidence import Split, WorkloadEvidence, mean_load_LE, weight_W
from tuner.search.place.links import LinkCosts
from tuner.search.place.prices import Pricing
from tuner.search.settings import Deadline
from tuner.spec.place import Objective, TrafficObjective
from tuner.spec.place_method import Method
from tuner.spec.place_spec import PlaceSpec

TrafficProblem = ChainProblem | CoactivationProblem
"""Problem of an objective about traffic: every expert once, and rank loads capped near EPLB's."""

FAMILIES: Final[Mapping[type, Family[Any, Placement]]] = {
    BalanceProblem: BALANCE,
    ChainProblem: CHAIN,
    CoactivationProblem: COACTIVATION,
}

MOST_PAIRINGS: Final = 8_000
"""Variables of MoETuner's second program: 4 ranks, the paper's, in 32 layers. CBC orders those in
30 s (tests/benchmarks/placement_chain.py), and of 9,072 (6 ranks in 8 layers) it found no order in
8 s, of 28,672 none in 12 s."""
BOUND_RATIO: Final = 0.3
"""Share of the time limit for the bound of EPLB's placement."""

BOUNDS: Final[Mapping[type, Callable[[Any, float], float]]] = {
    BalanceProblem: lambda problem, _limit_s: balance_bound(problem),
    ChainProblem: lambda problem, limit_s: chain_bound(problem, time_limit_s=limit_s),
    CoactivationProblem: lambda problem, _limit_s: float(lower_bound_L(problem).sum()),
}
"""Lower bounds by type of problem, for a placement that no solver made."""

MOST_STATED: Final = 4
"""Baselines and traffic problems that are cached: the plan's, used for each candidate, and those
of one fold."""

LEAST_WEIGHT: Final = 1e-6
"""Weight of a group that costs nothing to reach, relative to the others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EplbBaseline:
    """The better of EPLB's policies."""

    placement: Placement
    name: str
    largest_L: Floats
    """Load of the most-loaded rank, at the mean load."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceProblem:
    """The spec with everything that is known before a search."""

    spec: PlaceSpec
    evidence: tuple[WorkloadEvidence, ...]
    pricing: Pricing | None
    links: LinkCosts
    migration: Migration | None
    deadline: Deadline
    dispatch: str
    """The dispatch rule, by the solvers' name."""

    @property
    def baseline(self) -> EplbBaseline:
        """EPLB's placement for the evidence under the rule."""
        return eplb_baseline(
            self.evidence,
            ranks=self.spec.ranks,
            groups=self.spec.goal.expert_groups,
            dispatch=self.dispatch,
        )

    def balance(self, *, dispatch: str | None = None, active_load: float = 0.0) -> BalanceProblem:
        """Build the balance problem under the rule, or another one."""
        goal, ranks = self.spec.goal, self.spec.ranks
        # Without replicas every dispatch rule is an even split.
        is_single = ranks.num_slots == self.spec.num_experts
        rule = solved_dispatch(dispatch or self.dispatch)
        return BalanceProblem(
            load_WLE=np.stack([workload.fit_LE for workload in self.evidence]),
            weight_W=weight_W(self.evidence),
            ranks=ranks,
            robust=Robust(goal.robust.value),
            tail_ratio=goal.tail_ratio,
            active_load=active_load,
            migration=self.migration,
            dispatch=ReplicaDispatch.EVEN if is_single else rule,
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


@lru_cache(maxsize=MOST_STATED)
def eplb_baseline(
    evidence: tuple[WorkloadEvidence, ...],
    *,
    ranks: Ranks,
    groups: int | None,
    dispatch: str = ReplicaDispatch.EVEN.value,
) -> EplbBaseline:
    """Place by EPLB's policies on the mean load; keep the better one under a rule on fit passes."""
    mean_LE = mean_load_LE(evidence)
    placements = {"eplb": eplb(mean_LE, ranks=ranks)}
    is_uniform = (ranks.slots_G == ranks.slots_G[0]).all()
    if groups is not None and is_uniform and groups % ranks.num_nodes == 0 and ranks.num_nodes > 1:
        placements["eplb hierarchical"] = eplb(mean_LE, ranks=ranks, num_groups=groups)

    def imbalance(name: str) -> float:
        passes = [scoring_passes(workload, dispatch) for workload in evidence]
        values = [
            evaluate(placements[name], load_PLE=load_PLE, ranks=ranks, dispatch=dispatch).imbalance
            for load_PLE in passes
        ]
        return float(np.dot(weight_W(evidence), values))

    best = min(placements, key=imbalance) if len(placements) > 1 else "eplb"
    even = evaluate(placements[best], load_PLE=mean_LE[None], ranks=ranks, dispatch="even")
    largest_L = (even.copies_PLG[0] / ranks.speed_G).max(axis=1)
    return EplbBaseline(placement=placements[best], name=best, largest_L=largest_L)


@lru_cache(maxsize=MOST_STATED)
def traffic_problem(problem: PlaceProblem) -> TrafficProblem:
    """Build the problem of the fit tokens of weighted workloads.

    A chain has each workload's transitions as shares of its tokens, co-activation as many sampled
    tokens as its weight says.

    Raises:
        SpecError: the recordings lack what the objective needs, or experts are replicated.
    """
    spec, evidence = problem.spec, problem.evidence
    if spec.ranks.num_slots != spec.num_experts:
        raise SpecError(
            f"goal.objective: {spec.goal.objective.value} places every expert once, and"
            f" {spec.ranks.num_slots} slots hold {spec.num_experts} experts; set redundant_experts"
            " to 0, or plan for balance or layer_time"
        )
    weights = weight_W(evidence)
    if spec.goal.objective is Objective.LAYER_CHAIN:
        flows = np.stack([workload.flow_MEE(Split.FIT) for workload in evidence])
        return sampled_problem(problem, np.einsum("w,wmef->mef", weights, flows))
    samples = [workload.token_LTK(Split.FIT) for workload in evidence]
    # The smallest sample relative to its weight sets the number of tokens.
    total_tokens = min(sample.shape[1] / w for sample, w in zip(samples, weights, strict=True))
    parts = [
        sample[:, : max(1, int(total_tokens * w))]
        for sample, w in zip(samples, weights, strict=True)
    ]
    return sampled_problem(problem, np.concatenate(parts, axis=1))


def sampled_problem(problem: PlaceProblem, sample: Floats | Ints) -> TrafficProblem:
    """Build the problem of given transitions [M][E][E], or of given tokens [L][T][K]."""
    goal, ranks, links = problem.spec.goal, problem.spec.ranks, problem.links
    is_peak = goal.traffic is TrafficObjective.MOST_LOADED
    load_LE = mean_load_LE(problem.evidence)
    most_load_L = problem.baseline.largest_L * (1.0 + goal.traffic_slack_ratio)
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


def link_levels(links: LinkCosts, *, is_peak: bool) -> tuple[Level, ...]:
    """Return domains and ranks with what a token copy to each costs, relative as `links` are."""
    domain_G, cost_GG = links.domain_G, links.cost_GG
    rank_G = np.arange(len(domain_G), dtype=np.int64)
    in_domain_JG = domain_G == np.arange(int(domain_G.max()) + 1)[:, None]
    to_JG = np.stack([cost_GG[:, is_in_G].mean(axis=1) for is_in_G in in_domain_JG])
    same_GG = domain_G[:, None] == domain_G
    costs = (
        (domain_G, np.where(in_domain_JG, 0.0, to_JG).sum(axis=1) / len(domain_G)),
        (rank_G, np.where(same_GG, cost_GG, 0.0).sum(axis=0) / same_GG.sum(axis=0)),
    )
    levels = []
    for group_G, cost_J in costs:
        usual = float(np.median(cost_J)) or float(cost_J.max())
        if usual > 0.0:
            weight_J = np.maximum(cost_J / usual, LEAST_WEIGHT)
            level = Level(
                group_G=group_G.copy(),
                total_cost=0.0 if is_peak else usual,
                peak_cost=usual if is_peak else 0.0,
                weight_J=None if np.allclose(weight_J, 1.0, rtol=1e-9) else weight_J,
            )
            levels.append(level)
    # One rank: every placement costs the same, but a level is required.
    return tuple(levels) or (Level(group_G=rank_G, total_cost=0.0),)


def migration_limit(spec: PlaceSpec, *, expert_bytes: float | None) -> Migration | None:
    """Return the goal's limit on moved experts, None without one.

    Raises:
        SpecError: an objective that supports no limit.
    """
    goal = spec.goal
    limits = [] if goal.max_moved_experts is None else [goal.max_moved_experts]
    if goal.max_moved_bytes is not None and expert_bytes is not None:
        limits.append(int(goal.max_moved_bytes // expert_bytes))
    if limits and goal.is_about_traffic:
        raise SpecError(
            f"goal.objective: {goal.objective.value} supports no limit on moved experts; plan for"
            " balance or layer_time, or drop the limit"
        )
    return Migration(current=spec.current, most_moved=min(limits)) if limits else None


def solve(problem: PlaceProblem, *, time_limit_s: float) -> Outcome[Placement]:
    """Place by the goal's method for its objective and the problem's dispatch rule.

    Raises:
        SpecError: the recordings lack what the objective needs, experts are replicated where it
            takes single ones only, or the method cannot take the problem.
    """
    goal, pricing = problem.spec.goal, problem.pricing
    method = goal.method
    is_time = goal.objective is Objective.LAYER_TIME and pricing is not None
    stated: BalanceProblem | TrafficProblem
    if goal.is_about_traffic:
        stated = traffic_problem(problem)
    else:
        stated = problem.balance(active_load=pricing.active_load if is_time and pricing else 0.0)
    if isinstance(stated, ChainProblem) and method is Method.MOETUNER:
        _refuse_pairings(stated)
    family = FAMILIES[type(stated)]
    if method is not Method.EPLB:
        name = None if method is Method.AUTO else method.value
        return family.solve(stated, method=name, time_limit_s=time_limit_s)
    if problem.migration is not None:
        raise SpecError(
            "goal.method: eplb supports no limit on moved experts; drop the limit, or take auto"
        )
    placement = problem.baseline.placement
    least = BOUNDS[type(stated)](stated, BOUND_RATIO * time_limit_s)
    least = min(least, family.check.objective(stated, placement))
    claim = Claim(status=Status.FEASIBLE, solution=placement, bound=least)
    return family.checked(stated, claim, method=method.value, solve_s=0.0)


def _refuse_pairings(problem: ChainProblem) -> None:
    ranks = problem.ranks.num_ranks
    pairings = (problem.num_layers - 1) * ranks**4
    if pairings > MOST_PAIRINGS:
        raise SpecError(
            f"goal.method: moetuner pairs {ranks} clusters with {ranks} ranks in"
            f" {problem.num_layers} layers by {pairings:,} variables, and {MOST_PAIRINGS:,} are its"
            " limit; take auto or local_search"
        )
