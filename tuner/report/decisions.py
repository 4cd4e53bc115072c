"""Decisions in few words, as plots and tables name them."""

from typing import Final

from tuner.config.serve import Instances, ServeDecision
from tuner.config.serve_words import group_degrees, short_serve
from tuner.config.train import TrainDecision
from tuner.config.train_words import MICRO_BATCH, degrees, knobs, runs, stages_words

_ALWAYS_NAMED: Final = ("TP", "PP", "DP", "EP", "ZeRO", MICRO_BATCH)


def train_words(decision: TrainDecision) -> str:
    """Name a training decision, e.g. `TP 1, PP 2, VPP 8, DP 32, EP 8, ZeRO 1, micro-batch 1`."""
    named = (
        f"{name} {degree}"
        for name, degree in degrees(decision).items()
        if degree > 1 or name in _ALWAYS_NAMED
    )
    return ", ".join((*named, *train_extras(decision)))


def train_extras(decision: TrainDecision) -> tuple[str, ...]:
    """Name the options of a training decision beyond its degrees."""
    levels = dict.fromkeys(level.value for level in decision.stage_recompute)
    chunks = sorted(set(decision.chunks))
    is_uniform = len(levels) == len(chunks) == 1
    named = {
        f"recompute {'/'.join(levels) if is_uniform else runs(decision.stage_recompute)}": (
            list(levels) != ["none"]
        ),
        f"{chunks[0] if is_uniform else runs(decision.chunks)} chunks of MoE layers": chunks != [1],
        stages_words(decision): (len(set(decision.pipeline_layout)) > 1),
    }
    return (*(name for name, is_set in named.items() if is_set), *knobs(decision))


def serve_words(decision: ServeDecision) -> str:
    """Name a deployment in one cell."""
    return short_serve(decision)


def group_words(group: Instances) -> str:
    """Name the degrees of a group's instances."""
    return group_degrees(group)
