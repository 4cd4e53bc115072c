"""The default method: local search from starts that suit the runtime's dispatch.

    L layers   W workloads   E experts   G ranks   S slots   N nodes   C placements found

Under an even split one start does (`local_search.py`). Where near replicas come first, the first
replica on a node serves the node, so that a second one there is of little use. Where far ranks are
assigned a replica once a launch, a rank's load is random, and the busiest of many is the unlucky
one. No deviation comes from an expert of one replica, nor from one on every node (on every rank,
where there is one node); hardly any from one that few tokens choose. A start therefore gives copies

 1. to the largest share, one by one, while it is above `ceiling` of a rank's mean;
 2. to the hottest of these, up to one a node, as long as slots are left;
 3. to the coldest experts, for slots have to be filled;

and packs them largest first, the copies of an expert on different nodes. The search then changes
it, on mean + caution * deviation of every rank, and every layer takes the start and caution that
end with the least expected time of its most-loaded rank (`objective.largest_times`, a guess). Of
that, EPLB's placement and the even split's, launches are drawn, and every layer takes the best
again. Where far ranks draw for each token (`ReplicaDispatch.NEAR`), nothing is assigned: starts are
copies of the largest shares up to one a node, EPLB's placement, one of the above, and copies that
leave few shares of which a rank takes one only (`fitting_copies`).

Loads are counts of some passes, and those of others scatter around them (`variance_WLE`): a rank
has a deviation of these, too, and last choices draw loads. A placement that is even on the counts
alone owes that to chance. On synthetic loads of which the search sees 16 or 64 passes this takes 0
to 0.5 % of the mean off the most-loaded rank on other passes, of 5 to 6 that counting leaves: what
is left is in the passes and not in the placement.

Proves the bound of `bound.py`. Where migration is limited, `migration.py` picks what to move.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from solvers.placement.balance.bound import bound, layer_bounds
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.local_search import MOST_STEPS, search
from solvers.placement.balance.lpt import packed
from solvers.placement.balance.migration import within_limit
from solvers.placement.balance.objective import (
    cost_of,
    largest_times,
    layer_weights,
    planning_loads,
    robust_slope,
    value_of,
)
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.balance.state import replica_groups
from solvers.placement.dispatch.launches import expected_shares, targets, users
from solvers.placement.ranks import Floats, Ints, Placement
from solvers.result import Claim, Status

CEILINGS: Final = (0.75, 0.95, 0.85)
"""Shares of a rank's mean above which an expert gets replicas; what is best differs by layer."""

CAUTIONS: Final = (2.0, 1.2)
"""Standard deviations above the mean that are kept even."""

LOADS_CAUTION: Final = 1.0
"""Standard deviations above the mean that are kept even where loads alone scatter; 0.5, 1 and 2
differ by no more than sets of layers do."""

SEARCH_RATIO: Final = 0.9
"""Share of the time limit for all searches; the rest is for the final selection."""

SMALL_SHARE: Final = 1.0 / 3.0
"""Share of a rank's mean load that a large expert exceeds. Replicating smaller ones does not lower
the number of ranks needed, so they get only leftover slots."""

SMALL_RATIO: Final = 3e-3
"""Share of the mean load by which one replica may exceed it before its weight is `ABOVE_MEAN`."""

ABOVE_MEAN: Final = 1e3
"""Weight, times the share, of a replica that exceeds a rank's mean load."""

LAUNCHES: Final = 16
SEED: Final = 20_231
"""Seed of the launches drawn for the final selection; the checker draws others."""

LOADS_STREAM: Final = 1
"""Random stream, beside the seed, that draws loads; independent of the launches' stream."""

CLAIM_SEED: Final = 20_232
"""Seed of the launches that the claimed objective averages; the checker draws its own to
compare."""

EVEN_RATIO: Final = 0.15
"""Share of the time limit for the search under even split, whose placement is one candidate."""


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best placement found in time, with the bound of `bound.py`."""
    look = search_near if problem.dispatch.is_near else search
    if problem.migration is None:
        placement = look(problem, time_limit_s=time_limit_s, threads=threads)
    else:
        placement = within_limit(
            problem,
            time_limit_s=time_limit_s,
            bound_WL=layer_bounds(problem),
            unlimited=lambda limit_s: look(problem, time_limit_s=limit_s, threads=threads),
        )
    value, error = claimed(problem, placement)
    return Claim(
        status=Status.FEASIBLE,
        solution=placement,
        bound=bound(problem),
        objective=value,
        objective_error=error,
    )


def claimed(problem: BalanceProblem, placement: Placement) -> tuple[float, float]:
    """Return the objective, and its standard error where launches are drawn for it."""
    if not problem.dispatch.is_near:
        return value_of(problem, largest_times(problem, placement.expert_LS)), 0.0
    # Other launches than those of the last choice, which the placement did well in.
    time_DWL = launched_times(problem, placement, seed=CLAIM_SEED)
    value_D = [value_of(problem, time_WL) for time_WL in time_DWL]
    launches = len(value_D)
    error = float(np.std(value_D, ddof=1)) / np.sqrt(launches) if launches > 1 else 0.0
    return value_of(problem, time_DWL.mean(axis=0)), error


def search_near(
    problem: BalanceProblem, *, time_limit_s: float, threads: int = 1, most_steps: int = MOST_STEPS
) -> Placement:
    """Return the best of the starts, layer by layer, or what another rule places, if better."""
    deadline_s = time.perf_counter() + SEARCH_RATIO * time_limit_s
    candidates: list[Placement] = []
    even = search(
        dataclasses.replace(problem, dispatch=ReplicaDispatch.EVEN, migration=None),
        time_limit_s=EVEN_RATIO * time_limit_s,
        threads=threads,
        most_steps=most_steps,
    )
    cautions = CAUTIONS if problem.dispatch is ReplicaDispatch.STATIC else (LOADS_CAUTION,)
    rule = eplb(planning_loads(problem), ranks=problem.ranks)
    starting: list[Callable[[], Placement]] = [
        partial(start_placement, problem, ceiling=ceiling) for ceiling in CEILINGS
    ]
    if problem.dispatch is ReplicaDispatch.NEAR:
        # Nothing is assigned: copies of the hottest experts make nothing worse, and a load that
        # many ranks share scatters least.
        starting = [
            partial(start_placement, problem, ceiling=0.0),
            partial(start_placement, problem, ceiling=None),
            lambda: rule,
            starting[1],
        ]
    runs = [(begin, caution) for caution in cautions for begin in starting]
    for number, (begin, caution) in enumerate(runs):
        left_s = deadline_s - time.perf_counter()
        if candidates and left_s <= 0.0:
            break
        candidates.append(
            search(
                problem,
                time_limit_s=max(left_s, 0.0) / (len(runs) - number),
                threads=threads,
                most_steps=most_steps,
                start=begin(),
                caution=caution,
            )
        )
    guessed_CWL = np.stack([largest_times(problem, one.expert_LS) for one in candidates])
    last = [best_layers(problem, candidates, guessed_CWL), even, rule]
    if problem.ranks.num_nodes == 1:
        # Ranks with the same draws share an assignment, which the estimate ignores.
        last += candidates
    drawn = [drawn_times(problem, one) for one in last]
    last.append(best_layers(problem, last, np.stack(drawn)))
    drawn.append(drawn_times(problem, last[-1]))
    return min(zip(last, drawn, strict=True), key=lambda one: value_of(problem, one[1]))[0]


def start_placement(problem: BalanceProblem, *, ceiling: float | None) -> Placement:
    """Return a packed start; several workloads count by their mean, and an expert is hot by any.

    Args:
        problem: to be placed.
        ceiling: of a rank's mean, above which an expert gets replicas; None: `fitting_copies`.
    """
    share_WLE = problem.load_WLE / problem.mean_WL[:, :, None]
    share_LE = share_WLE.max(axis=0)
    group_G = replica_groups(problem)
    spare, most = problem.ranks.num_slots - problem.num_experts, int(group_G.max()) + 1
    copies_LE = np.stack(
        [
            fitting_copies(share_E, spare=spare, most=most)
            if ceiling is None
            else _copies(share_E, spare=spare, most=most, ceiling=ceiling)
            for share_E in share_LE
        ]
    )
    mean_LE = np.einsum("w,wle->le", problem.weight_W, share_WLE)
    expert_LS = packed(mean_LE / copies_LE, copies_LE, problem.ranks, group_G=group_G)
    return Placement(expert_LS=expert_LS)


def drawn_times(
    problem: BalanceProblem, placement: Placement, *, seed: int = SEED, draws: int = LAUNCHES
) -> Floats:
    """Time of the most-loaded rank, [W][L], in the mean of some launches and of some loads.

    The guess takes ranks and assignments as independent, which few ranks on one node are not.

    Args:
        problem: where near replicas come first.
        placement: to be weighed.
        seed: of launches and of loads; by default the last choice's.
        draws: of both, each launch under loads of its own.
    """
    load_DWLE = drawn_loads(problem, draws, seed=seed)
    return np.asarray(_times(problem, placement, load_DWLE, seed=seed, launches=draws).mean(axis=0))


def launched_times(problem: BalanceProblem, placement: Placement, *, seed: int) -> Floats:
    """Time of the most-loaded rank in each of some launches under the planned loads, [D][W][L]."""
    return _times(problem, placement, problem.load_WLE[None], seed=seed, launches=LAUNCHES)


def _times(
    problem: BalanceProblem, placement: Placement, load_DWLE: Floats, *, seed: int, launches: int
) -> Floats:
    """Time of the most-loaded rank, [D][W][L], with a launch for each load, or one for all."""
    ranks = problem.ranks
    is_dealt = problem.dispatch is ReplicaDispatch.STATIC
    launches = max(len(load_DWLE), launches if is_dealt else 1)
    work_DWLG = np.zeros((launches, problem.num_workloads, problem.num_layers, ranks.num_ranks))
    is_single_LE = placement.copies_LE(problem.num_experts) == 1
    cost_DWLE = cost_of(load_DWLE, problem.active_load) * is_single_LE
    cost_DWLS = np.take_along_axis(cost_DWLE, placement.expert_LS[None, None], axis=3)
    work_DWLG += np.add.reduceat(cost_DWLS, ranks.first_slot_G, axis=3)
    if is_dealt:
        rng = np.random.default_rng(seed)
        for layer, expert, target_DH in targets(placement, ranks=ranks, rng=rng, launches=launches):
            users_DG = users(target_DH, ranks=ranks)
            load_DWG = users_DG[:, None] * load_DWLE[:, :, layer, expert, None]
            work_DWLG[:, :, layer] += cost_of(load_DWG, problem.active_load)
    else:
        for layer, expert, share_G in expected_shares(placement, ranks=ranks):
            load_DWG = share_G * load_DWLE[:, :, layer, expert, None]
            work_DWLG[:, :, layer] += cost_of(load_DWG, problem.active_load)
    return np.asarray((work_DWLG / ranks.speed_G).max(axis=3))


def drawn_loads(problem: BalanceProblem, draws: int, *, seed: int) -> Floats:
    """Return loads as other passes may have them, [D][W][L][E]; one where they are known."""
    if problem.variance_WLE is None:
        return problem.load_WLE[None]
    rng = np.random.default_rng((seed, LOADS_STREAM))
    change_DWLE = rng.standard_normal((draws, *problem.load_WLE.shape))
    return np.maximum(problem.load_WLE + change_DWLE * np.sqrt(problem.variance_WLE), 0.0)


def best_layers(
    problem: BalanceProblem, candidates: list[Placement], time_CWL: Floats
) -> Placement:
    """Join the placement of least time in each layer; workloads weigh as at the best whole one."""
    best = min(range(len(candidates)), key=lambda number: value_of(problem, time_CWL[number]))
    weight_W = layer_weights(problem)
    slope_W = robust_slope(problem, time_CWL[best].sum(axis=1) * weight_W) * weight_W
    chosen_L = np.einsum("w,cwl->cl", slope_W, time_CWL).argmin(axis=0)
    return Placement(
        expert_LS=np.stack(
            [candidates[chosen].expert_LS[layer] for layer, chosen in enumerate(chosen_L)]
        )
    )


def _copies(share_E: Floats, *, spare: int, most: int, ceiling: float) -> Ints:
    """Return the copies of every expert of a layer, `spare` more than experts."""
    copies_E = np.ones(len(share_E), dtype=np.int64)
    while spare:
        part_E = np.where(copies_E < most, share_E / copies_E, 0.0)
        hottest = int(part_E.argmax())
        if part_E[hottest] <= ceiling:
            break
        copies_E[hottest] += 1
        spare -= 1
    for expert in np.argsort(-share_E, kind="stable"):
        missing = most - copies_E[expert]
        if copies_E[expert] > 1 and missing <= spare:
            copies_E[expert] = most
            spare -= missing
    # More copies than groups only where every expert has one in each.
    while spare:
        coldest_E = np.lexsort((share_E, copies_E >= most))[:spare]
        copies_E[coldest_E] += 1
        spare -= len(coldest_E)
    return copies_E


def fitting_copies(share_E: Floats, *, spare: int, most: int) -> Ints:
    """Return the copies of every expert of a layer that need the fewest ranks for large shares.

    With few slots a rank is full of one large share and small ones, and what counts is how many
    large ones there are, not how large the largest is. Of shares above a half no two fit in a
    rank's mean, of those above a third no three: both counts, with 1/2 for a share from a third to
    two thirds, bound the ranks that are needed (dual feasible functions; Fekete and Schepers, Math.
    Programming 91(1), 2001). Their sum is least by dynamic programming over experts and spare
    slots, O(E most spare); slots that are left go to the coldest experts.
    """
    least_F = np.where(np.arange(spare + 1) == 0, 0.0, np.inf)
    large = np.flatnonzero(share_E > SMALL_SHARE)
    more_XF = np.zeros((len(large), spare + 1), dtype=np.int64)
    for row, share in enumerate(share_E[large].tolist()):
        found_F = least_F + _share_weight(share)
        for more in range(1, min(most - 1, spare) + 1):
            value_F = least_F[: spare + 1 - more] + (more + 1) * _share_weight(share / (more + 1))
            is_less_F = value_F < found_F[more:]
            found_F[more:][is_less_F] = value_F[is_less_F]
            more_XF[row, more:][is_less_F] = more
        least_F = found_F
    copies_E, used = np.ones(len(share_E), dtype=np.int64), int(least_F.argmin())
    left = spare - used
    for row, expert in reversed(list(enumerate(large.tolist()))):
        copies_E[expert] += more_XF[row, used]
        used -= int(more_XF[row, used])
    while left:
        coldest_E = np.lexsort((share_E, copies_E >= most))[:left]
        copies_E[coldest_E] += 1
        left -= len(coldest_E)
    return copies_E


def _share_weight(share: float) -> float:
    """Weight of one share of a rank's mean: how far it keeps others away."""
    if share > 1.0 + SMALL_RATIO:
        return ABOVE_MEAN * share
    return float(share > 1.0 / 2.0) + 0.5 * (share > 1.0 / 3.0) + 0.5 * (share > 2.0 / 3.0)
