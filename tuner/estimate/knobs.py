"""The knobs that may be turned to beat a launch, and how far: one small change at a time.

A `Turn` changes one knob of a configuration and leaves everything else, the global batch and the
number of devices included. Results that break a rule are thrown out later, so turns need not know
the rules; but nothing is offered that changes what is computed (precision, batch, sequence) or that
needs other machines.

Not covered: knobs of the network and of the allocator.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.devices.datasheet import Generation
from tuner.estimate.configuration import Configuration, rearranged
from tuner.estimate.division import balanced
from tuner.estimate.launch import Dispatcher, Engine, Graphs
from tuner.planner.analytic.gradient_buckets import MENU
from tuner.spec.model import ModelSpec
from tuner.units import format_count

HAS_DEEPEP: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
"""DeepEP's and HybridEP's kernels are written for these (github.com/deepseek-ai/DeepEP, README)."""
MOST_MICRO_BATCH: Final = 16
MOST_VIRTUAL: Final = 16
MOST_TENSOR: Final = 64
BUCKET: Final = "ddp_bucket_size"
_SELECTIVE: Final[tuple[tuple[str, ...], ...]] = (
    ("layernorm",),
    ("moe_act",),
    ("moe_act", "layernorm"),
    ("mla_up_proj",),
    ("mla_up_proj", "layernorm", "moe_act"),
    ("mlp",),
    ("mla_up_proj", "mlp"),
    ("shared_experts",),
    ("moe",),
    ("moe", "layernorm", "mlp"),
    ("core_attn",),
)
"""Sets of modules that public recipes use, and each module alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One knob at another setting."""

    knob: str
    """Turns of one knob exclude each other."""
    what: str
    """In words."""
    apply: Callable[[Configuration], Configuration]


def turns(own: Configuration, model: ModelSpec, generation: Generation) -> Iterator[Turn]:
    """Yield every change of one knob."""
    yield from _recompute(own, model)
    yield from _micro_batch(own)
    yield from _degrees(own)
    yield from _virtual(own)
    if own.rounds > 1:
        yield Turn(
            knob="rounds",
            what=f"run the pipeline empty once a step instead of {own.rounds} times",
            apply=_set(rounds=1),
        )
    if own.engine is Engine.MEGATRON:
        yield from _layouts(own, model)
        yield from _megatron_switches(own)
        yield from _buckets(own)
    if model.moe is not None:
        yield from _experts(own, model.moe.num_experts)
        yield from _dispatchers(own, generation)


def _set(**changes: Any) -> Callable[[Configuration], Configuration]:
    return lambda own: replace(own, **changes)


def _recomputing(
    level: Recompute,
    *,
    modules: tuple[str, ...] = (),
    ratio: float = 0.0,
    products: bool = False,
) -> Callable[[Configuration], Configuration]:
    return _set(
        recompute=level,
        recompute_modules=modules,
        recompute_ratio=ratio,
        recompute_products=products,
    )


def _recompute(own: Configuration, model: ModelSpec) -> Iterator[Turn]:
    if own.recompute is not Recompute.NONE:
        yield Turn(
            knob="recompute",
            what="recompute nothing",
            apply=_recomputing(Recompute.NONE),
        )
    if own.recompute is not Recompute.FULL or own.recompute_ratio < 1.0:
        yield Turn(
            knob="recompute",
            what="recompute whole layers",
            apply=_recomputing(Recompute.FULL, ratio=1.0),
        )
    if own.engine is Engine.TORCHTITAN:
        if not own.recompute_products:
            yield Turn(
                knob="recompute",
                what="recompute by operation",
                apply=_recomputing(Recompute.SELECTIVE, products=True),
            )
        for every in (2, 4):
            if own.recompute_ratio != 1.0 / every:
                yield Turn(
                    knob="recompute",
                    what=f"recompute every {every}nd layer".replace("4nd", "4th"),
                    apply=_recomputing(Recompute.FULL, ratio=1.0 / every),
                )
    if own.engine is Engine.MEGATRON:
        yield from _modules(own, model)


def _modules(own: Configuration, model: ModelSpec) -> Iterator[Turn]:
    possible = {
        "mla_up_proj": model.attention.kind == "mla",
        "shared_experts": model.moe is not None and model.moe.shared_ffn_size > 0,
        "moe": model.moe is not None,
        "moe_act": model.moe is not None,
        "mlp": model.num_moe_layers < model.num_layers,
    }
    current = own.recompute_modules
    fewer = [tuple(part for part in current if part != one) for one in current if len(current) > 1]
    for modules in dict.fromkeys((*_SELECTIVE, *fewer)):
        if set(modules) == set(current) or not all(possible.get(part, True) for part in modules):
            continue
        yield Turn(
            knob="recompute",
            what=f"recompute only {', '.join(modules)}",
            apply=_recomputing(Recompute.SELECTIVE, modules=modules),
        )


def _micro_batch(own: Configuration) -> Iterator[Turn]:
    # torchtitan without a pipeline and DeepSpeed cut the batch by accumulation, Megatron always.
    for size in (1, 2, 4, 8, MOST_MICRO_BATCH):
        if size != own.micro_batch:
            yield Turn(
                knob="micro_batch",
                what=f"micro-batch {size} instead of {own.micro_batch}",
                apply=_set(micro_batch=size),
            )


def _degrees(own: Configuration) -> Iterator[Turn]:
    for tensor in _powers(MOST_TENSOR):
        if tensor != own.tensor:
            yield Turn(
                knob="tensor",
                what=f"tensor parallelism {tensor} instead of {own.tensor}",
                apply=partial(rearranged, tensor=tensor),
            )
    for context in sorted({own.context * 2, own.context // 2, 1} - {0, own.context}):
        yield Turn(
            knob="context",
            what=f"context parallelism {context} instead of {own.context}",
            apply=partial(rearranged, context=context),
        )
    if own.engine is Engine.DEEPSPEED:
        return
    for pipeline in sorted({own.pipeline * 2, own.pipeline // 2, 1} - {0, own.pipeline}):
        yield Turn(
            knob="pipeline",
            what=f"pipeline parallelism {pipeline} instead of {own.pipeline}",
            apply=partial(rearranged, pipeline=pipeline),
        )


def _virtual(own: Configuration) -> Iterator[Turn]:
    if own.pipeline == 1 or own.engine is Engine.DEEPSPEED:
        return
    most = min(MOST_VIRTUAL, sum(stage.layers for stage in own.stages) // own.pipeline)
    for virtual in range(1, most + 1):
        if virtual != own.virtual_pipeline:
            yield Turn(
                knob="virtual_pipeline",
                what=f"{virtual} model chunks per rank instead of {own.virtual_pipeline}",
                apply=partial(rearranged, virtual_pipeline=virtual),
            )


def _layouts(own: Configuration, model: ModelSpec) -> Iterator[Turn]:
    """Take layers off the ends: embedding, loss and multi-token prediction count as some."""
    if own.num_stages == 1:
        return
    for first, last in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        yield Turn(
            knob="layout",
            what=f"layers placed as if the embedding were {first} and the loss {last} of them",
            apply=partial(_with_ends, model=model, first=first, last=last),
        )


def _with_ends(own: Configuration, *, model: ModelSpec, first: int, last: int) -> Configuration:
    count = own.num_stages
    spread = balanced(model.num_layers + first + last, count, mtp_layers=own.mtp_layers)
    taken = {0: first, count - 1: last}
    if count == 1 or any(spread[stage].layers < layers for stage, layers in taken.items()):
        return own
    stages = tuple(
        stage.model_copy(update={"layers": stage.layers - taken.get(index, 0)})
        for index, stage in enumerate(spread)
    )
    uneven = len({stage.layers for stage in stages}) > 1
    return replace(own, stages=stages, is_explicit_layout=uneven, ends=(first, last))


def _megatron_switches(own: Configuration) -> Iterator[Turn]:
    switches: Mapping[str, tuple[bool, str, dict[str, Any]]] = {
        "zero_stage": (
            own.zero_stage > 0,
            "shard the optimizer state",
            {"zero_stage": 1},
        ),
        "overlap_gradients": (
            own.overlap_gradients,
            "sum gradients beside the backward pass",
            {"overlap_gradients": True},
        ),
        "overlap_parameters": (
            own.overlap_parameters,
            "gather parameters beside the forward pass",
            {"overlap_parameters": True, "overlap_gradients": True},
        ),
        "overlap_tensor": (
            own.overlap_tensor or own.tensor == 1,
            "overlap the collectives of tensor parallelism",
            {"overlap_tensor": True},
        ),
        "graphs": (
            own.graphs is not Graphs.NONE,
            "capture parts of the layers as CUDA graphs",
            {"graphs": Graphs.PARTIAL},
        ),
    }
    for knob, (is_on, what, changes) in switches.items():
        if not is_on:
            yield Turn(knob=knob, what=what, apply=_set(**changes))


def _buckets(own: Configuration) -> Iterator[Turn]:
    """Sizes of gradient buckets where there are any: overlapped, shared by ranks, not sharded."""
    if not own.overlap_gradients or own.zero_stage > 1 or own.data * own.context <= 1:
        return
    engine = (None,) if own.ddp_bucket_size is not None else ()
    for size in (*engine, *MENU):
        if size != own.ddp_bucket_size:
            said = "the engine's own size" if size is None else f"{format_count(size)} parameters"
            yield Turn(
                knob=BUCKET,
                what=f"gradient buckets of {said}",
                apply=_set(ddp_bucket_size=size),
            )


def _experts(own: Configuration, num_experts: int) -> Iterator[Turn]:
    for expert in (size for size in _powers(num_experts) if size != own.expert):
        yield Turn(
            knob="expert",
            what=f"expert parallelism {expert} instead of {own.expert}",
            apply=_set(expert=expert),
        )
    for split in sorted({1, own.tensor} - {own.expert_tensor}):
        yield Turn(
            knob="expert_tensor",
            what=f"expert tensor parallelism {split} instead of {own.expert_tensor}",
            apply=_set(expert_tensor=split),
        )
    if own.engine is Engine.MEGATRON:
        is_on = own.a2a_overlap
        yield Turn(
            knob="a2a_overlap",
            what="do not overlap the all-to-all" if is_on else "overlap the all-to-all",
            apply=_set(a2a_overlap=not is_on),
        )


def _dispatchers(own: Configuration, generation: Generation) -> Iterator[Turn]:
    possible = [Dispatcher.ALLTOALL]
    if generation in HAS_DEEPEP and own.engine is not Engine.DEEPSPEED:
        possible.append(Dispatcher.DEEPEP)
        if own.engine is Engine.MEGATRON:
            possible.append(Dispatcher.HYBRIDEP)
    for dispatcher in possible:
        if dispatcher is not own.dispatcher:
            yield Turn(
                knob="dispatcher",
                what=f"dispatcher {dispatcher} instead of {own.dispatcher}",
                apply=_set(dispatcher=dispatcher),
            )


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
