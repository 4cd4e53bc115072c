"""The header of every emitted file: the decision, the evidence for it, the expected figures.

An unmeasured plan says so first, with the reason that was given. What one starts has the whole
header; files beside it say only what wrote them and whether it was verified.
"""

from tuner.config.equal_stages import equal_stages
from tuner.config.train import TrainDecision
from tuner.config.train_words import degrees, knobs
from tuner.engines.checkpoints import CheckpointSchedule
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import TrainGoal
from tuner.spec.tune import adapters_words
from tuner.units import format_bytes, format_number, format_s


def statement(
    verified: VerifiedPlan, *, schedule: CheckpointSchedule | None = None
) -> tuple[str, ...]:
    """Return the header's lines.

    Args:
        verified: the plan.
        schedule: of the checkpoints that the files save; None: they save none.
    """
    return (
        *brief_statement(verified),
        *_expectation(verified),
        *_degrees(verified.decision),
        *_checkpoints(schedule),
        *_trained(verified.plan.goal),
    )


def _checkpoints(schedule: CheckpointSchedule | None) -> tuple[str, ...]:
    return () if schedule is None else schedule.lines


def _trained(goal: TrainGoal) -> tuple[str, ...]:
    tune = goal.adapters
    return () if tune is None else (f"Trained: {adapters_words(tune)}.",)


def brief_statement(verified: VerifiedPlan) -> tuple[str, ...]:
    """Return the lines of a file beside the one that is started."""
    return (
        f"Written by moetune {verified.plan.provenance.moetune_version} for the model "
        f"{verified.plan.model.name}.",
        *_evidence(verified),
    )


def _evidence(verified: VerifiedPlan) -> tuple[str, ...]:
    if verified.waived:
        return (f"NOT VERIFIED: {verified.waived}",)
    measured = sum(trial.status == "ok" for trial in verified.trials)
    step_s = next(
        (
            trial.measured_step_s
            for trial in verified.trials
            if trial.decision == verified.decision and trial.measured_step_s is not None
        ),
        None,
    )
    launched = f"Verified by launching the reference training step; trials: {len(verified.trials)}"
    if step_s is None:
        return (f"{launched}, of which {measured} ran; this configuration was not among them.",)
    return (f"{launched}; this configuration took {format_s(step_s)} a step.",)


def _expectation(verified: VerifiedPlan) -> tuple[str, ...]:
    predicted = verified.predicted
    low, high = predicted.step_time_s_band
    peaks = equal_stages([format_bytes(size) for size in predicted.peak_memory_bytes])
    memory = ", ".join(f"{peak.label}: {peak.row}" for peak in peaks)
    return (
        f"Expected: {format_s(predicted.step_time_s)} a step "
        f"(90 % band: {format_s(low)} to {format_s(high)}), "
        f"{format_number(predicted.tokens_per_s_per_device)} tokens/s per device.",
        f"Expected peak memory by pipeline rank, the highest of its devices: {memory}.",
    )


def _degrees(decision: TrainDecision) -> tuple[str, ...]:
    return (
        f"{decision.num_devices} devices: "
        f"{', '.join(f'{name} {degree}' for name, degree in degrees(decision).items())}.",
        f"By stage: {_stages(decision)}.",
        *_knobs(decision),
    )


def _knobs(decision: TrainDecision) -> tuple[str, ...]:
    """Return the options that differ from their defaults, in one line."""
    chosen = ", ".join(knobs(decision))
    return (f"With {chosen}.",) if chosen else ()


def _stages(decision: TrainDecision) -> str:
    """Say what every stage does, equal ones once, e.g. `0-14: layers 4, ...; 15: layers 1, ...`."""
    stages = zip(decision.pipeline_layout, decision.stage_recompute, decision.chunks, strict=True)
    return "; ".join(
        f"{run.label}: layers {layers}, recompute {recompute}, chunks of each MoE layer {chunks}"
        for run in equal_stages(list(stages))
        for layers, recompute, chunks in (run.row,)
    )
