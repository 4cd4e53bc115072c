"""Decisions in few words, as plots and tables name them."""

from itertools import groupby

from tuner.plan import TrainDecision
from tuner.serve_plan import Instances, ServeDecision


def train_words(decision: TrainDecision) -> str:
    """Name a training decision, e.g. `TP 1, PP 2 x 8, DP 32, EP 8, ZeRO 1, micro-batch 1`."""
    d = decision
    virtual = d.virtual_pipeline_model_parallel_size
    parts = [
        f"TP {d.tensor_model_parallel_size}",
        f"PP {d.pipeline_model_parallel_size}{f' x {virtual}' if virtual > 1 else ''}",
        f"DP {d.data_parallel_size}",
        f"CP {d.context_parallel_size}" if d.context_parallel_size > 1 else "",
        f"EP {d.expert_model_parallel_size}",
        f"ETP {d.expert_tensor_parallel_size}" if d.expert_tensor_parallel_size > 1 else "",
        f"ZeRO {d.zero_stage}",
        f"micro-batch {d.micro_batch_size}",
        *train_extras(decision),
    ]
    return ", ".join(part for part in parts if part)


def train_extras(decision: TrainDecision) -> tuple[str, ...]:
    """Say what a training decision switches on besides its degrees."""
    d = decision
    levels = dict.fromkeys(level.value for level in d.stage_recompute if level.value != "none")
    chunks = sorted(set(d.chunks))
    named = {
        f"recompute {'/'.join(levels)}": bool(levels),
        f"{'/'.join(map(str, chunks))} MemFine chunks": chunks != [1],
        d.dispatcher: d.dispatcher != "alltoall" and d.expert_model_parallel_size > 1,
        "overlapped all-to-all": d.a2a_overlap,
        "sequence parallel": d.sequence_parallel,
        d.fp8_recipe: bool(d.fp8_recipe),
        f"CUDA graphs {d.cuda_graph}": d.cuda_graph != "none",
        "optimizer on the host": d.optimizer_offload,
        "activations on the host": d.activation_offload,
        "zero-bubble schedule": d.schedule == "zero_bubble",
    }
    return tuple(name for name, is_set in named.items() if is_set)


def stages_words(decision: TrainDecision) -> str:
    """Say how many layers the stages have, e.g. `15 x 4 layers, 1 x 1 layers`."""
    runs = ((layers, len(list(alike))) for layers, alike in groupby(decision.pipeline_layout))
    return ", ".join(f"{count} x {layers} layers" for layers, count in runs)


def serve_words(decision: ServeDecision) -> str:
    """Name a deployment, e.g. `aggregated: 1 x 4 h100 + 1 x 2 h20`."""
    groups = " + ".join(
        f"{group.count} x {group.devices} {group.pool}"
        f"{'' if group.role.value == 'aggregated' else f' {group.role.value}'}"
        for group in decision.instances
    )
    return f"{decision.mode}: {groups}"


def group_words(group: Instances) -> str:
    """Say how one instance of a group is split."""
    parts = [f"TP {group.attention_tp}", f"DP {group.attention_dp}"]
    parts += [f"{name} {value}" for name, value in _splits(group) if value > 1]
    return ", ".join(parts)


def _splits(group: Instances) -> tuple[tuple[str, int], ...]:
    return (("EP", group.ep), ("MoE TP", group.moe_tp), ("PP", group.pp))
