"""Solves one mode: an integer program chooses instances, a simulation adds spare capacity.

A mode is one problem, or where long prompts are offloaded one for each length threshold, of which
the one with the least objective that meets the targets counts (modes/prefill_offload.py). The bound
of several problems is the least of theirs, at the goal's own spare capacity: no threshold of the
grid and no instances do better, whatever queueing requires on top.

Instances of a role are of one kind where requests are spread round robin. Where the stack's router
follows load (routers.py), the program may use several kinds too, if these would cost less before
queueing, and they are simulated behind that router.

Where queueing breaks a target, the program is solved with more spare capacity until it holds: of
prefill instances where only TTFT is missed, of the others where TPOT is; bisection then finds the
least of both that suffices. As an alternative, instances whose own latency is close to the target
are left out, in case fast ones need less spare capacity.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, get_args

from solvers.result import Status
from tuner.catalog.serve_rules.rules import is_disaggregated
from tuner.config.serve import Role
from tuner.costs.serve.decoder import decoder_of
from tuner.search.serve.cells import solve_cells
from tuner.search.serve.demand import Demand, HitsByRanks, PrefixHits, build_demand, with_hits
from tuner.search.serve.instances import goal_formats
from tuner.search.serve.islands import island_layouts, island_shares, prefixes_kept
from tuner.search.serve.kv_transfers import KvTransfers, build_kv_transfers
from tuner.search.serve.launchable import launchable_options
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import ServingPool
from tuner.search.serve.problem import ModeSolution, ServeProblem, restrict_problem
from tuner.search.serve.program import (
    BOUND_TOLERANCE,
    SolvedProgram,
    Spare,
    build_program,
    serving_instances,
    solve_program,
)
from tuner.search.serve.recorded_loads import expert_loads
from tuner.search.serve.routers import (
    RouterChoice,
    has_sessions,
    loses_prefixes,
    router_choices,
    stated_hits,
)
from tuner.search.serve.simulation import (
    PER_RANK,
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    corrected_result,
    mix_results,
    per_rank,
)
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.spec import ServeSpec

MOST_SPARE: Final = 4.0
"""Largest spare capacity that is tried, as a share of the traffic's rate."""
FIRST_SPARE: Final = 0.25
TIGHTER_RATIOS: Final = (0.7, 0.45)
"""Largest shares of a target that an instance's own latency may take, tried in turn where queueing
breaks the target."""
MOST_SIMULATED: Final = 3
"""Thresholds of a mode that are simulated: the best by their programs."""
PREFIX_ROUNDS: Final = 4
"""Times that hits are lowered by the number of instances; the last time to none."""
KEPT_TOLERANCE: Final = 0.02
"""Relative difference within which the hits that are left agree with the instances."""
HIT_DIGITS: Final = 4
"""Decimals of the share of prompt tokens in prefix caches that a plan states."""
SPARE_STEPS: Final = 4
"""Halvings of the interval in which the least spare capacity lies."""


def build_serve_problem(
    spec: ServeSpec,
    serving_pools: tuple[ServingPool, ...],
    settings: SearchSettings,
    *,
    hits: PrefixHits | None = None,
    hits_by_ranks: HitsByRanks | None = None,
    demand: Demand | None = None,
) -> ServeProblem:
    """Read the traffic and price every instance option.

    Args:
        spec: of the deployment.
        serving_pools: its pools.
        settings: limits of the search.
        hits: what prefix caches hold of recorded prompts; the problem's traffic then states it.
        hits_by_ranks: the same by instance, where it depends on the attention-data ranks.
        demand: of the same traffic, where it was read before.

    Raises:
        SpecError: the traffic, a recorded routing or its placement cannot be used.
    """
    if hits is not None:
        spec = _at_hit(spec, round(hits.ratio, HIT_DIGITS))
    decoder, formats = decoder_of(spec.model), goal_formats(spec.goal, spec.model)
    longest = min(spec.goal.max_model_len or spec.model.max_position, spec.model.max_position)
    demand = build_demand(spec.goal, longest=longest) if demand is None else demand
    if hits is None:
        hits_by_ranks = stated_hits(spec.goal, spec.emit, releases=spec.releases.values())
    else:
        demand = with_hits(demand, hits)
    demand = replace(demand, hits_by_ranks=hits_by_ranks)
    modes = {name: load_mode(name) for name in get_args(Mode) if name in spec.goal.modes}
    roles = tuple(dict.fromkeys(role for mode in modes.values() for role in mode.priced_roles))
    loads = expert_loads(spec.goal, spec.model)
    options = launchable_options(
        spec,
        serving_pools,
        decoder=decoder,
        formats=formats,
        demand=demand,
        roles=roles,
        loads=loads,
    )
    problem = ServeProblem(
        spec=spec,
        serving_pools=serving_pools,
        demand=demand,
        options=options,
        kv_transfers=build_kv_transfers(
            spec, input_tokens=demand.input_tokens, options=options.options
        ),
        decoder=decoder,
        formats=formats,
        settings=settings,
        loads=loads,
        hits=hits,
    )
    own_options = {name: mode.price(problem) for name, mode in modes.items() if mode.price}
    unshared = [
        option
        for priced in own_options.values()
        for option in (*priced.options, *priced.refused_units)
    ]
    kv_transfers = (
        build_kv_transfers(
            spec, input_tokens=demand.input_tokens, options=(*options.options, *unshared)
        )
        if unshared
        else problem.kv_transfers
    )
    return replace(problem, own_options=own_options, kv_transfers=kv_transfers)


def with_stated_hits(problem: ServeProblem, hits: PrefixHits) -> ServeProblem:
    """Return the problem with hits of recorded prompts as those that its traffic states."""
    spec = _at_hit(problem.spec, round(hits.ratio, HIT_DIGITS))
    return replace(problem, spec=spec, hits=hits, demand=with_hits(problem.demand, hits))


def _at_hit(spec: ServeSpec, hit: float) -> ServeSpec:
    traffic = spec.goal.traffic.model_copy(update={"prefix_hit": hit})
    return replace(spec, goal=spec.goal.model_copy(update={"traffic": traffic}))


def solve_with_remaining_hits(
    problem: ServeProblem, mode: Mode, solve_once: Callable[[ServeProblem], ModeSolution | None]
) -> ModeSolution | None:
    """Solve a mode with the prefix hits that remain behind a router that is not cache-aware.

    That may be the router of the instances, or the one in front of islands. A solution without
    islands keeps the hits of islands, which are fewer than its own.

    Hits of recorded prompts are counted behind their router (prefix_reuse.py).

    Args:
        problem: of the mode.
        mode: to solve.
        solve_once: solves a problem with its own hits.
    """
    solution = solve_once(problem)
    goal = problem.spec.goal
    is_counted = problem.hits is not None
    loses = loses_prefixes(
        goal,
        problem.spec.emit,
        is_disaggregated=is_disaggregated(mode),
        releases=problem.spec.releases.values(),
    )
    if solution is None or is_counted or not has_sessions(goal):
        return solution
    # What a cache finds follows from the number of caches, and that from what they find.
    kept = prefixes_kept(solution.groups, loses=loses)
    for rounds_left in reversed(range(PREFIX_ROUNDS)):
        if kept == 1.0:
            return solution
        hit = goal.traffic.prefix_hit * kept if rounds_left else 0.0
        solution = solve_once(_with_hits(problem, hit))
        if solution is None:
            return None
        left = prefixes_kept(solution.groups, loses=loses)
        if left >= kept * (1.0 - KEPT_TOLERANCE):
            return replace(solution, prefix_hit=hit)
        kept = left
    return replace(solution, prefix_hit=0.0)


def _with_hits(problem: ServeProblem, hit: float) -> ServeProblem:
    """Reprice the traffic with another share of prompts in the prefix cache."""
    spec = _at_hit(problem.spec, hit)
    priced = build_serve_problem(spec, problem.serving_pools, problem.settings)
    return priced if problem.restriction is None else restrict_problem(priced, problem.restriction)


def solve_variants(
    problem: ServeProblem, mode: Mode, spare: Spare, *, router: RouterChoice
) -> list[tuple[ServeProblem, SolvedProgram]]:
    """Solve every variant of a problem that is feasible, least objective first."""
    variants = [
        (variant, solved)
        for whole in load_mode(mode).variants(problem)
        for variant in _by_rank_count(whole, router)
        if (solved := solve_instances(variant, mode, spare, router=router)) is not None
    ]
    return sorted(variants, key=lambda pair: pair[1].outcome.objective)


def _by_rank_count(problem: ServeProblem, router: RouterChoice) -> Iterator[ServeProblem]:
    """Yield the problem once for each number of ranks, where several kinds must share it."""
    options = problem.options.options
    if not router.is_one_count or router.most_kinds == 1:
        yield problem
        return
    for ranks in sorted({option.degrees.attention_data for option in options}):
        kept = tuple(
            option
            for option in options
            if option.role is Role.DECODE or option.degrees.attention_data == ranks
        )
        yield replace(problem, options=replace(problem.options, options=kept))


def solve_with_router(
    problem: ServeProblem,
    mode: Mode,
    router: RouterChoice,
    before: ModeSolution | None,
) -> ModeSolution | None:
    """Solve a mode with one router policy, where that may beat the best solution so far.

    Args:
        problem: of the mode.
        mode: to solve.
        router: how requests are spread.
        before: the best so far; returned where nothing costs less.
    """
    least = goal_spare(problem)
    first = solve_variants(problem, mode, least, router=router)
    if not first:
        return before
    bound = min(solved.outcome.bound for _, solved in first)
    best = before
    if before is not None:
        bound = min(bound, before.bound)
        best = replace(before, bound=bound, covered_kinds=router.most_kinds)
    for variant, solved in first[:MOST_SIMULATED]:
        if not _may_be_better(solved, best):
            break
        base = _simulate_instances(variant, solved, least, router)
        solution = _find_least_spare(variant, base, best)
        solution = replace(solution, missed_at_goal_spare=base.missed)
        kept, best = best, _better(best, solution)
        for tighter in _tighter_if_missed(variant, base, solution):
            resolved = solve_instances(tighter, mode, least, router=router)
            if resolved is not None and _may_be_better(resolved, best):
                tighter_base = _simulate_instances(tighter, resolved, least, router)
                tight = _find_least_spare(tighter, tighter_base, best)
                best = _better(best, replace(tight, missed_at_goal_spare=base.missed))
        if variant.threshold is not None and not best.missed and best is not kept:
            break
    return None if best is None else replace(best, bound=bound, covered_kinds=router.most_kinds)


def _may_be_better(solved: SolvedProgram, solution: ModeSolution | None) -> bool:
    return (
        solution is None
        or bool(solution.missed)
        or solved.outcome.objective < solution.objective * (1.0 - BOUND_TOLERANCE)
    )


def _better(best: ModeSolution | None, candidate: ModeSolution) -> ModeSolution:
    """Return the one that meets the targets, then the one with the lower objective."""
    if best is None:
        return candidate
    is_better = (bool(candidate.missed), candidate.objective) < (bool(best.missed), best.objective)
    return candidate if is_better else best


def _tighter_if_missed(
    problem: ServeProblem, base: ModeSolution, solution: ModeSolution
) -> Iterator[ServeProblem]:
    """Leave out instances whose own latency is close to a target that queueing breaks, or pools.

    The program sees no queueing, so it takes slow instances whose requests then wait too long, or
    pairs pools where one alone holds the targets for less.
    """
    is_launched = base.mode in problem.launchable_modes
    is_least = solution.objective <= base.objective * (1.0 + BOUND_TOLERANCE)
    if not base.missed or not is_launched or (is_least and not solution.missed):
        return
    yield from tighter_problems(problem, base.missed)
    options = problem.options.options
    pools = {option.serving_pool.pool.name for option in options}
    for pool in sorted(pools) if len(pools) > 1 else ():
        kept = tuple(option for option in options if option.serving_pool.pool.name == pool)
        yield replace(problem, options=replace(problem.options, options=kept))


def tighter_problems(problem: ServeProblem, missed: tuple[str, ...]) -> Iterator[ServeProblem]:
    """Yield the problem without instances whose own latency is close to a missed target."""
    demand = problem.demand
    of_first = any(name.startswith("ttft") for name in missed)
    of_token = any(name.startswith("tpot") for name in missed)
    for ratio in TIGHTER_RATIOS:
        kept = tuple(
            option
            for option in problem.options.options
            if not (of_first and option.ttft_s > ratio * demand.ttft_s)
            and not (of_token and option.tpot_s > ratio * demand.tpot_s)
        )
        if len(kept) < len(problem.options.options):
            yield replace(problem, options=replace(problem.options, options=kept))


def goal_spare(problem: ServeProblem) -> Spare:
    """Return the spare capacity that the goal states."""
    ratio = problem.spec.goal.spare_ratio
    return Spare(prefill_ratio=ratio, others_ratio=ratio)


def _find_least_spare(
    problem: ServeProblem, base: ModeSolution, before: ModeSolution | None
) -> ModeSolution:
    """Raise spare capacity until the targets hold or nothing is gained, then bisect it down."""
    mode, solution = base.mode, base

    def at(spare: Spare) -> ModeSolution | None:
        return solve_and_simulate(problem, mode, spare, base.router, before)

    low = solution.spare
    while solution.missed:
        raised = _raise_spare(solution)
        more = None if raised is None else at(raised)
        if more is None:
            return solution
        low, solution = solution.spare, more
    if solution.spare.prefill_ratio > solution.spare.others_ratio:
        solution = _lower_spare(solution, low.prefill_ratio, "prefill_ratio", at)
        return _lower_spare(solution, goal_spare(problem).others_ratio, "others_ratio", at)
    solution = _lower_spare(solution, low.others_ratio, "others_ratio", at)
    if not is_disaggregated(mode):
        return solution
    return _lower_spare(solution, goal_spare(problem).prefill_ratio, "prefill_ratio", at)


def _raise_spare(solution: ModeSolution) -> Spare | None:
    """Double the spare capacity of the late side; None beyond `MOST_SPARE`.

    Prompts wait for prefill instances, unless what decodes has less capacity left.
    """
    spare = solution.spare
    prefills = [group.rate_per_s for group in solution.groups if group.option.role is Role.PREFILL]
    others = [g.rate_per_s for g in solution.groups if g.option.role is not Role.PREFILL]
    is_first = all(name.startswith("ttft") for name in solution.missed)
    more = max(FIRST_SPARE, 2.0 * spare.prefill_ratio)
    is_prefill = bool(prefills) and sum(others) >= sum(prefills)
    if is_prefill and is_first and more <= MOST_SPARE:
        return replace(spare, prefill_ratio=more)
    more = max(FIRST_SPARE, 2.0 * spare.others_ratio)
    return replace(spare, others_ratio=more) if more <= MOST_SPARE else None


def _lower_spare(
    solution: ModeSolution, low: float, side: str, at: Callable[[Spare], ModeSolution | None]
) -> ModeSolution:
    """Bisect one side's spare capacity between too little and enough."""
    best, high = solution, getattr(solution.spare, side)
    for _ in range(SPARE_STEPS if high > low else 0):
        middle = 0.5 * (low + high)
        less = at(replace(best.spare, **{side: middle}))
        if less is not None and not less.missed:
            best, high = less, middle
        else:
            low = middle
    return best


def solve_and_simulate(
    problem: ServeProblem,
    mode: Mode,
    spare: Spare,
    router: RouterChoice,
    before: ModeSolution | None,
) -> ModeSolution | None:
    """Solve one problem with that spare capacity, and simulate it.

    None where it is infeasible, or costs no less than the best so far.
    """
    solved = solve_instances(problem, mode, spare, router=router)
    if solved is None or not _may_be_better(solved, before):
        return None
    return _simulate_instances(problem, solved, spare, router)


def solve_instances(
    problem: ServeProblem, mode: Mode, spare: Spare, *, router: RouterChoice
) -> SolvedProgram | None:
    """Choose instances behind one router, or in islands of one vendor each where that is less."""
    layouts = ({},) if problem.cell_pool else island_layouts(problem.spec, mode)
    candidates = [
        solved
        for islands in layouts
        if (solved := _solve_layout(problem, mode, spare, router=router, islands=islands))
    ]
    if not candidates:
        return None
    best = min(candidates, key=lambda solved: solved.outcome.objective)
    outcome = best.outcome
    bound = min(solved.outcome.bound for solved in candidates)
    is_open = bound < outcome.objective * (1.0 - BOUND_TOLERANCE)
    if outcome.status is Status.OPTIMAL and is_open:
        outcome = replace(outcome, status=Status.FEASIBLE)
    return replace(best, outcome=replace(outcome, bound=bound))


def _solve_layout(
    problem: ServeProblem,
    mode: Mode,
    spare: Spare,
    *,
    router: RouterChoice,
    islands: Mapping[str, str],
) -> SolvedProgram | None:
    """Allow as many kinds of instances per role as the router can balance.

    Modes whose routing is not planned take two kinds where one does not serve the traffic.
    """
    for kinds in (router.most_kinds,) if load_mode(mode).is_routed else (1, 2):
        solved = solve_program_of(problem, mode, spare, islands=islands, most_kinds=kinds)
        if solved is not None:
            return solved
    return None


def solve_program_of(
    problem: ServeProblem,
    mode: Mode,
    spare: Spare,
    *,
    islands: Mapping[str, str],
    most_kinds: int = 1,
    most_rate: bool = False,
) -> SolvedProgram | None:
    """Build and solve the program of a mode; None where it has no solution.

    Args:
        problem: of the mode.
        mode: to solve.
        spare: capacity beyond the traffic.
        islands: of pools, by name, where each has a router of its own.
        most_kinds: of instances in one role, of one island where there are several.
        most_rate: maximise the request rate of all pools instead of meeting the demand.
    """
    if problem.cell_pool:
        return solve_cells(
            next(
                serving_pool
                for serving_pool in problem.serving_pools
                if serving_pool.pool.name == problem.cell_pool
            ),
            problem.demand,
            lambda serving_pool, demand, is_most: solve_program_of(
                replace(problem, serving_pools=(serving_pool,), demand=demand, cell_pool=""),
                mode,
                spare,
                islands={},
                most_kinds=most_kinds,
                most_rate=is_most,
            ),
            nodes=problem.cell_nodes,
            spare_ratio=spare.others_ratio,
            most_rate=most_rate or problem.spec.goal.objective == "rate",
        )
    program = build_program(
        mode,
        problem.options.options,
        serving_pools=problem.serving_pools,
        kv_transfers=problem.kv_transfers,
        demand=problem.demand,
        spare=spare,
        most_rate=most_rate,
        most_kinds=most_kinds,
        islands=islands,
    )
    if program is None:
        return None
    known = problem.outcomes.get(program.problem)
    if known is None:
        known = solve_program(program, time_limit_s=problem.settings.time_limit_s / 4.0).outcome
        if known.status in (Status.OPTIMAL, Status.INFEASIBLE):
            problem.outcomes[program.problem] = known
    return None if known.solution is None else SolvedProgram(program=program, outcome=known)


def _simulate_instances(
    problem: ServeProblem, solved: SolvedProgram, spare: Spare, router: RouterChoice
) -> ModeSolution:
    groups = instance_groups(solved)
    simulated = simulate_traffic(problem, solved.program.mode, groups, router=router)
    solution = ModeSolution(
        solved=solved,
        groups=groups,
        simulated=simulated,
        spare=spare,
        missed=simulated.missed(problem.spec.goal.slo),
        threshold=problem.threshold,
        router=router,
    )
    problem.simulated.append(solution)
    return solution


def instance_groups(solved: SolvedProgram) -> tuple[InstanceGroup, ...]:
    """Return the instances that serve, prefill before others."""
    mode, islands = load_mode(solved.program.mode), solved.program.islands
    groups = [
        InstanceGroup(
            option=option, count=count, island=islands.get(option.serving_pool.pool.name, "")
        )
        for option, count in serving_instances(solved)
    ]
    if solved.program.cells:
        groups = [
            replace(group, island=f"cell-{cell + 1}", is_packed=True)
            for cell in range(solved.program.cells)
            for group in groups
        ]
    if len({group.island for group in groups}) == 1:
        groups = [replace(group, island="") for group in groups]
    groups.sort(key=lambda group: group.option.role is not Role.PREFILL)
    return tuple(
        replace(group, option=replace(group.option, role=mode.launched_roles[group.option.role]))
        if group.option.role in mode.launched_roles
        else group
        for group in groups
    )


def simulate_traffic(
    problem: ServeProblem,
    mode: Mode,
    groups: Sequence[InstanceGroup],
    *,
    router: RouterChoice | None = None,
    may_stop: bool = True,
) -> SimulationResult:
    """Simulate the traffic on instances, on each island its share.

    Args:
        problem: with its traffic.
        mode: of the instances.
        groups: equal instances each.
        router: how requests are spread; None: the simplest that balances so many kinds.
        may_stop: end where few requests miss a target already.
    """
    shares = island_shares(groups)
    if shares:
        # Equal islands, such as cells, find the first one's simulation.
        at_share = {share: at_traffic_share(problem, share) for share in shares.values()}
        parts = [
            simulate_traffic(
                at_share[share],
                mode,
                [replace(group, island="") for group in groups if group.island == name],
                router=router,
                may_stop=may_stop,
            )
            for name, share in shares.items()
        ]
        return mix_results(parts, goal=problem.spec.goal, weights=tuple(shares.values()))
    router = router or plainest_router(problem, mode, groups)
    key = (
        mode,
        tuple((id(group.option), group.count, group.is_packed) for group in groups),
        router,
        problem.threshold,
        may_stop,
        id(problem.demand),
        id(problem.spec.goal),
    )
    if key not in problem.simulation_cache:
        simulated = _simulate(problem, mode, groups, router, may_stop=may_stop)
        # What is kept keeps its key: no other object can have the same identity.
        problem.simulation_cache[key] = (simulated, (groups, problem.demand, problem.spec.goal))
    return problem.simulation_cache[key][0]


def _simulate(
    problem: ServeProblem,
    mode: Mode,
    groups: Sequence[InstanceGroup],
    router: RouterChoice,
    *,
    may_stop: bool,
) -> SimulationResult:
    """Simulate the traffic; where few requests miss a target already, no more of them."""
    goal, demands = problem.spec.goal, [problem.demand]
    busy = busy_ratio(groups, rate_per_s=problem.demand.rate_per_s)
    whole = per_rank(goal, problem.demand, ranks=1.0, busy_ratio=busy)
    if may_stop and not goal.traffic.sets_its_rate and whole > PER_RANK[0]:
        demands = [replace(problem.demand, is_sampled=True), *demands]
    for demand in demands:
        kv_transfers = packed_as(problem.kv_transfers, groups)
        offered = replace(problem, demand=demand, kv_transfers=kv_transfers)
        simulated = load_mode(mode).simulate(offered, groups, router)
        simulated = corrected_result(simulated, groups, goal=goal)
        if simulated.missed(goal.slo):
            break
    return simulated


def packed_as(kv_transfers: KvTransfers, groups: Sequence[InstanceGroup]) -> KvTransfers:
    """Return the KV transfers of groups that share a machine, or do not."""
    is_packed = any(group.is_packed for group in groups)
    return replace(kv_transfers, is_packed=is_packed or kv_transfers.is_packed)


def planned_routers(spec: ServeSpec, mode: Mode) -> tuple[RouterChoice, ...]:
    """Return the router choices that a mode of a spec is planned with, the simplest first."""
    return router_choices(
        spec.goal,
        spec.emit,
        is_disaggregated=is_disaggregated(mode),
        is_routed=load_mode(mode).is_routed,
        releases=spec.releases.values(),
    )


def plainest_router(
    problem: ServeProblem, mode: Mode, groups: Sequence[InstanceGroup]
) -> RouterChoice:
    """Return the simplest router choice that balances so many kinds of instances."""
    routers = planned_routers(problem.spec, mode)
    kinds = Counter((group.option.role, group.island) for group in groups)
    return routers[0 if max(kinds.values()) == 1 else -1]


def at_traffic_share(problem: ServeProblem, share: float) -> ServeProblem:
    """Return the problem with that share of the traffic."""
    demand, traffic = problem.demand, problem.spec.goal.traffic
    traffic = traffic.scaled(share)
    rate_per_s = share * demand.rate_per_s
    demand = replace(demand, concurrency=traffic.concurrency, rate_per_s=rate_per_s)
    if not traffic.is_closed_loop:
        traffic = traffic.model_copy(update={"rate": rate_per_s})
    goal = problem.spec.goal.model_copy(update={"traffic": traffic})
    return replace(problem, spec=replace(problem.spec, goal=goal), demand=demand)
