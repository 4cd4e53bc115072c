"""Rules that make a combination of degrees illegal, one by one, on whole arrays at once.

A rule reads named columns and returns which entries break it. Rules come in four groups, each
reading only what is chosen already when the space is expanded: the dense degrees (tensor, context,
pipeline, data), the schedule (virtual pipeline, micro-batch), the expert degrees, and the execution
options (options.py).

Not covered: rules of one target's argument parser that no degree decides; those are checked on the
finished decision (tuner/catalog/programs.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.steps.config import LayerKind
from tuner.arrays import Ints
from tuner.catalog.manifest import Capabilities
from tuner.config.knobs import FIELD_OF_DEGREE
from tuner.config.microbatches import spanned_replicas
from tuner.search.train.problem import TrainProblem
from tuner.spec.linear_attention import splits_heads

Mask = npt.NDArray[np.bool_]
Chosen = Mapping[str, Ints]
"""Columns by name, all of one length."""


def _fields(*columns: str) -> dict[str, str]:
    return {column: FIELD_OF_DEGREE[column] for column in columns}


BATCH_RULE: Final = "data_parallel_size does not divide global_batch_size"

MICRO_RULE: Final = "micro_batch_size * data_parallel_size does not divide global_batch_size"

FEW_RULE: Final = "micro_batch_size * data_parallel_size exceeds global_batch_size"

UNDIVIDED_RULE: Final = "micro_batch_size does not divide global_batch_size"

BATCH_RULES: Final = frozenset({BATCH_RULE, MICRO_RULE, FEW_RULE, UNDIVIDED_RULE})
"""Rules that another global batch would meet."""

INTERLEAVING_RULE: Final = (
    "interleaving needs micro-batches divisible by pipeline_model_parallel_size"
)

UNEQUAL_RULE: Final = (
    "in a pipeline, replicas of one expert group run unequal numbers of micro-batches"
)

DENSE_NAMES: Final = _fields("tensor", "context", "pipeline", "data")
SCHEDULE_NAMES: Final = _fields("virtual_pipeline", "micro_batch")
EXPERT_NAMES: Final = _fields("expert", "expert_tensor")
COLUMN_OF_LIMIT: Final = {
    name: column
    for names in (DENSE_NAMES, EXPERT_NAMES, SCHEDULE_NAMES)
    for column, name in names.items()
}
"""Column of the table of degrees, by the name of its limit in the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason why a combination cannot be launched."""

    text: str
    """Words by which the rule is counted and shown."""
    broken: Callable[[Chosen], Mask]


def dense_rules(problem: TrainProblem) -> Iterator[Rule]:
    """Yield the rules on tensor, context, pipeline and data parallelism."""
    model, target = problem.model, problem.capabilities
    sequence, batch = problem.sequence_length, problem.global_batch_size
    heads, kv_heads = model.attention.num_heads, model.attention.num_kv_heads
    beyond = target.tensor_beyond_kv_heads
    yield Rule(
        text="tensor_model_parallel_size does not divide the attention heads",
        broken=lambda c: (
            (heads % c["tensor"] != 0)
            | ((kv_heads % c["tensor"] != 0) & ((c["tensor"] % kv_heads != 0) | (not beyond)))
        ),
    )
    if LayerKind.DENSE in model.layers:
        yield _divides("tensor", model.dense_ffn_size, "the feed-forward width")
    if model.moe is not None and model.moe.shared_ffn_size:
        yield _divides("tensor", model.moe.shared_ffn_size, "the shared expert's width")
    linear = model.linear
    if linear is not None:
        yield Rule(
            text="tensor and context ranks do not divide the heads of linear attention",
            broken=lambda c: ~splits_heads(linear, tensor=c["tensor"], context=c["context"]),
        )
    if target.rank_over_tensor:
        yield _divides("tensor", target.rank_over_tensor, "the adapters' rank")
    yield _divides("tensor", sequence, "the sequence")
    # Causal attention is balanced by giving each rank one piece of both halves of the sequence.
    yield Rule(
        text="context_parallel_size does not divide the sequence",
        broken=lambda c: (c["context"] > 1) & (sequence % (2 * c["context"] * c["tensor"]) != 0),
    )
    yield from _lacking(target)
    if model.num_moe_layers and target.moe_needs_sequence_parallel and not target.sequence_parallel:
        yield Rule(
            text="the target has no tensor parallelism with experts",
            broken=lambda c: c["tensor"] > 1,
        )
    if not target.uneven_layout:
        yield Rule(
            text="the target's stages must hold the same number of layers",
            broken=lambda c: model.num_layers % c["pipeline"] != 0,
        )
    yield Rule(
        text="more pipeline stages than layers",
        broken=lambda c: c["pipeline"] > model.num_layers,
    )
    if model.tie_word_embeddings and not target.tied_embeddings_with_pipeline:
        yield Rule(
            text="tied embeddings keep the first and the last layer on one stage",
            broken=lambda c: c["pipeline"] > 1,
        )
    if target.unequal_microbatches:
        yield Rule(text=FEW_RULE, broken=lambda c: c["data"] > batch)
    else:
        yield Rule(text=BATCH_RULE, broken=lambda c: batch % c["data"] != 0)
    yield from limit_rules(problem, DENSE_NAMES)


def schedule_rules(problem: TrainProblem) -> Iterator[Rule]:
    """Yield the rules on virtual stages and micro-batches, the dense degrees given."""
    target, batch = problem.capabilities, problem.global_batch_size
    if target.unequal_microbatches:
        yield Rule(text=FEW_RULE, broken=lambda c: c["micro_batch"] * c["data"] > batch)
    else:
        yield Rule(
            text=MICRO_RULE,
            broken=lambda c: batch % (c["micro_batch"] * c["data"]) != 0,
        )
    if not target.virtual_pipeline:
        yield Rule(
            text="the target has no interleaved schedule",
            broken=lambda c: c["virtual_pipeline"] > 1,
        )
    yield Rule(
        text=INTERLEAVING_RULE,
        broken=lambda c: (
            (c["virtual_pipeline"] > 1)
            & (batch % (c["micro_batch"] * c["data"] * c["pipeline"]) != 0)
        ),
    )
    layers = problem.model.num_layers
    if not target.uneven_layout:
        yield Rule(
            text="the target's stages must hold the same number of layers",
            broken=lambda c: layers % (c["pipeline"] * c["virtual_pipeline"]) != 0,
        )
    yield Rule(
        text="interleaved stages do not hold the same number of layers, except first and last",
        broken=lambda c: (
            (c["virtual_pipeline"] > 1) & (missing_layers(layers, c) > most_missing(layers, c))
        ),
    )
    yield from limit_rules(problem, SCHEDULE_NAMES)


def missing_layers(layers: int, chosen: Chosen) -> Ints:
    """Layers by which the first and last stage together are shorter than two others."""
    stages = chosen["pipeline"] * chosen["virtual_pipeline"]
    missing: Ints = -(-layers // stages) * stages - layers
    return missing


def most_missing(layers: int, chosen: Chosen) -> Ints:
    """Layers that two stages have."""
    missing: Ints = 2 * -(-layers // (chosen["pipeline"] * chosen["virtual_pipeline"]))
    return missing


def expert_rules(problem: TrainProblem) -> Iterator[Rule]:
    """Yield the rules on expert and expert-tensor parallelism, the dense degrees given."""
    moe, target = problem.model.moe, problem.capabilities
    if moe is None:
        yield Rule(
            text="expert_model_parallel_size above 1 in a model without experts",
            broken=lambda c: (c["expert"] > 1) | (c["expert_tensor"] > 1),
        )
    else:
        yield _divides("expert", moe.num_experts, f"the {moe.num_experts} experts", EXPERT_NAMES)
        yield _divides("expert_tensor", moe.expert_ffn_size, "the experts' width", EXPERT_NAMES)
    if target.rank_over_expert_tensor:
        rank = target.rank_over_expert_tensor
        yield _divides("expert_tensor", rank, "the adapters' rank", EXPERT_NAMES)
    if moe is not None and target.moe_tensor_needs_experts:
        yield Rule(
            text="the target's tensor parallelism with experts needs expert parallelism",
            broken=lambda c: (c["tensor"] > 1) & (c["expert"] == 1),
        )
    if not target.expert_parallel:
        yield Rule(text="the target has no expert parallelism", broken=lambda c: c["expert"] > 1)
    if not target.expert_tensor_parallel:
        yield Rule(
            text="the target does not split one expert",
            broken=lambda c: c["expert_tensor"] > 1,
        )
    if not target.expert_folding:
        yield Rule(
            text="the target has no parallel folding",
            broken=lambda c: c["expert"] > c["data"],
        )
    if target.unequal_microbatches:
        yield Rule(
            text=UNEQUAL_RULE,
            broken=_splits_expert_groups,
        )
    yield from limit_rules(problem, EXPERT_NAMES)


def _splits_expert_groups(chosen: Chosen) -> Mask:
    ranks = chosen["tensor"] * chosen["context"]
    group = chosen["expert"] * chosen["expert_tensor"]
    together = spanned_replicas(ranks=ranks, group=group)
    broken: Mask = (chosen["pipeline"] > 1) & (chosen["common"] % together != 0)
    return broken


def limit_rules(problem: TrainProblem, names: Mapping[str, str]) -> Iterator[Rule]:
    """Yield what the user's limits leave out, one rule per limited decision."""
    for column, name in names.items():
        allowed = getattr(problem.limits, name)
        if allowed is not None:
            yield Rule(text=f"search.{name} leaves it out", broken=_outside(column, allowed))


def first_broken(rules: list[Rule], chosen: Chosen) -> Ints:
    """Return the index of the first rule that each entry breaks, -1 where it is legal."""
    length = len(next(iter(chosen.values())))
    first = np.full(length, -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        first[(first < 0) & rule.broken(chosen)] = index
    return first


def divisors(number: int) -> Ints:
    """Return all divisors, ascending."""
    candidates = np.arange(1, int(number**0.5) + 1, dtype=np.int64)
    small = candidates[number % candidates == 0]
    return np.unique(np.concatenate((small, number // small)))


def _lacking(target: Capabilities) -> Iterator[Rule]:
    """Kinds of parallelism that the target does not have."""
    if not target.context_parallel:
        yield Rule(
            text="the target has no context parallelism",
            broken=lambda c: c["context"] > 1,
        )
    if not target.tensor_parallel:
        yield Rule(text="the target has no tensor parallelism", broken=lambda c: c["tensor"] > 1)
    if not target.pipeline:
        yield Rule(
            text="the target has no pipeline parallelism",
            broken=lambda c: c["pipeline"] > 1,
        )
    if not target.tensor_with_pipeline:
        yield Rule(
            text="the target has no tensor parallelism in a pipeline",
            broken=lambda c: (c["tensor"] > 1) & (c["pipeline"] > 1),
        )


def _divides(column: str, whole: int, what: str, names: Mapping[str, str] = DENSE_NAMES) -> Rule:
    return Rule(
        text=f"{names[column]} does not divide {what}",
        broken=lambda c: whole % c[column] != 0,
    )


def _outside(column: str, allowed: tuple[int, ...]) -> Callable[[Chosen], Mask]:
    values = np.array(allowed, dtype=np.int64)
    return lambda c: ~np.isin(c[column], values)
