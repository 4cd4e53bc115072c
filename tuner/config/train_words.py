"""A training decision as text: every field is printed, or follows from those that are.

The text of a plan, `explain`, the report and the headers of emitted files all use these functions,
so two decisions that differ in a field never print the same. A knob is named where it differs from
its default.

    train_words     all of it in one line, as plots and tables name a decision
    train_extras    the same without the degrees
    degrees         parallel degrees, ZeRO stage and micro-batch
    knobs           features that are switched on, for a sentence
    short_decision  both in one cell of a table
    short_layout    the parallel degrees in use alone
    train_changes   how one decision differs from another
    unequal_words   the micro-batches of replicas that run unequal numbers
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

from profilers.steps.config import Recompute
from tuner.config.knobs import KNOBS
from tuner.config.train import TrainDecision

MICRO_BATCH: Final = "micro-batch"
DEGREES: Final = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "expert_data_parallel_size": "EDP",
    "zero_stage": "ZeRO",
    "micro_batch_size": MICRO_BATCH,
}
"""Fields that are degrees, and their usual names."""

_ALWAYS_NAMED: Final = ("TP", "PP", "DP", "EP", "ZeRO", MICRO_BATCH)
"""Degrees that are named where they are 1, too."""

MOST_COUNTS: Final = 8
"""Replicas whose micro-batches are listed one by one."""

SETTINGS: Final = {
    "pipeline_layout": "stages",
    "stage_recompute": "recompute",
    "recompute_modules": "recomputed modules",
    "chunks": "chunks of MoE layers",
    "cuda_graph": "CUDA graphs",
    **{knob.field: knob.words for knob in KNOBS if knob.overlap},
}
"""Further fields that have a usual name."""

FOLLOWING: Final = frozenset({"expert_data_parallel_size", "recompute"})
"""Fields that follow from others: EDP from the devices, the strongest recomputation level."""


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


def degrees(decision: TrainDecision) -> dict[str, int]:
    """Return every degree, the ZeRO stage and the micro-batch by their usual names, in order."""
    return {name: getattr(decision, field) for field, name in DEGREES.items()}


def knobs(decision: TrainDecision) -> Iterator[str]:
    """Name the knobs that differ from their default, except stage-by-stage settings."""
    for knob in KNOBS:
        if knob.field in _WORDS:
            words = _WORDS[knob.field](decision)
        else:
            words = knob.words_of(getattr(decision, knob.field))
        if words:
            yield words


def _copies(decision: TrainDecision) -> str:
    copies, ranks = decision.num_state_copies, decision.shard_ranks
    said = f"{copies} copies of the sharded state (HSDP over {ranks} ranks)"
    return "" if ranks is None else said


def _modules(decision: TrainDecision) -> str:
    is_selective = Recompute.SELECTIVE in decision.stage_recompute
    modules = "+".join(decision.recompute_modules)
    return f"recomputation of {modules}" if modules and is_selective else ""


def _recomputed_layers(decision: TrainDecision) -> str:
    layers = decision.recompute_num_layers
    return "" if layers is None else f"recomputation of {layers} layers of each stage"


def _mtp(decision: TrainDecision) -> str:
    layers = decision.mtp_num_layers
    return f"{layers} multi-token-prediction layer{'s' * (layers > 1)}" if layers else ""


_WORDS: Final[Mapping[str, Callable[[TrainDecision], str]]] = {
    "shard_ranks": _copies,
    "recompute_modules": _modules,
    "recompute_num_layers": _recomputed_layers,
    "mtp_num_layers": _mtp,
}
"""Functions that word the knobs whose words depend on other fields too."""


def short_decision(decision: TrainDecision) -> str:
    """Name a decision in one cell, e.g. `tp1 pp2 dp1 ep1 z0 b2 selective/c4 overlap:a2a`."""
    d = decision
    virtual = d.virtual_pipeline_model_parallel_size
    context, split = d.context_parallel_size, d.expert_tensor_parallel_size
    parts = (
        f"tp{d.tensor_model_parallel_size}",
        f"pp{d.pipeline_model_parallel_size}{f'x{virtual}' if virtual > 1 else ''}",
        f"cp{context}" if context > 1 else "",
        f"dp{d.data_parallel_size}",
        f"ep{d.expert_model_parallel_size}",
        f"etp{split}" if split > 1 else "",
        f"z{d.zero_stage}",
        f"b{d.micro_batch_size}",
        _short_recompute(d),
        *_short_knobs(d),
    )
    return " ".join(part for part in parts if part)


def short_layout(decision: TrainDecision) -> str:
    """Name a layout alone, e.g. `tp2 pp8x2 dp128 ep32`: the parallel degrees in use."""
    d = decision
    virtual = d.virtual_pipeline_model_parallel_size
    degrees = {
        f"tp{d.tensor_model_parallel_size}": d.tensor_model_parallel_size,
        f"pp{d.pipeline_model_parallel_size}{f'x{virtual}' if virtual > 1 else ''}": (
            d.pipeline_model_parallel_size
        ),
        f"cp{d.context_parallel_size}": d.context_parallel_size,
        f"dp{d.data_parallel_size}": d.data_parallel_size,
        f"ep{d.expert_model_parallel_size}": d.expert_model_parallel_size,
        f"etp{d.expert_tensor_parallel_size}": d.expert_tensor_parallel_size,
    }
    return " ".join(word for word, degree in degrees.items() if degree > 1) or "one device"


def unequal_words(decision: TrainDecision, *, global_batch_size: int) -> str:
    """Say how many micro-batches the replicas run, e.g. `11+11+10`; empty where all run as many."""
    counts = decision.microbatches_by_replica(global_batch_size)
    if len(set(counts)) == 1:
        return ""
    if len(counts) <= MOST_COUNTS:
        return "+".join(map(str, counts))
    return " + ".join(f"{len(list(equal))} x {count}" for count, equal in groupby(counts))


def train_changes(before: TrainDecision, after: TrainDecision) -> tuple[str, ...]:
    """Return how one decision differs from another, e.g. `PP 2 -> 4`."""
    labels = DEGREES | SETTINGS
    return tuple(
        f"{labels.get(name, name)} {old} -> {new}"
        for name in dict.fromkeys((*labels, *TrainDecision.model_fields))
        if name not in FOLLOWING and (old := _shown(name, before)) != (new := _shown(name, after))
    )


def stages_words(decision: TrainDecision) -> str:
    """Say how many layers the stages have, e.g. `15 stages of 4 layers, 1 of 1`."""
    counted = [(layers, len(list(equal))) for layers, equal in groupby(decision.pipeline_layout)]
    first, *others = counted
    words = f"{first[1]} stage{'s' * (first[1] > 1)} of {first[0]} layer{'s' * (first[0] != 1)}"
    return ", ".join((words, *(f"{count} of {layers}" for layers, count in others)))


def runs(values: Iterable[object]) -> str:
    """Run-length encode the entries of stages, e.g. `15x3|14`."""
    counted = ((value, len(list(equal))) for value, equal in groupby(values))
    return "|".join(f"{value}x{count}" if count > 1 else f"{value}" for value, count in counted)


def _short_recompute(d: TrainDecision) -> str:
    """Recomputation level and chunks, per stage where stages differ, and the modules covered."""
    options = [
        f"{level}/c{chunks}" for level, chunks in zip(d.stage_recompute, d.chunks, strict=True)
    ]
    levels = options[0] if len(set(options)) == 1 else runs(options)
    covers = "+".join(d.recompute_modules)
    if d.recompute_num_layers is not None:
        covers = f"{d.recompute_num_layers} layers"
    # The module that moetune's own step recomputes needs no name.
    is_some = d.recompute_num_layers is not None or Recompute.SELECTIVE in d.stage_recompute
    if covers in ("", "moe") or not is_some:
        return levels
    return f"{levels}({covers})"


def _short_knobs(d: TrainDecision) -> Iterator[str]:
    if len(set(d.pipeline_layout)) > 1:
        yield f"layers:{runs(d.pipeline_layout)}"
    # Tensor parallelism usually comes with sequence parallelism.
    if d.sequence_parallel != (d.tensor_model_parallel_size > 1):
        yield "sp" if d.sequence_parallel else "no-sp"
    overlapped = "+".join(knob.overlap for knob in KNOBS if knob.overlap and getattr(d, knob.field))
    together = f"overlap:{overlapped}" * bool(overlapped)
    yield from dict.fromkeys(
        together if knob.overlap else knob.short_of(getattr(d, knob.field)) for knob in KNOBS
    )


def _shown(name: str, decision: TrainDecision) -> str:
    value = getattr(decision, name)
    if name == "pipeline_layout":
        return stages_words(decision)
    if isinstance(value, tuple) and name in ("stage_recompute", "chunks") and len(set(value)) == 1:
        return str(value[0])
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        is_set = name == "recompute_modules"
        return ("+".join(value) if is_set else runs(value)) or "none"
    return "none" if value in (None, "") else str(value)
