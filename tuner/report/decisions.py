"""Decisions in few words, as plots and tables name them."""

from itertools import groupby

from tuner.plan import TrainDecision
from tuner.serve_plan import Instances, ServeDecision
from tuner.serve_words import group_degrees, short_serve
from tuner.train_words import knobs, runs


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
    """Name the options of a training decision beyond its degrees."""
    levels = dict.fromkeys(level.value for level in decision.stage_recompute)
    chunks = sorted(set(decision.chunks))
    is_uniform = len(levels) == len(chunks) == 1
    named = {
        f"recompute {'/'.join(levels) if is_uniform else runs(decision.stage_recompute)}": (
            list(levels) != ["none"]
        ),
        f"{chunks[0] if is_uniform else runs(decision.chunks)} MemFine chunks": chunks != [1],
        f"stages of {runs(decision.pipeline_layout)} layers": (
            len(set(decision.pipeline_layout)) > 1
        ),
    }
    return (*(name for name, is_set in named.items() if is_set), *knobs(decision))


def stages_words(decision: TrainDecision) -> str:
    """Say how many layers the stages have, e.g. `15 x 4 layers, 1 x 1 layers`."""
    runs = ((layers, len(list(run))) for layers, run in groupby(decision.pipeline_layout))
    return ", ".join(f"{count} x {layers} layers" for layers, count in runs)


def serve_words(decision: ServeDecision) -> str:
    """Name a deployment in one cell."""
    return short_serve(decision)


def group_words(group: Instances) -> str:
    """Name the degrees of a group's instances."""
    return group_degrees(group)
