"""From a placement's spec to its plan: evidence, candidates, judgement, certificate, verdict.

The plan is made from the first passes of every workload and judged on the later ones, under the
dispatch of the engine, beside what runs today and beside EPLB's rule on the same loads.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.place_plan import (
    PlaceAlternative,
    PlaceCertificate,
    PlaceDecision,
    PlacePlan,
    PlacePrediction,
    PlaceProvenance,
)
from tuner.planner.place.candidates import (
    TRAFFIC,
    Rule,
    migration_limit,
    rule_of,
    solve_objective,
)
from tuner.planner.place.certifying import binding_constraint, certificate_of
from tuner.planner.place.comparing import (
    gain_of,
    judge_workload,
    judged_threes,
    layer_times_of,
    left_out,
    outcome_of,
    pairs,
    saved_of,
    sources_of,
    traffic_by_name,
    traffic_of,
)
from tuner.planner.place.costing import planned_cost
from tuner.planner.place.evidence import WorkloadEvidence, evidence_of
from tuner.planner.place.migration import migration_cost
from tuner.planner.place.pricing import Pricing
from tuner.planner.place.relaxing import relaxations
from tuner.planner.place.verdict import verdict_of
from tuner.spec.place import Dispatch
from tuner.spec.place_read import PlaceSpec

DISPATCH_OF: Final[Mapping[str, Dispatch]] = {
    "sglang": Dispatch.STATIC,
    "trtllm": Dispatch.EVEN,
    "vllm": Dispatch.EVEN,
    "vllm-ascend": Dispatch.EVEN,
    "eplb": Dispatch.EVEN,
    "megatron": Dispatch.EVEN,
}
"""What an engine does with replicas unless told otherwise: SGLang's default with an all-to-all
backend; vLLM and TensorRT-LLM go through replicas in turn."""

MAIN_SHARE: Final = 0.5
"""Of the time limit, for the plan itself."""
FOLDS_SHARE: Final = 0.35
"""For plans without each workload in turn; what is left is for relaxations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to look."""

    time_limit_s: float = 60.0
    clock: Callable[[], float] = time.perf_counter


def make_place_plan(
    spec: PlaceSpec, *, pricing: Pricing | None, settings: Settings, provenance: PlaceProvenance
) -> PlacePlan:
    """Plan, judge and certify a placement.

    Raises:
        SpecError: the recordings lack what the objective looks at, or a limit cannot be kept.
    """
    started_s = settings.clock()
    goal, ranks = spec.goal, spec.ranks
    evidence = evidence_of(spec)
    dispatch = dispatch_of(spec)
    rule = rule_of(evidence, ranks=ranks, groups=goal.expert_groups)
    migration = migration_limit(
        spec, expert_bytes=None if pricing is None else pricing.machine.expert_bytes
    )
    outcome = solve_objective(
        evidence,
        goal=goal,
        ranks=ranks,
        rule=rule,
        active_load=0.0 if pricing is None else pricing.active_load,
        migration=migration,
        time_limit_s=MAIN_SHARE * settings.time_limit_s,
    )
    if outcome.solution is None:
        return _nothing(spec, outcome, provenance)
    solve_s = settings.clock() - started_s
    chosen, alternatives = _chosen(spec, evidence, outcome.solution, rule, pricing, dispatch)
    threes = judged_threes(spec, evidence, chosen, rule, dispatch)
    times = () if pricing is None else layer_times_of(spec, evidence, chosen, rule, threes, pricing)
    folds, worst = left_out(
        spec,
        evidence,
        pricing,
        dispatch,
        time_limit_s=FOLDS_SHARE * settings.time_limit_s,
    )
    traffic = traffic_by_name(spec, evidence, chosen, rule)
    gain, noise, step_gain = gain_of(spec, evidence, threes, times, traffic, pricing)
    moved = (
        None
        if goal.current is None
        else migration_cost(
            spec.current,
            chosen,
            ranks=ranks,
            machine=None if pricing is None else pricing.machine,
            gain_ratio=gain if step_gain is None else step_gain,
        )
    )
    return PlacePlan(
        goal=goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=_decision(spec, chosen),
        predicted=PlacePrediction(
            imbalance={one.name: three.after.imbalance for one, three in pairs(evidence, threes)},
            imbalance_band={one.name: three.after.band for one, three in pairs(evidence, threes)},
            outcomes=tuple(outcome_of(one, three) for one, three in pairs(evidence, threes)),
            left_out=folds,
            layer_times=times,
            traffic=traffic,
            migration=moved,
        ),
        verdict=verdict_of(
            gain_ratio=gain,
            noise_ratio=noise,
            step_gain_ratio=step_gain,
            left_out=folds,
            baseline_worst=worst,
            migration=moved,
            rebalance_s=goal.rebalance_interval,
            saved=saved_of(threes, has_traffic=bool(traffic)),
        ),
        certificate=certificate_of(spec, evidence, chosen, outcome, pricing, solve_s=solve_s),
        binding_constraint=binding_constraint(spec, evidence, chosen),
        alternatives=alternatives,
        relaxations=relaxations(
            spec,
            evidence,
            objective=outcome.objective,
            rule=rule,
            migration=migration,
            time_limit_s=settings.time_limit_s,
        ),
        provenance=provenance.model_copy(
            update={"notes": (*provenance.notes, *_notes(spec, evidence, dispatch, rule))}
        ),
    )


def dispatch_of(spec: PlaceSpec) -> str:
    """Return the dispatch rule that the plan is judged under."""
    named = next(iter(spec.emit), "eplb")
    return (spec.goal.dispatch or DISPATCH_OF[named]).value


def _chosen(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    solved: Placement,
    rule: Rule,
    pricing: Pricing | None,
    dispatch: str,
) -> tuple[Placement, tuple[PlaceAlternative, ...]]:
    """Take the solver's placement unless one of the others is better; tell of the others."""
    named = {"solver": solved, rule.name: rule.placement, "as it runs": spec.current}
    limited = spec.goal.max_moved_experts is not None or spec.goal.max_moved_bytes is not None
    if limited:
        del named[rule.name]
    if spec.goal.objective in TRAFFIC:
        # The others may keep no load limit, or hold more of it: they are told of, not taken.
        order = ["solver", *(name for name in named if name != "solver")]
        values = {name: traffic_of(spec, evidence, one, rule) for name, one in named.items()}
    else:
        values = {
            name: planned_cost(spec, evidence, one, pricing, dispatch)
            for name, one in named.items()
        }
        order = sorted(named, key=lambda name: values[name])
    best = order[0]
    alternatives = tuple(
        PlaceAlternative(
            method=name,
            decision=_decision(spec, named[name]),
            objective=values[name],
            imbalance={
                one.name: judge_workload(spec, one, named[name], dispatch).imbalance
                for one in evidence
            },
            lost_by=f"{values[name] / max(values[best], 1e-12) - 1.0:.2%} more of the objective",
        )
        for name in order[1:]
    )
    return named[best], alternatives


def _decision(spec: PlaceSpec, chosen: Placement) -> PlaceDecision:
    goal = spec.goal
    return PlaceDecision(
        physical_to_logical=tuple(tuple(row) for row in chosen.expert_LS.tolist()),
        layer_ids=spec.layer_ids,
        num_experts=spec.num_experts,
        num_layers=None if spec.model is None else spec.model.num_layers,
        ranks=goal.ranks,
        ranks_per_node=goal.ranks_per_node or goal.ranks,
        slots_per_rank=tuple(spec.ranks.slots_G.tolist()),
    )


def _notes(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], dispatch: str, rule: Rule
) -> tuple[str, ...]:
    notes = [f"replicas share tokens by the rule {dispatch!r}", f"the rule beside is {rule.name}"]
    whole = [one.name for one in evidence if not one.is_split]
    if whole:
        notes.append(
            f"{', '.join(whole)}: one pass recorded, so the plan is judged on what it was made from"
        )
    if len(evidence) == 1:
        notes.append("one workload: how the plan does on another one is not known")
    for one in evidence:
        unseen = int((one.whole_PLE.sum(axis=0) == 0.0).sum())
        if unseen:
            notes.append(f"{one.name}: {unseen} experts of all layers were never chosen")
    if dispatch == Dispatch.STATIC.value and any(sources_of(spec, one) is None for one in evidence):
        notes.append("tokens are taken to come from all ranks alike")
    return tuple(notes)


def _nothing(
    spec: PlaceSpec, outcome: Outcome[Placement], provenance: PlaceProvenance
) -> PlacePlan:
    status = "infeasible" if outcome.status.value == "infeasible" else "unknown"
    return PlacePlan(
        goal=spec.goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=None,
        predicted=None,
        verdict=None,
        certificate=PlaceCertificate(
            status=status,
            objective=None,
            bound=None,
            gap_ratio=1.0,
            solve_s=outcome.solve_s,
            method=outcome.method,
        ),
        binding_constraint="no placement found in the time limit; give more with --time-limit",
        provenance=provenance,
    )
