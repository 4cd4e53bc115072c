"""From a deployment's spec to its plan: modes answered, compared and certified, ways out solved.

The best mode by the goal's objective is the plan, the others are its alternatives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from tuner.planner.serve.answering import MOST_SPARE, Found, Question, Settings, answer, question_of
from tuner.planner.serve.options import (
    PoolSite,
)
from tuner.planner.serve.program import (
    Mode,
)
from tuner.planner.serve.telling import (
    alternatives_of,
    binding_constraint,
    certificate_of,
    decision_of,
    notes_of,
    prediction_of,
    rank_of,
    refusals_of,
    refused_modes,
    unlaunchable_of,
)
from tuner.serve_plan import (
    ServeCertificate,
    ServePlan,
    ServeProvenance,
    ServeRelaxation,
    ServeSpace,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.read import ServeSpec


def make_serve_plan(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    *,
    settings: Settings,
    provenance: ServeProvenance,
) -> ServePlan:
    """Plan a deployment.

    Raises:
        SpecError: the traffic cannot be read.
    """
    started_s = settings.clock()
    question = question_of(spec, sites, settings)
    modes = [mode for mode in get_args(Mode) if mode in spec.goal.modes]
    found = [one for mode in modes if (one := answer(question, mode)) is not None]
    refused: dict[str, tuple[str, ...]] = {
        one.solved.program.mode: refusals_of(one, question) for one in found
    }
    fitting = [one for one in found if not one.missed and not refused[one.solved.program.mode]]
    solve_s = settings.clock() - started_s
    notes = (*provenance.notes, *notes_of(question))
    provenance = provenance.model_copy(update={"notes": notes})
    if not fitting:
        return _nothing(question, found, solve_s=solve_s, provenance=provenance)
    order = sorted(fitting, key=lambda one: rank_of(one, spec.goal))
    best = order[0]
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=spec.goal,
        emit=spec.emit,
        decision=decision_of(best, question),
        predicted=prediction_of(best, question),
        certificate=certificate_of(best, question, found, solve_s=solve_s),
        binding_constraint=binding_constraint(best, question),
        alternatives=tuple(alternatives_of(best, order[1:], question)),
        unlaunchable=(
            *unlaunchable_of(question, best),
            *refused_modes(best, found, refused),
        ),
        provenance=provenance,
    )


def _nothing(
    question: Question,
    found: Sequence[Found],
    *,
    solve_s: float,
    provenance: ServeProvenance,
) -> ServePlan:
    return ServePlan(
        model=question.spec.model,
        cluster=question.spec.cluster,
        goal=question.spec.goal,
        emit=question.spec.emit,
        decision=None,
        predicted=None,
        certificate=ServeCertificate(
            status="infeasible",
            objective=None,
            bound=None,
            gap_ratio=1.0,
            space=ServeSpace(
                priced=len(question.options.options),
                bounded=0,
                illegal=question.options.illegal,
            ),
            within_band=0,
            solve_s=solve_s,
            method="options",
        ),
        binding_constraint=_why_nothing(question, found),
        relaxations=tuple(_relaxations(question)),
        provenance=provenance,
    )


def _why_nothing(question: Question, found: Sequence[Found]) -> str:
    options, demand = question.options, question.demand
    if options.slowest_tpot_s == float("inf"):
        return (
            f"memory: no way to split {question.spec.model.name} leaves room for one request of"
            f" {demand.longest_input + demand.longest_output} tokens"
        )
    if options.slowest_tpot_s > demand.tpot_s:
        return f"tpot: one request alone takes {options.slowest_tpot_s * 1e3:.3g} ms a token"
    if options.slowest_ttft_s > demand.ttft_s:
        return f"ttft: one prompt alone takes {options.slowest_ttft_s * 1e3:.4g} ms"
    if found:
        return f"{found[0].missed[0]}, with {MOST_SPARE:.0%} of spare capacity at most"
    return f"devices: {demand.rate_per_s:.3g} requests/s are more than all pools serve"


def _relaxations(question: Question) -> Iterator[ServeRelaxation]:
    """Solve again with one thing given up."""
    goal, cluster = question.spec.goal, question.spec.cluster
    twice = cluster.model_copy(
        update={
            "pools": tuple(
                pool.model_copy(update={"nodes": 2 * pool.nodes}) for pool in cluster.pools
            )
        }
    )
    slow = goal.model_copy(update={"slo": _wider(goal, 2.0)})
    changes = {
        "nodes": ("twice the nodes of every pool", replace_spec(question.spec, cluster=twice)),
        "slo": ("twice the time for every target", replace_spec(question.spec, goal=slow)),
    }
    for limit, (change, spec) in changes.items():
        sites = tuple(
            replace(site, pool=pool)
            for site, pool in zip(question.sites, spec.cluster.pools, strict=True)
        )
        other = question_of(spec, sites, question.settings)
        modes = [mode for mode in get_args(Mode) if mode in goal.modes]
        found = [one for mode in modes if (one := answer(other, mode)) and not one.missed]
        if found:
            best = min(found, key=lambda one: one.devices)
            yield ServeRelaxation(limit=limit, change=change, decision=decision_of(best, other))


def replace_spec(spec: ServeSpec, **changes: object) -> ServeSpec:
    """Return the spec with some fields changed."""
    return replace(spec, **changes)  # type: ignore[arg-type]  # callers name fields of the spec


def _wider(goal: ServeGoal, factor: float) -> object:
    def scaled(targets: object) -> object:
        values = {
            kind: None if (limit := getattr(targets, kind)) is None else factor * limit
            for kind in ("mean", "p50", "p90", "p99")
        }
        return type(targets)(**values)

    return type(goal.slo)(ttft=scaled(goal.slo.ttft), tpot=scaled(goal.slo.tpot))
