"""The single-knob changes that may beat a launch.

A `KnobChange` sets one knob of a configuration and leaves everything else as it is, the global
batch and the number of devices included. Results that break a rule are dropped later, so the
changes need not know the rules. No change alters batch or sequence or needs other machines; those
that round otherwise say so: bf16 where a launch computes in fp32, gradients summed in bf16.

Not covered: knobs of the network and of the allocator, offloaded activations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.catalog.capabilities import TARGETS
from tuner.config.knobs import KNOBS
from tuner.devices.datasheet import Generation
from tuner.engines.reading.launch import Graphs, TokenDispatcher, TrainingEngine
from tuner.estimate.configuration import Configuration, with_degrees
from tuner.estimate.division import balanced
from tuner.estimate.prices import TARGET_OF
from tuner.search.train.gradient_buckets import MENU
from tuner.spec.model import ModelSpec
from tuner.spec.tune import FULL
from tuner.units import format_count

HAS_DEEPEP: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
"""DeepEP's and HybridEP's kernels are written for these (github.com/deepseek-ai/DeepEP, README)."""
MOST_MICRO_BATCH: Final = 16
MOST_VIRTUAL: Final = 16
MOST_TENSOR: Final = 64
MOST_PIPELINE: Final = 16
BUCKET: Final = "ddp_bucket_size"
OFFLOAD: Final = "optimizer_offload"
BF16_BYTES: Final = 2
_FSDP: Final = 3
"""The stage that shards parameters; torchtitan's others differ from it under a pipeline alone."""
_FSDP_OVERLAPS: Final = ("overlap_grad_reduce", "overlap_param_gather")
"""Settings that say so where the engine has them; Transformers' FSDP overlaps by itself."""
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
"""Sets of modules that public recipes use, and each single module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobChange:
    """One knob at another setting."""

    knob: str
    """Changes of one knob exclude each other."""
    what: str
    """Change of the knob in words."""
    apply: Callable[[Configuration], Configuration]
    saves_only_memory: bool = False
    """The change gains no time, or too little for its coarser sums, where a launch fits."""


def knob_changes(
    config: Configuration, model: ModelSpec, generation: Generation
) -> Iterator[KnobChange]:
    """Yield every change of one knob."""
    yield from _recompute(config, model)
    yield from _sharding(config)
    yield from _state(config)
    yield from _micro_batch(config)
    yield from _degrees(config)
    yield from _virtual(config)
    if config.rounds > 1:
        yield KnobChange(
            knob="rounds",
            what=f"flush the pipeline once a step instead of {config.rounds} times",
            apply=_set(rounds=1),
        )
    if config.engine.is_megatron:
        yield from _layouts(config, model)
        yield from _megatron_switches(config)
        yield from _overlaps(config)
        yield from _buckets(config)
    if model.moe is not None:
        yield from _experts(config, model.moe.num_experts)
        yield from _dispatchers(config, generation)


def _set(**changes: Any) -> Callable[[Configuration], Configuration]:
    return lambda config: config.changed(**changes)


def _set_recompute(
    level: Recompute,
    *,
    modules: tuple[str, ...] = (),
    ratio: float = 0.0,
    by_op: bool = False,
) -> Callable[[Configuration], Configuration]:
    return _set(
        recompute=level,
        recompute_modules=modules,
        recompute_ratio=ratio,
        recompute_by_op=by_op,
    )


def _recompute(config: Configuration, model: ModelSpec) -> Iterator[KnobChange]:
    if config.recompute is not Recompute.NONE:
        yield KnobChange(
            knob="recompute",
            what="recompute nothing",
            apply=_set_recompute(Recompute.NONE),
        )
    if config.recompute is not Recompute.FULL or config.recompute_ratio < 1.0:
        yield KnobChange(
            knob="recompute",
            what="recompute whole layers",
            apply=_set_recompute(Recompute.FULL, ratio=1.0),
        )
    if config.engine is TrainingEngine.TORCHTITAN:
        if not config.recompute_by_op:
            yield KnobChange(
                knob="recompute",
                what="recompute by operation",
                apply=_set_recompute(Recompute.SELECTIVE, by_op=True),
            )
        for every in (2, 4):
            if config.recompute_ratio != 1.0 / every:
                yield KnobChange(
                    knob="recompute",
                    what=f"recompute every {every}nd layer".replace("4nd", "4th"),
                    apply=_set_recompute(Recompute.FULL, ratio=1.0 / every),
                )
    if config.engine.is_megatron:
        yield from _modules(config, model)


def _modules(config: Configuration, model: ModelSpec) -> Iterator[KnobChange]:
    possible = {
        "mla_up_proj": model.attention.kind == "mla",
        "shared_experts": model.moe is not None and model.moe.shared_ffn_size > 0,
        "moe": model.moe is not None,
        "moe_act": model.moe is not None,
        "mlp": model.num_moe_layers < model.num_layers,
    }
    current = config.recompute_modules
    fewer = [
        tuple(part for part in current if part != dropped)
        for dropped in current
        if len(current) > 1
    ]
    for modules in dict.fromkeys((*_SELECTIVE, *fewer)):
        if set(modules) == set(current) or not all(possible.get(part, True) for part in modules):
            continue
        yield KnobChange(
            knob="recompute",
            what=f"recompute only {', '.join(modules)}",
            apply=_set_recompute(Recompute.SELECTIVE, modules=modules),
        )


def _sharding(config: Configuration) -> Iterator[KnobChange]:
    """Shard more of the state, or over more ranks; pipelines are left to the manifest."""
    stages = {
        1: "shard the optimizer state",
        2: "shard gradients (ZeRO 2)",
        3: "shard parameters (ZeRO 3)",
    }
    for stage, what in stages.items() if config.shards_optimizer else ():
        if stage <= config.zero_stage or (
            config.engine is TrainingEngine.TORCHTITAN and stage < _FSDP
        ):
            continue
        settings: dict[str, Any] = {"zero_stage": stage}
        if config.engine is TrainingEngine.TORCHTITAN and not config.zero_stage:
            settings |= {"replicas": 1}
        if config.engine is TrainingEngine.MEGATRON and stage > 1:
            # Megatron-FSDP overlaps what it shards and has no buckets of a stated size.
            settings |= {"overlap_grad_reduce": True, "ddp_bucket_size": None}
        if stage == _FSDP:
            able = TARGETS[TARGET_OF[config.engine]]
            settings |= {name: True for name in _FSDP_OVERLAPS if getattr(able, name)}
            settings |= _cast_by_fsdp(config)
        yield KnobChange(knob="zero_stage", what=what, apply=_set(**settings))
    if config.zero_stage and config.replicas > 1:
        yield KnobChange(
            knob="replicas",
            what=f"one copy of the sharded state instead of {config.replicas}",
            apply=_set(replicas=1, shard_ranks=None),
        )


def _cast_by_fsdp(config: Configuration) -> dict[str, Any]:
    """Return in how many bytes the Trainer's FSDP keeps trained weights that replicas load as bf16.

    Accelerate casts them to fp32 (tuner/engines/peft/read.py), but not those of `pure_bf16`.
    """
    is_whole = config.engine is TrainingEngine.TRANSFORMERS and config.tune == FULL
    if not is_whole or any(said.startswith("pure_bf16") for said in config.understood):
        return {}
    return {"stored_bytes": 4, "gradient_bytes": 4}


def _state(config: Configuration) -> Iterator[KnobChange]:
    """Move the optimizer to host memory, or keep state in fewer bytes."""
    if config.optimizer_offload_ratio < 1.0 and config.shards_optimizer:
        # An unsharded optimizer has no offloading in Megatron-LM and DeepSpeed.
        yield KnobChange(
            knob=OFFLOAD,
            what="keep the optimizer in host memory",
            saves_only_memory=True,
            apply=_set(optimizer_offload_ratio=1.0, zero_stage=max(1, config.zero_stage)),
        )
    if config.precision == "fp32" and not config.fp8_recipe:
        yield KnobChange(
            knob="precision", what="bf16 instead of fp32", apply=_set(precision="bf16")
        )
    elif config.engine is TrainingEngine.MEGATRON and config.gradient_bytes > BF16_BYTES:
        yield KnobChange(
            knob="gradient_bytes",
            what="sum gradients in bf16",
            saves_only_memory=True,
            apply=_set(gradient_bytes=BF16_BYTES),
        )


def _micro_batch(config: Configuration) -> Iterator[KnobChange]:
    # torchtitan without a pipeline and DeepSpeed cut the batch by accumulation, Megatron always.
    for size in (1, 2, 4, 8, MOST_MICRO_BATCH):
        if size != config.micro_batch and size % config.sequences_per_sample == 0:
            yield KnobChange(
                knob="micro_batch",
                what=f"micro-batch {size} instead of {config.micro_batch}",
                apply=_set(micro_batch=size),
            )


def _degrees(config: Configuration) -> Iterator[KnobChange]:
    if config.engine is TrainingEngine.TRANSFORMERS:
        return
    for tensor in _powers(MOST_TENSOR):
        if tensor != config.tensor:
            yield KnobChange(
                knob="tensor",
                what=f"tensor parallelism {tensor} instead of {config.tensor}",
                apply=partial(with_degrees, tensor=tensor),
            )
    for context in sorted({config.context * 2, config.context // 2, 1} - {0, config.context}):
        yield KnobChange(
            knob="context",
            what=f"context parallelism {context} instead of {config.context}",
            apply=partial(with_degrees, context=context),
        )
    if config.engine is TrainingEngine.DEEPSPEED:
        return
    sizes = {config.pipeline * 2, config.pipeline // 2, *_powers(MOST_PIPELINE)}
    for pipeline in sorted(sizes - {0, config.pipeline}):
        yield KnobChange(
            knob="pipeline",
            what=f"pipeline parallelism {pipeline} instead of {config.pipeline}",
            apply=partial(with_degrees, pipeline=pipeline),
        )


def _virtual(config: Configuration) -> Iterator[KnobChange]:
    if config.pipeline == 1 or config.engine is TrainingEngine.DEEPSPEED:
        return
    max_virtual = min(MOST_VIRTUAL, sum(stage.layers for stage in config.stages) // config.pipeline)
    for virtual in range(1, max_virtual + 1):
        if virtual != config.virtual_pipeline:
            yield KnobChange(
                knob="virtual_pipeline",
                what=f"{virtual} model chunks per rank instead of {config.virtual_pipeline}",
                apply=partial(with_degrees, virtual_pipeline=virtual),
            )


def _layouts(config: Configuration, model: ModelSpec) -> Iterator[KnobChange]:
    """Take layers off the first and last stage: embedding, loss and MTP count as layers."""
    if config.num_stages == 1:
        return
    for first, last in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        yield KnobChange(
            knob="layout",
            what=f"layers placed as if the embedding were {first} and the loss {last} of them",
            apply=partial(_with_end_layers, model=model, first=first, last=last),
        )


def _with_end_layers(
    config: Configuration, *, model: ModelSpec, first: int, last: int
) -> Configuration:
    count = config.num_stages
    spread = balanced(model.num_layers + first + last, count, mtp_layers=config.mtp_layers)
    taken = {0: first, count - 1: last}
    if count == 1 or any(spread[stage].layers < layers for stage, layers in taken.items()):
        return config
    stages = tuple(
        stage.model_copy(update={"layers": stage.layers - taken.get(index, 0)})
        for index, stage in enumerate(spread)
    )
    if stages == config.stages:
        return config
    uneven = len({stage.layers for stage in stages}) > 1
    # The lines state the stages, or an even division: nothing is left to count as layers.
    return config.changed(
        stages=stages, is_explicit_layout=uneven, embedding_as_layers=0, loss_as_layers=0
    )


def _megatron_switches(config: Configuration) -> Iterator[KnobChange]:
    if config.tensor > 1 and not config.overlap_tensor:
        yield KnobChange(
            knob="overlap_tensor",
            what="overlap the collectives of tensor parallelism",
            apply=_set(overlap_tensor=True),
        )
    if config.cuda_graph is Graphs.NONE:
        yield KnobChange(
            knob="cuda_graph",
            what="capture parts of the layers as CUDA graphs",
            apply=_set(cuda_graph=Graphs.PARTIAL),
        )


def _overlaps(config: Configuration) -> Iterator[KnobChange]:
    for knob in KNOBS:
        if not knob.turn_on or (knob.of_experts and not config.has_experts):
            continue
        is_on = getattr(config, knob.field)
        if not is_on or knob.turn_off:
            settings = (knob.field,) if is_on else (knob.field, *knob.needs)
            yield KnobChange(
                knob=knob.field,
                what=knob.turn_off if is_on else knob.turn_on,
                apply=_set(**dict.fromkeys(settings, not is_on)),
            )


def _buckets(config: Configuration) -> Iterator[KnobChange]:
    """Gradient bucket sizes, where gradients are overlapped, reduced over ranks and not sharded."""
    if not config.overlap_grad_reduce or config.zero_stage > 1 or config.data * config.context <= 1:
        return
    engine = (None,) if config.ddp_bucket_size is not None else ()
    for size in (*engine, *MENU):
        if size != config.ddp_bucket_size:
            said = "the engine's own size" if size is None else f"{format_count(size)} parameters"
            yield KnobChange(
                knob=BUCKET,
                what=f"gradient buckets of {said}",
                apply=_set(ddp_bucket_size=size),
            )


def _experts(config: Configuration, num_experts: int) -> Iterator[KnobChange]:
    for expert in (size for size in _powers(num_experts) if size != config.expert):
        yield KnobChange(
            knob="expert",
            what=f"expert parallelism {expert} instead of {config.expert}",
            apply=_set(expert=expert),
        )
    for split in sorted({1, config.tensor} - {config.expert_tensor}):
        yield KnobChange(
            knob="expert_tensor",
            what=f"expert tensor parallelism {split} instead of {config.expert_tensor}",
            apply=_set(expert_tensor=split),
        )


def _dispatchers(config: Configuration, generation: Generation) -> Iterator[KnobChange]:
    possible = [TokenDispatcher.ALLTOALL]
    if generation in HAS_DEEPEP and config.engine is not TrainingEngine.DEEPSPEED:
        possible.append(TokenDispatcher.DEEPEP)
        if config.engine.is_megatron:
            possible.append(TokenDispatcher.HYBRIDEP)
    for dispatcher in possible:
        if dispatcher is not config.dispatcher:
            yield KnobChange(
                knob="dispatcher",
                what=f"dispatcher {dispatcher} instead of {config.dispatcher}",
                apply=_set(dispatcher=dispatcher),
            )


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2
