"""A plan from a spec and a profiled machine: search, predict the best, explain, certify.

What more memory would gain, what would fit if nothing fits, and what a missing feature would gain
are searches of their own, never estimates.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from solvers.layout.relax import least_extra_bytes
from tuner.catalog.manifest import Capabilities
from tuner.catalog.programs import DeviceKind
from tuner.costs.reference.temporaries import UNCOUNTED_RATIO
from tuner.costs.reference.workload import Workload
from tuner.plans.train import Alternative, Plan, Provenance, Relaxation, Unlaunchable
from tuner.search.layout_groups import by_layout, layout_of, num_runners_up
from tuner.search.reasons import (
    MEMORY_LIMIT,
    UNLIMITED_BYTES,
    binding_constraint,
    nearest_batch,
    node_multiples,
    unmeasured_links,
    what_is_not_known,
    why_lost,
)
from tuner.search.reference.decisions import options_of
from tuner.search.reference.engine_workload import workload_of
from tuner.search.reference.layer_costs import PricedMachine
from tuner.search.reference.predict import predict
from tuner.search.reference.search import Candidate, ReferenceOutcome, SolvedCandidate, search
from tuner.search.reference.shapes import step_ops
from tuner.search.reference.space import Enumeration
from tuner.search.settings import SearchSettings
from tuner.search.to_plan import to_plan, without_decision
from tuner.search.train.relaxations import unlaunchable
from tuner.search.train.rules import BATCH_RULES
from tuner.spec.spec import Spec
from tuner.units import format_bytes

MOST_TIES = 64
"""Alternatives inside the error band that are listed; the certificate counts all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledProblem:
    """A workload on a machine, under what targets and users allow."""

    spec: Spec
    work: Workload
    machine: PricedMachine
    capabilities: Capabilities

    def search(self, settings: SearchSettings) -> ReferenceOutcome:
        """Run the search."""
        return search(
            self.work,
            self.machine,
            capabilities=self.capabilities,
            limits=self.spec.search,
            settings=settings,
        )


def profiled_problem(
    spec: Spec, machine: PricedMachine, *, device_kind: DeviceKind
) -> ProfiledProblem:
    """Return the problem of a spec on a profiled machine."""
    return ProfiledProblem(
        spec=spec,
        work=workload_of(spec),
        machine=machine,
        capabilities=spec.programs.launchable(
            model=spec.model,
            precision=spec.goal.precision,
            device_kind=device_kind,
            adapters=spec.goal.adapters,
        ),
    )


def make_plan(
    spec: Spec, machine: PricedMachine, *, settings: SearchSettings, provenance: Provenance
) -> Plan:
    """Plan a training run."""
    problem = profiled_problem(spec, machine, device_kind=provenance.kind_of_devices)
    result = problem.search(settings)
    if not result.solved:
        return _without_decision(problem, result, settings, provenance)
    best = result.solved[0]
    predicted = predict(best.costs, best.decision)
    unlimited_s = _objective_with(problem, settings, memory_limit_bytes=UNLIMITED_BYTES)
    return to_plan(
        spec,
        load_ratio=problem.work.load_ratio,
        provenance=_with_extrapolated(provenance, best),
        decision=best.decision,
        predicted=predicted,
        certificate=result.certificate,
        binding_constraint=binding_constraint(
            predicted,
            fastest_s=predicted.step_time_s,
            unlimited_s=unlimited_s,
            memory_limit_bytes=machine.memory_limit_bytes,
        ),
        **by_layout(best.decision, _runners_up(result, settings)),
        unlaunchable=_unlaunchable(problem, best, settings),
    )


def _runners_up(result: ReferenceOutcome, settings: SearchSettings) -> tuple[Alternative, ...]:
    best = result.solved[0]
    chosen = predict(best.costs, best.decision)
    ties = result.certificate.within_band
    layouts = [layout_of(solved.decision) for solved in result.solved]
    enough = num_runners_up(layouts, top=settings.top)
    wanted = result.solved[1 : 1 + max(enough, min(ties, MOST_TIES))]
    alternatives = []
    for index, candidate in enumerate(wanted):
        predicted = predict(candidate.costs, candidate.decision)
        alternatives.append(
            Alternative(
                decision=candidate.decision,
                predicted=predicted,
                within_band=index < ties,
                lost_by=why_lost(chosen, predicted),
            )
        )
    return tuple(alternatives)


def _objective_with(
    problem: ProfiledProblem, settings: SearchSettings, *, memory_limit_bytes: int
) -> float | None:
    machine = replace(problem.machine, memory_limit_bytes=memory_limit_bytes)
    result = replace(problem, machine=machine).search(replace(settings, top=1))
    return result.certificate.objective


def _without_decision(
    problem: ProfiledProblem,
    result: ReferenceOutcome,
    settings: SearchSettings,
    provenance: Provenance,
) -> Plan:
    nearest = _nearest(problem, result, settings)
    limits = ", ".join(relaxation.limit for relaxation in nearest if relaxation.limit != "nodes")
    not_known = what_is_not_known(result.certificate, time_limit_s=settings.time_limit_s)
    return without_decision(
        problem.spec,
        load_ratio=problem.work.load_ratio,
        provenance=provenance,
        certificate=result.certificate,
        reason=not_known or limits,
        relaxations=nearest,
    )


def _nearest(
    problem: ProfiledProblem, result: ReferenceOutcome, settings: SearchSettings
) -> tuple[Relaxation, ...]:
    """The relaxations, each with the best plan under it."""
    if not result.infeasible:
        if result.certificate.space.open:
            return ()
        return blocking_rules(result.enumeration, global_batch_size=problem.work.global_batch_size)
    nodes = _more_nodes(problem, settings)
    usable = needed_memory_bytes(result.infeasible, time_limit_s=settings.time_limit_s)
    if usable is None:
        return nodes
    machine = replace(problem.machine, memory_limit_bytes=usable)
    limit_bytes = problem.machine.memory_limit_bytes
    words = (
        f"{format_bytes(usable)} ({usable} B) usable instead of {format_bytes(limit_bytes)}:"
        f" {format_bytes(usable - limit_bytes)} more per device"
    )
    return (*nodes, _relaxation(problem, machine, settings, MEMORY_LIMIT, words))


def needed_memory_bytes(infeasible: Sequence[Candidate], *, time_limit_s: float) -> int | None:
    """Return the least usable bytes per device with which some candidate would fit."""
    share_s = time_limit_s / max(1, len(infeasible))
    counted = [
        int(candidate.problem.memory_limit_bytes_D[0])
        + least_extra_bytes(candidate.problem, time_limit_s=share_s)
        for candidate in infeasible
    ]
    # The margin of tuner/search/reference/layer_costs.py on top.
    return math.ceil(min(counted) * (1.0 + UNCOUNTED_RATIO)) if counted else None


def blocking_rules(
    enumeration: Enumeration, *, global_batch_size: int, max_rules: int = 3
) -> tuple[Relaxation, ...]:
    """Name the rules that alone exclude combinations, when none is legal.

    Where no combination is one rule away, the rules that most of them break come first instead.
    """
    single = Counter(rule for rule, _ in enumeration.nearly)
    counts = single or Counter(enumeration.illegal)
    relaxations = []
    for rule, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:max_rules]:
        only = "this rule alone excludes" if single else "this rule excludes"
        change = f"{only} {count} of {enumeration.num_illegal} combinations"
        if rule in BATCH_RULES and single:
            divisors = {
                degrees.micro_batch_size
                * degrees.data
                * (degrees.pipeline if degrees.virtual_pipeline > 1 else 1)
                for broken, degrees in enumeration.nearly
                if broken == rule
            }
            nearest = nearest_batch(global_batch_size, divisors)
            change += f"; global_batch_size {nearest} instead of {global_batch_size} would do"
        relaxations.append(Relaxation(limit=rule, change=change))
    return tuple(relaxations)


def _more_nodes(problem: ProfiledProblem, settings: SearchSettings) -> tuple[Relaxation, ...]:
    """Offer the smallest multiple of the nodes on which something fits; none where none does.

    All multiples together take no longer than the search itself may.
    """
    deadline, machine = settings.begin(), problem.machine
    (pool,) = problem.spec.cluster.pools

    used_nodes = machine.num_devices // pool.devices_per_node
    for change in deadline.before_end(node_multiples(pool, used_nodes=used_nodes)):
        larger = change.apply(pool)
        unmeasured = unmeasured_links(
            measured_ranks=machine.measured_ranks or machine.num_devices,
            measured_nodes=machine.measured_nodes or pool.nodes,
            devices=larger.num_devices,
            nodes=larger.nodes,
        )
        enlarged = replace(machine, num_devices=larger.num_devices)
        words = "; ".join((change.words, *unmeasured))
        offer = _relaxation(problem, enlarged, settings.until(deadline), change.limit, words)
        if offer.decision is not None:
            return (offer,)
    return ()


def _relaxation(
    problem: ProfiledProblem,
    machine: PricedMachine,
    settings: SearchSettings,
    limit: str,
    words: str,
) -> Relaxation:
    """Return a change with the best plan on the machine after it; without one where none fits."""
    solved = replace(problem, machine=machine).search(replace(settings, top=1)).solved
    return Relaxation(
        limit=limit,
        change=words,
        decision=solved[0].decision if solved else None,
        predicted=predict(solved[0].costs, solved[0].decision) if solved else None,
    )


def _unlaunchable(
    problem: ProfiledProblem, best: SolvedCandidate, settings: SearchSettings
) -> tuple[Unlaunchable, ...]:
    """Price what the targets lack, one feature at a time, by searching with it."""
    objective_s_of = {
        feature: replace(problem, capabilities=capable)
        .search(replace(settings, top=1))
        .certificate.objective
        for feature, capable in _missing(problem.capabilities).items()
    }
    return unlaunchable(problem.capabilities, best.objective_s, objective_s_of)


def _missing(capabilities: Capabilities) -> Mapping[str, Capabilities]:
    """Features that the cost model can price and the targets lack."""
    missing: dict[str, Capabilities] = {}
    if not (capabilities.recompute_per_stage and capabilities.chunks_per_stage):
        missing["recompute and chunks of their own for each stage"] = replace(
            capabilities, recompute_per_stage=True, chunks_per_stage=True
        )
    if capabilities.largest_chunks == 1:
        missing["chunked experts"] = replace(capabilities, largest_chunks=8)
    if not {1, 3} <= capabilities.zero_stages:
        missing["zero_stage 3"] = replace(
            capabilities, zero_stages=capabilities.zero_stages | {1, 3}
        )
    return missing


def _with_extrapolated(provenance: Provenance, best: SolvedCandidate) -> Provenance:
    ops = step_ops(
        best.costs.work,
        best.costs.degrees,
        layers=[first for first, _ in best.costs.runs],
        chunk_counts={option.chunks for option in options_of(best.decision)},
    )
    outside_profile = best.costs.machine.prices.extrapolated(ops)
    return provenance.model_copy(update={"extrapolated": outside_profile})
