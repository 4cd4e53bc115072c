"""Plan of a deployment's spec: modes solved, compared and certified, relaxations solved.

The best mode by the goal's objective is the plan, the others are its alternatives. Solutions that
meet the targets and can be launched are ranked; those that would serve but no release launches are
named with what they would save; the rest state why they are infeasible.
"""

from tuner.plans.serve import (
    PrefixReuse,
    ServeCertificate,
    ServeModeResult,
    ServePlan,
    ServeProvenance,
)
from tuner.search.serve.autoscaling import plan_autoscaling
from tuner.search.serve.causes import explain_no_solution
from tuner.search.serve.certificate import to_certificate, to_space
from tuner.search.serve.demand import PrefixHits
from tuner.search.serve.front import pareto_front
from tuner.search.serve.most_rate import at_rate, solve_goal
from tuner.search.serve.near_miss import near_miss
from tuner.search.serve.options import ServingPool
from tuner.search.serve.preference import (
    gain_ratio,
    held_back_reason,
    lost_by,
    objective_value,
    rank_solutions,
)
from tuner.search.serve.prefix_reuse import (
    AGREE_RATIO,
    ROUNDS,
    Key,
    describe_reuse,
    hits_of_options,
    measure_reuse,
    most_reuse,
    recorded_prompts,
    reuse_key,
    with_reuse,
)
from tuner.search.serve.problem import ModeSolutions, ServeProblem
from tuner.search.serve.relaxations import (
    Closest,
    at_held_rate,
    explain_infeasible,
    find_closest,
    held_after_all,
    solve_relaxations,
)
from tuner.search.serve.solve_mode import build_serve_problem, with_stated_hits
from tuner.search.serve.to_plan import (
    binding_constraint,
    describe_missed,
    describe_solution,
    plan_cautions,
    plan_notes,
    solution_refusals,
    to_alternatives,
    to_decision,
    to_prediction,
    unseen_hits,
)
from tuner.search.serve.unlaunchable import unlaunchable
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.spec import ServeSpec


def make_serve_plan(
    spec: ServeSpec,
    serving_pools: tuple[ServingPool, ...],
    *,
    settings: SearchSettings,
    provenance: ServeProvenance,
) -> ServePlan:
    """Plan a deployment.

    Raises:
        SpecError: the traffic cannot be read, or an autoscaler's limits do not hold the decision.
    """
    started_s = settings.clock()
    problem, solutions, reuse = _answered(spec, serving_pools, settings)
    asks_rate = problem.demand.concurrency is None or spec.goal.slo.is_stated
    if not solutions.fitting and not asks_rate:
        # What the pools hold serves the closed loop, more slowly.
        problem = at_held_rate(problem)
        solutions = solve_modes(problem)
    spec = problem.spec
    solve_s = settings.clock() - started_s
    notes = (*provenance.notes, *plan_notes(problem))
    if reuse is not None and problem.hits is not None:
        notes = (*notes, describe_reuse(reuse, planned_ratio=problem.hits.ratio))
    provenance = provenance.model_copy(update={"notes": notes})
    closest: Closest | None = None
    # Where the rate is the goal there is no traffic to serve less of.
    if not solutions.fitting and spec.goal.objective != "rate":
        closest = find_closest(problem)
        solutions = held_after_all(problem, solutions, closest)
        if closest is not None and closest.requests_per_s >= problem.demand.rate_per_s:
            closest = None
    if not solutions.fitting:
        return _nothing(problem, solutions, closest, solve_s=solve_s, provenance=provenance)
    best, *others = solutions.fitting
    if best.rate_per_s is not None:
        problem = at_rate(problem, best.rate_per_s)
    predicted = with_reuse(to_prediction(best, problem), reuse, problem.hits)
    notes = (*notes, *plan_cautions(best, problem), *unseen_hits(predicted))
    provenance = provenance.model_copy(update={"notes": notes})
    decision = to_decision(best, problem)
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=problem.spec.goal,
        emit=spec.emit,
        decision=decision,
        predicted=predicted,
        certificate=to_certificate(best, problem, solutions, solve_s=solve_s),
        binding_constraint=binding_constraint(best, problem),
        alternatives=tuple(to_alternatives(best, others, problem)),
        near_miss=near_miss(problem, solutions),
        unlaunchable=tuple(unlaunchable(problem, solutions)),
        modes=_mode_table(solutions, problem),
        prefix_reuse=reuse,
        autoscaling=plan_autoscaling(problem, decision, best.groups),
        pareto=pareto_front(problem, solutions),
        provenance=provenance,
    )


def _answered(
    spec: ServeSpec, serving_pools: tuple[ServingPool, ...], settings: SearchSettings
) -> tuple[ServeProblem, ModeSolutions, PrefixReuse | None]:
    """Solve the modes; for a trace with block ids, until prefix hits and instances agree."""
    problem = build_serve_problem(spec, serving_pools, settings)
    prompts = recorded_prompts(spec, rate_per_s=problem.demand.rate_per_s)
    if prompts is None:
        return problem, solve_modes(problem), None
    hits, reuse = prompts.under(most_reuse(problem)), None
    problem = build_serve_problem(spec, serving_pools, settings, hits=hits, demand=problem.demand)
    by_key, measured = hits_of_options(problem, prompts), dict[Key, PrefixHits]()
    for _ in range(ROUNDS):
        problem = build_serve_problem(
            spec,
            serving_pools,
            settings,
            hits=hits,
            hits_by_ranks=lambda role, ranks, by_key=by_key: by_key.get((role, ranks)),  # type: ignore[misc]  # bound early
            demand=problem.demand,
        )
        solutions = solve_modes(problem)
        if not solutions.fitting:
            return problem, solutions, None
        best = solutions.fitting[0]
        if best.rate_per_s is not None:
            # The rate is the result: prompts arrive at that rate.
            prompts = prompts.at(best.rate_per_s)
        reuse = measure_reuse(best, problem, prompts)
        key = reuse_key(best.groups)
        hits = by_key.get(key, hits)
        if abs(reuse.hit_ratio - hits.ratio) <= AGREE_RATIO:
            break
        measured[key] = prompts.under(reuse)
        by_key = hits_of_options(problem, prompts) | measured
    return with_stated_hits(problem, hits), solutions, reuse


def solve_modes(problem: ServeProblem) -> ModeSolutions:
    """Solve every mode."""
    serving = tuple(solved for mode in problem.modes if (solved := solve_goal(problem, mode)))
    refused = {solution.mode: solution_refusals(solution, problem) for solution in serving}
    fitting = rank_solutions(
        [solution for solution in serving if not solution.missed and not refused[solution.mode]],
        problem,
    )
    return ModeSolutions(serving=serving, refused=refused, fitting=fitting)


def _nothing(
    problem: ServeProblem,
    solutions: ModeSolutions,
    closest: Closest | None,
    *,
    solve_s: float,
    provenance: ServeProvenance,
) -> ServePlan:
    return ServePlan(
        model=problem.spec.model,
        cluster=problem.spec.cluster,
        goal=problem.spec.goal,
        emit=problem.spec.emit,
        decision=None,
        predicted=None,
        certificate=ServeCertificate(
            status="infeasible",
            objective=None,
            bound=None,
            gap_ratio=1.0,
            space=to_space(problem, solutions.serving),
            within_band=0,
            solve_s=solve_s,
            method="options",
        ),
        binding_constraint=explain_infeasible(problem, solutions, closest),
        near_miss=near_miss(problem, solutions),
        relaxations=tuple(solve_relaxations(problem, closest)),
        unlaunchable=tuple(unlaunchable(problem, solutions)),
        modes=_mode_table(solutions, problem),
        pareto=pareto_front(problem, solutions),
        provenance=provenance,
    )


def _mode_table(solutions: ModeSolutions, problem: ServeProblem) -> tuple[ServeModeResult, ...]:
    """Return a line for every mode."""
    return tuple(_mode_row(mode, solutions, problem) for mode in problem.modes)


def _mode_row(mode: Mode, solutions: ModeSolutions, problem: ServeProblem) -> ServeModeResult:
    mode_solution, best, goal = solutions.of(mode), solutions.best, problem.spec.goal
    if mode_solution is None:
        return ServeModeResult(mode=mode, status="none", told=explain_no_solution(mode, problem))
    refusals = solutions.refused[mode]
    status, reason = (
        "alternative",
        "" if best is None else lost_by(mode_solution, best, goal),
    )
    if mode_solution.missed:
        status, reason = "missed", describe_missed(mode_solution, problem)
    elif refusals:
        status, reason = "unlaunchable", f"{describe_solution(mode_solution)}; {refusals[0]}"
    elif mode_solution is best:
        status, reason = "chosen", ""
    elif best is not None:
        reason += held_back_reason(mode_solution, best, goal)
    gained = None if best is None else gain_ratio(objective_value(mode_solution, goal), best, goal)
    return ServeModeResult.model_validate(
        {
            "mode": mode,
            "status": status,
            "devices": mode_solution.devices,
            "requests_per_s": mode_solution.rate_per_s,
            "cost_per_hour": mode_solution.price_per_hour,
            "ttft_s": float(mode_solution.simulated.ttft_s_R.mean()),
            "tpot_s": float(mode_solution.simulated.tpot_s_R.mean())
            if len(mode_solution.simulated.tpot_s_R)
            else None,
            "gain_ratio": gained,
            "told": reason,
        }
    )
