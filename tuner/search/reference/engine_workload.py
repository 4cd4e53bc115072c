"""A training goal as the work of the engine that a plan is launched with.

Expert loads of every MoE layer come from a recording that may cover only some of them. A layer that
was not recorded takes the loads of the nearest recorded one, the earlier on ties. The step needs
loads expert by expert, and those of two layers cannot be averaged: their experts have nothing in
common. Where the imbalance alone is needed, the mean of the recorded layers is nearer
(tuner/costs/train/expert_imbalance.py).
"""

from profilers.steps.config import LayerKind
from tuner.catalog.programs import Programs
from tuner.costs.reference.workload import Workload
from tuner.spec.goal import Phase, TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.routing import LoadRatios, RoutingRecord
from tuner.spec.spec import Spec


def workload_of(spec: Spec) -> Workload:
    """Read the workload off a spec, its recorded routing spread over all MoE layers."""
    routing, record = spec.goal.routing, spec.routing
    loads = (
        () if routing is None or record is None else load_ratios(spec.model, record, routing.phase)
    )
    return engine_workload(spec.model, spec.goal, spec.programs, load_ratio=loads)


def engine_workload(
    model: ModelSpec,
    goal: TrainGoal,
    programs: Programs,
    *,
    load_ratio: tuple[tuple[float, ...], ...],
) -> Workload:
    """Return the work, with what the first of the programs does differently."""
    engine = programs.first.capabilities
    return Workload(
        model=model,
        sequence_length=goal.sequence_length,
        global_batch_size=goal.global_batch_size,
        precision=goal.precision.value,
        load_ratio=load_ratio,
        tune=goal.adapters,
        synchronizes_every_microbatch=engine.synchronizes_every_microbatch,
        ragged_experts=engine.ragged_experts,
    )


def load_ratios(model: ModelSpec, record: RoutingRecord, phase: Phase) -> LoadRatios:
    """Return the expert load shares of every MoE layer: [MoE layers][experts]."""
    recorded = record.of_phase(phase)
    rows = []
    for layer, kind in enumerate(model.layers):
        if kind is not LayerKind.MOE:
            continue
        rows.append(recorded[_nearest(record.layer_ids, layer)])
    return tuple(rows)


def _nearest(layer_ids: tuple[int, ...], layer: int) -> int:
    distance = [abs(recorded - layer) for recorded in layer_ids]
    return distance.index(min(distance))
