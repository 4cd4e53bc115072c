"""A training goal as the work of the engine that a plan is launched with."""

from tuner.catalog.programs import Programs
from tuner.costs.reference.workload import Workload
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec


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
