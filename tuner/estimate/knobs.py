"""The single-knob changes that may beat a launch.

A change sets one knob of a configuration, whose name is its limit, and leaves everything else as it
is, the global batch and the number of devices included; changes of one knob exclude each other.
Results that break a rule are dropped later, so the changes need not know the rules. No change
alters batch or sequence or needs other machines; those that round otherwise say so: bf16 where a
launch computes in fp32, gradients summed in bf16.

Not covered: knobs of the network and of the allocator, offloaded activations.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.config.knobs import KNOBS
from tuner.devices.datasheet import Generation
from tuner.engines.reading.launch import Graphs, TokenDispatcher, TrainingEngine
from tuner.engines.targets import TARGETS
from tuner.estimate.configuration import Configuration, with_degrees
from tuner.estimate.division import balanced
from tuner.estimate.prices import TARGET_OF
from tuner.search.change import Change
from tuner.search.train.gradient_buckets import MENU
from tuner.spec.model import ModelSpec
from tuner.spec.tune import FULL
from tuner.units import format_count

HAS_DEEPEP: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
"""DeepEP's and HybridEP's kernels are written for these (github.com/deepseek-ai/DeepEP, README)."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16)
MOST_VIRTUAL: Final = 16
MOST_TENSOR: Final = 64
MOST_PIPELINE: Final = 16
BUCKET: Final = "ddp_bucket_size"
OFFLOAD: Final = "optimizer_offload"
MEMORY_KNOBS: Final = frozenset({OFFLOAD, "gradient_bytes"})
"""Knobs that gain no time, or too little for their coarser sums, where a launch fits."""
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


KnobChange = Change[Configuration]


def knob_changes(
    config: Configuration, model: ModelSpec, generation: Generation
) -> Iterator[KnobChange]:
    """Yield every change of one knob."""
    is_megatron, moe = config.engine.is_megatron, model.moe
    yield from _recompute(config, model)
    yield from _sharding(config)
    yield from _state(config)
    # torchtitan without a pipeline and DeepSpeed cut the batch by accumulation, Megatron always.
    sizes = (size for size in MICRO_BATCHES if size % config.sequences_per_sample == 0)
    yield from _values(config, "micro_batch", sizes, "micro-batch {} instead of {}")
    yield from _degrees(config)
    rounds = "flush the pipeline once a step instead of {1} times"
    yield from _values(config, "rounds", (1,), rounds)
    if is_megatron:
        yield from _layouts(config, model)
        if config.tensor > 1:
            words = "overlap the collectives of tensor parallelism"
            yield from _values(config, "overlap_tensor", (True,), words)
        graphs = (Graphs.PARTIAL,) if config.cuda_graph is Graphs.NONE else ()
        words = "capture parts of the layers as CUDA graphs"
        yield from _values(config, "cuda_graph", graphs, words)
        yield from _overlaps(config)
        yield from _buckets(config)
    if moe is not None:
        experts, split = _powers(moe.num_experts), sorted({1, config.tensor})
        yield from _values(config, "expert", experts, "expert parallelism {} instead of {}")
        words = "expert tensor parallelism {} instead of {}"
        yield from _values(config, "expert_tensor", split, words)
        dispatchers = _dispatchers(config, generation)
        yield from _values(config, "dispatcher", dispatchers, "dispatcher {} instead of {}")


def _values(
    config: Configuration,
    knob: str,
    values: Iterable[Any],
    words: str,
    change: Callable[..., Configuration] = Configuration.changed,
) -> Iterator[KnobChange]:
    """Yield the values of a knob but the present one; `words` has places for both."""
    present = getattr(config, knob)
    for value in values:
        if value != present:
            apply = partial(change, **{knob: value})
            yield Change(limit=knob, words=words.format(value, present), apply=apply)


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
        yield Change(
            limit="recompute",
            words="recompute nothing",
            apply=_set_recompute(Recompute.NONE),
        )
    if config.recompute is not Recompute.FULL or config.recompute_ratio < 1.0:
        yield Change(
            limit="recompute",
            words="recompute whole layers",
            apply=_set_recompute(Recompute.FULL, ratio=1.0),
        )
    if config.engine is TrainingEngine.TORCHTITAN:
        if not config.recompute_by_op:
            yield Change(
                limit="recompute",
                words="recompute by operation",
                apply=_set_recompute(Recompute.SELECTIVE, by_op=True),
            )
        for every in (2, 4):
            if config.recompute_ratio != 1.0 / every:
                yield Change(
                    limit="recompute",
                    words=f"recompute every {every}nd layer".replace("4nd", "4th"),
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
        yield Change(
            limit="recompute",
            words=f"recompute only {', '.join(modules)}",
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
        yield Change(limit="zero_stage", words=what, apply=_set(**settings))
    if config.zero_stage and config.replicas > 1:
        yield Change(
            limit="replicas",
            words=f"one copy of the sharded state instead of {config.replicas}",
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
        yield Change(
            limit=OFFLOAD,
            words="keep the optimizer in host memory",
            apply=_set(optimizer_offload_ratio=1.0, zero_stage=max(1, config.zero_stage)),
        )
    if config.priced_precision == "fp32":
        yield Change(limit="precision", words="bf16 instead of fp32", apply=_set(precision="bf16"))
    elif config.engine is TrainingEngine.MEGATRON and config.gradient_bytes > BF16_BYTES:
        yield Change(
            limit="gradient_bytes",
            words="sum gradients in bf16",
            apply=_set(gradient_bytes=BF16_BYTES),
        )


def _degrees(config: Configuration) -> Iterator[KnobChange]:
    """Change one degree, or the model chunks of a rank."""
    degrees = partial(_values, config, change=with_degrees)
    if config.engine is not TrainingEngine.TRANSFORMERS:
        words = "{} parallelism {{}} instead of {{}}"
        yield from degrees("tensor", _powers(MOST_TENSOR), words.format("tensor"))
        contexts = sorted({config.context * 2, config.context // 2, 1} - {0})
        yield from degrees("context", contexts, words.format("context"))
        if config.engine is not TrainingEngine.DEEPSPEED:
            sizes = {config.pipeline * 2, config.pipeline // 2, *_powers(MOST_PIPELINE)}
            yield from degrees("pipeline", sorted(sizes - {0}), words.format("pipeline"))
    if config.pipeline > 1 and config.engine is not TrainingEngine.DEEPSPEED:
        per_rank = sum(stage.layers for stage in config.stages) // config.pipeline
        chunks = range(1, min(MOST_VIRTUAL, per_rank) + 1)
        words = "{} model chunks per rank instead of {}"
        yield from degrees("virtual_pipeline", chunks, words)


def _layouts(config: Configuration, model: ModelSpec) -> Iterator[KnobChange]:
    """Take layers off the first and last stage: embedding, loss and MTP count as layers."""
    if config.num_stages == 1:
        return
    for first, last in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        yield Change(
            limit="layout",
            words=f"layers placed as if the embedding were {first} and the loss {last} of them",
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


def _overlaps(config: Configuration) -> Iterator[KnobChange]:
    for knob in KNOBS:
        if not knob.turn_on or (knob.of_experts and not config.has_experts):
            continue
        is_on = getattr(config, knob.field)
        if not is_on or knob.turn_off:
            settings = (knob.field,) if is_on else (knob.field, *knob.needs)
            yield Change(
                limit=knob.field,
                words=knob.turn_off if is_on else knob.turn_on,
                apply=_set(**dict.fromkeys(settings, not is_on)),
            )


def _buckets(config: Configuration) -> Iterator[KnobChange]:
    """Gradient bucket sizes, where gradients are overlapped, reduced over ranks and not sharded."""
    if not config.overlap_grad_reduce or config.zero_stage > 1 or config.data * config.context <= 1:
        return
    engine = (None,) if config.ddp_bucket_size is not None else ()
    for size in (*engine, *MENU):
        said = "the engine's own size" if size is None else f"{format_count(size)} parameters"
        yield from _values(config, BUCKET, (size,), f"gradient buckets of {said}")


def _dispatchers(config: Configuration, generation: Generation) -> list[TokenDispatcher]:
    if generation not in HAS_DEEPEP or config.engine is TrainingEngine.DEEPSPEED:
        return [TokenDispatcher.ALLTOALL]
    hybrid = [TokenDispatcher.HYBRIDEP] * config.engine.is_megatron
    return [TokenDispatcher.ALLTOALL, TokenDispatcher.DEEPEP, *hybrid]


def _powers(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2
