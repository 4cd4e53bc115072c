"""What stands at the top of every emitted file: what was chosen, how sure we are, what to expect.

A plan that nobody measured says so first, with the reason that was given.
"""

from collections.abc import Iterable

from tuner.plan import TrainDecision, VerifiedPlan
from tuner.spec.manifests.manifest import DEFAULT_RANK_ORDER
from tuner.units import format_bytes, format_s


def statement(verified: VerifiedPlan) -> tuple[str, ...]:
    """Return the lines that say what the file starts and what supports it."""
    return (
        f"Written by moetune {verified.plan.provenance.moetune_version} for the model "
        f"{verified.plan.model.name}.",
        *_evidence(verified),
        *_expectation(verified),
        *_degrees(verified.decision),
    )


def _evidence(verified: VerifiedPlan) -> tuple[str, ...]:
    if verified.waived:
        return (f"NOT VERIFIED: {verified.waived}",)
    measured = sum(trial.status == "ok" for trial in verified.trials)
    own = next(
        (
            trial.measured_step_s
            for trial in verified.trials
            if trial.decision == verified.decision and trial.measured_step_s is not None
        ),
        None,
    )
    launched = f"Verified by launching the reference training step; trials: {len(verified.trials)}"
    if own is None:
        return (f"{launched}, of which {measured} ran; this configuration was not among them.",)
    return (f"{launched}; this configuration took {format_s(own)} a step.",)


def _expectation(verified: VerifiedPlan) -> tuple[str, ...]:
    predicted = verified.predicted
    low, high = predicted.step_time_s_band
    memory = ", ".join(format_bytes(size) for size in predicted.peak_memory_bytes)
    return (
        f"Expected: {format_s(predicted.step_time_s)} a step "
        f"(between {format_s(low)} and {format_s(high)}), "
        f"{predicted.tokens_per_s_per_device:.4g} tokens/s per device.",
        f"Expected peak memory by pipeline rank, the fullest device: {memory}.",
    )


def _degrees(decision: TrainDecision) -> tuple[str, ...]:
    return (
        f"{decision.num_devices} devices: "
        f"TP {decision.tensor_model_parallel_size}, "
        f"PP {decision.pipeline_model_parallel_size}, "
        f"VPP {decision.virtual_pipeline_model_parallel_size}, "
        f"CP {decision.context_parallel_size}, "
        f"DP {decision.data_parallel_size}, "
        f"EP {decision.expert_model_parallel_size}, "
        f"ETP {decision.expert_tensor_parallel_size}, "
        f"EDP {decision.expert_data_parallel_size}; "
        f"ZeRO stage {decision.zero_stage}, micro-batch {decision.micro_batch_size}.",
        f"By stage: layers {_joined(decision.pipeline_layout)}; "
        f"recompute {_joined(decision.stage_recompute)}; "
        f"chunks of each MoE layer {_joined(decision.chunks)}.",
        *_knobs(decision),
    )


def _knobs(decision: TrainDecision) -> tuple[str, ...]:
    """Return what differs from the plain way to run, in one line."""
    said = {
        f"dispatcher {decision.dispatcher}": decision.dispatcher != "alltoall",
        "all-to-all overlapped": decision.a2a_overlap,
        f"precision {decision.fp8_recipe}": bool(decision.fp8_recipe),
        f"schedule {decision.schedule}": decision.schedule is not None,
        f"rank order {decision.rank_order}": decision.rank_order != DEFAULT_RANK_ORDER,
        f"CUDA graphs {decision.cuda_graph}": decision.cuda_graph != "none",
        f"{decision.num_state_copies} copies of the sharded state": decision.num_state_copies > 1,
        "gradient sums overlapped": decision.overlap_grad_reduce,
        "parameter gathers overlapped": decision.overlap_param_gather,
        f"gradients of {decision.gradient_bytes} bytes": decision.gradient_bytes != 4,
        "optimizer state in host memory": decision.optimizer_offload,
        "activations in host memory": decision.activation_offload,
        f"MTP layers {decision.mtp_num_layers}": decision.mtp_num_layers > 0,
        "embedding and loss counted as layers": decision.ends_as_layers,
    }
    chosen = [text for text, holds in said.items() if holds]
    return (f"With {', '.join(chosen)}.",) if chosen else ()


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
