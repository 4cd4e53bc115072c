"""A fully specified launch: all degrees, the batch and the layers of every stage, ready to price.

World = TP * CP * DP * PP = ETP * EP * EDP * PP. What the launch does not state comes from the
spec (devices, sequence, batch), and the notes say so. Where a number does not divide another, the
refusal names the nearest that would.

tuner/estimate/division.py places the layers, tuner/estimate/legality.py checks the rules.
"""

from collections.abc import Sequence
from typing import Any

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER
from tuner.engines.reading.launch import LaunchSettings, StageContent, TrainingEngine
from tuner.engines.reading.mistakes import check_all
from tuner.engines.reading.nearest import nearest_divisor, nearest_multiple
from tuner.errors import SpecError
from tuner.estimate.division import balanced, front_loaded, place_layers
from tuner.estimate.stated_model import check_stated_model
from tuner.spec.goal import Precision
from tuner.spec.spec import Spec


class Configuration(LaunchSettings):
    """A launch with every open setting filled in; see `changed`."""

    has_experts: bool
    devices: int
    virtual_pipeline: int
    data: int
    expert_tensor: int
    sequence: int
    global_batch: int
    rounds: int
    """Pipeline flushes in one step."""
    stages: tuple[StageContent, ...]
    """Contents of every stage in execution order; stage s runs on pipeline rank s % PP."""
    is_explicit_layout: bool
    """Stated stage by stage rather than divided by the engine."""
    recompute_ratio: float
    """Share of a stage's layers that full recomputation covers."""
    activation_offload_ratio: float

    def __hash__(self) -> int:
        return hash(tuple(value for value in vars(self).values() if not isinstance(value, dict)))

    def changed(self, **settings: Any) -> "Configuration":
        """Return it with other settings, which may break rules."""
        return self.model_copy(update=settings)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per pipeline between two flushes."""
        return self.global_batch // (self.micro_batch * self.data * self.rounds)

    @property
    def num_stages(self) -> int:
        """Model chunks of all pipeline ranks."""
        return self.pipeline * self.virtual_pipeline

    @property
    def stage_ranks(self) -> int:
        """Devices that share the layers of a stage."""
        return self.tensor * self.context * self.data

    @property
    def priced_precision(self) -> str:
        """One of `tuner.costs.train.columns_of.PRECISION_OF`."""
        if not self.fp8_recipe:
            return "fp32" if self.precision == "fp32" else "bf16"
        recipe = self.fp8_recipe
        return (
            recipe if recipe in ("mxfp8", "nvfp4") else f"fp8-{recipe.replace('custom', 'delayed')}"
        )

    @property
    def has_fused_attention(self) -> bool:
        """The requested backend has a fused kernel in this precision.

        TransformerEngine's are for 16-bit types (attention/dot_product_attention); PyTorch's
        memory-efficient one, which the other engines take, has fp32 as well.
        """
        return self.flash_attention and not (self.engine.is_megatron and self.precision == "fp32")

    @property
    def has_eager_layers(self) -> bool:
        """Torchtitan is told to leave its layers uncompiled."""
        return self.compiled is not None and "model" not in self.compiled

    @property
    def embedding_loss_layers(self) -> tuple[int, int]:
        """Layers that the embedding and the loss count as when layers are divided."""
        return self.embedding_as_layers, self.loss_as_layers

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that share one copy of sharded state; 0: all, or nothing is sharded."""
        if self.replicas == 1 or not self.zero_stage:
            return 0
        return self.data * self.context // self.replicas

    @property
    def expert_data(self) -> int:
        """Devices of a stage that hold the same part of the same experts."""
        return self.stage_ranks // (self.expert * self.expert_tensor)


def build_configuration(
    launch: LaunchSettings, spec: Spec
) -> tuple[Configuration, tuple[str, ...]]:
    """Fill in what the launch does not state, with a note on the source of each value.

    Raises:
        SpecError: the launch contradicts itself, the spec's model or its cluster.
    """
    check_all(
        launch.source,
        lambda: check_stated_model(launch, spec.model),
        lambda: place_layers(launch, spec.model),
        lambda: _batch(launch, spec, data=_data(launch, _devices(launch, spec, [])), notes=[]),
    )
    notes = [*launch.notes, *check_stated_model(launch, spec.model)]
    devices = _devices(launch, spec, notes)
    data = _data(launch, devices)
    sequence, batch, micro_batch = _batch(launch, spec, data=data, notes=notes)
    batch, micro_batch = (size * launch.sequences_per_sample for size in (batch, micro_batch))
    stages = place_layers(launch, spec.model)
    virtual = len(stages) // launch.pipeline
    has_no_sequence = launch.sequence_parallel and launch.tensor == 1
    if has_no_sequence:
        notes.append(f"{launch.name('sequence_parallel')} has no effect: tensor parallelism is 1")
    if has_no_sequence and launch.overlap_tensor:
        notes.append(
            f"{launch.name('overlap_tensor')}: tensor parallelism 1 has nothing to overlap, and "
            "Megatron-LM's releases stop at it; leave it out"
        )
    if launch.mtp_layers != spec.model.mtp_num_layers:
        notes.append(
            f"{launch.mtp_layers} multi-token-prediction layers are trained; the model's config "
            f"has {spec.model.mtp_num_layers}"
        )
    precision, gradient_bytes = launch.precision, launch.gradient_bytes
    if launch.precision_follows:
        is_wide = spec.goal.precision is Precision.FP32
        precision, gradient_bytes = ("fp32", 4) if is_wide else ("bf16", gradient_bytes)
        notes.append(f"the launch leaves the precision open: the goal's {precision} counts")
    if launch.precision == "fp16":
        notes.append("fp16 is priced as bf16, which is as fast and as large")
    per_rank = spec.model.num_layers / launch.pipeline
    resolved = {
        "has_experts": spec.model.moe is not None,
        "precision": precision,
        "gradient_bytes": gradient_bytes,
        "devices": devices,
        "virtual_pipeline": virtual,
        "data": data,
        "expert_tensor": (launch.expert_tensor or launch.tensor) if spec.model.moe else 1,
        "replicas": _replicas(launch, data),
        "rank_order": launch.rank_order if launch.pipeline > 1 else DEFAULT_RANK_ORDER,
        "sequence_parallel": launch.sequence_parallel and launch.tensor > 1,
        "overlap_tensor": launch.overlap_tensor and not has_no_sequence,
        "sequence": sequence,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "rounds": _rounds(launch, batch, data),
        "stages": stages,
        "is_explicit_layout": bool(launch.layout) or len(launch.letters) > 1,
        "recompute_ratio": _recompute_ratio(launch, stages),
        "ddp_bucket_size": _bucket(launch),
        "activation_offload_ratio": 1.0
        if launch.activation_offload
        else min(1.0, launch.activation_offload_layers / per_rank),
    }
    configuration = Configuration.model_validate(dict(launch) | resolved)
    return configuration, tuple(notes)


def with_degrees(
    configuration: Configuration,
    *,
    tensor: int | None = None,
    context: int | None = None,
    pipeline: int | None = None,
    virtual_pipeline: int | None = None,
) -> Configuration:
    """Return the configuration with other degrees: data parallelism and stages follow.

    Data parallelism takes the remaining devices (0 where they or the layers do not divide); where
    the number of stages changes, layers are spread as the engine would.
    """
    tensor = tensor or configuration.tensor
    pipeline = pipeline or configuration.pipeline
    virtual = virtual_pipeline or (configuration.virtual_pipeline if pipeline > 1 else 1)
    context = context or configuration.context
    ranks = tensor * context * pipeline
    stages, end_layers = configuration.stages, _embedding_loss_layers(configuration, pipeline)
    explicit = configuration.is_explicit_layout
    if (pipeline, virtual) != (configuration.pipeline, configuration.virtual_pipeline):
        layers = sum(stage.layers for stage in stages)
        stages = _divided(configuration, layers, pipeline * virtual, end_layers)
        is_megatron = configuration.engine.is_megatron
        explicit = is_megatron and len({stage.layers for stage in stages}) > 1
        # Its lines then state the stages, or an even division.
        end_layers = (0, 0) if is_megatron else end_layers
    return configuration.changed(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        data=configuration.devices // ranks if stages and configuration.devices % ranks == 0 else 0,
        zero_bubble=configuration.zero_bubble and virtual > 1,
        sequence_parallel=tensor > 1
        and (configuration.sequence_parallel or configuration.tensor == 1),
        stages=stages,
        is_explicit_layout=explicit,
        embedding_as_layers=end_layers[0],
        loss_as_layers=end_layers[1],
    )


def _embedding_loss_layers(config: Configuration, pipeline: int) -> tuple[int, int]:
    """Return what embedding and loss count as; torchtitan has a default beside a pipeline."""
    if config.engine is TrainingEngine.TORCHTITAN and (config.pipeline == 1) != (pipeline == 1):
        return (0, 0) if pipeline == 1 else (1, 1)
    return config.embedding_loss_layers


def _divided(
    config: Configuration, layers: int, num_stages: int, end_layers: tuple[int, int]
) -> tuple[StageContent, ...]:
    if config.engine is TrainingEngine.TORCHTITAN:
        return front_loaded(
            layers,
            num_stages,
            embedding_loss_layers=end_layers,
            mtp_layers=config.mtp_layers,
        )
    return balanced(layers, num_stages, mtp_layers=config.mtp_layers)


def _devices(launch: LaunchSettings, spec: Spec, notes: list[str]) -> int:
    available = spec.num_devices
    if launch.devices is None:
        notes.append(f"the launch leaves the number of devices open: the spec's {available} count")
        return available
    if launch.devices > available:
        raise SpecError(
            f"{launch.source}: starts {launch.devices} processes, but the spec's cluster has "
            f"{available} devices; start at most {available} or name the cluster that is used"
        )
    if launch.devices < available:
        notes.append(f"the launch uses {launch.devices} of the spec's {available} devices")
    return launch.devices


def _data(launch: LaunchSettings, devices: int) -> int:
    ranks = launch.tensor * launch.context * launch.pipeline
    said = (
        f"{launch.name('tensor')} {launch.tensor} * {launch.name('context')} {launch.context} * "
        f"{launch.name('pipeline')} {launch.pipeline} = {ranks}"
    )
    if devices % ranks:
        raise SpecError(
            f"{launch.source}: {devices} devices are not divisible by {said}; the nearest product "
            f"that divides them is {nearest_divisor(devices, ranks)}"
        )
    data = devices // ranks
    if launch.data is not None and launch.data != data:
        raise SpecError(
            f"{launch.source}: {launch.name('data')} {launch.data} times {said} are "
            f"{launch.data * ranks} devices, not {devices}; the nearest is {data}"
        )
    return data


def _batch(
    launch: LaunchSettings, spec: Spec, *, data: int, notes: list[str]
) -> tuple[int, int, int]:
    """Return sequence, global batch and micro-batch."""
    sequence = launch.sequence or spec.goal.sequence_length
    if launch.sequence is None:
        notes.append(f"the launch states no sequence length: the spec's {sequence} counts")
    elif launch.samples_vary and spec.goal.sequence_length < sequence:
        sequence = spec.goal.sequence_length
        notes.append(
            f"samples are not packed: {launch.name('sequence')} {launch.sequence} is the longest"
            f" that one may be, and the spec's {sequence} tokens count as their length"
        )
    elif sequence != spec.goal.sequence_length:
        notes.append(
            f"{launch.name('sequence')} {sequence} replaces the spec's {spec.goal.sequence_length}"
        )
    batch = launch.global_batch
    if batch is None and launch.micro_batch_follows and launch.accumulation is None:
        batch = spec.goal.global_batch_size
    elif batch is None:
        batch = launch.micro_batch * (launch.accumulation or 1) * data
    micro_batch = launch.micro_batch
    if launch.micro_batch_follows:
        num_micro_batches = data * (launch.accumulation or 1)
        _check_batch(
            launch,
            batch,
            num_micro_batches,
            f"{num_micro_batches} (data * {launch.name('accumulation')})",
        )
        micro_batch = batch // num_micro_batches
    samples = micro_batch * data
    _check_batch(
        launch,
        batch,
        samples,
        f"{launch.name('micro_batch')} {micro_batch} * data parallelism {data} = {samples}",
    )
    if launch.global_batch and launch.accumulation and batch != samples * launch.accumulation:
        raise SpecError(
            f"{launch.source}: {launch.name('global_batch')} {batch} is not "
            f"{launch.name('micro_batch')} {micro_batch} * {launch.name('accumulation')} "
            f"{launch.accumulation} * data parallelism {data} = {samples * launch.accumulation}; "
            f"write {samples * launch.accumulation}, or {batch // samples} micro-batches"
        )
    if batch != spec.goal.global_batch_size:
        notes.append(f"a global batch of {batch} replaces the spec's {spec.goal.global_batch_size}")
    return sequence, batch, micro_batch


def _bucket(launch: LaunchSettings) -> int | None:
    """Return the gradient bucket size; only overlapped, unsharded gradients have buckets."""
    has_buckets = launch.overlap_grad_reduce and launch.zero_stage < 2
    return launch.ddp_bucket_size if has_buckets else None


def _check_batch(launch: LaunchSettings, batch: int, divisor: int, said: str) -> None:
    if batch % divisor:
        raise SpecError(
            f"{launch.source}: {launch.name('global_batch')} {batch} is not divisible by {said}; "
            f"the nearest that is: {nearest_multiple(batch, divisor)}"
        )


def _rounds(launch: LaunchSettings, batch: int, data: int) -> int:
    if launch.flush is None:
        return 1
    _check_batch(
        launch,
        batch,
        launch.flush * data,
        f"{launch.name('flush')} {launch.flush} * data parallelism {data} = {launch.flush * data}",
    )
    return batch // (launch.flush * data)


def _replicas(launch: LaunchSettings, data: int) -> int:
    ranks = data * launch.context
    if launch.shard_ranks is not None:
        if ranks % launch.shard_ranks:
            raise SpecError(
                f"{launch.source}: {launch.name('shard_ranks')} {launch.shard_ranks} does not "
                f"divide the {ranks} data-parallel ranks; the nearest that does is "
                f"{nearest_divisor(ranks, launch.shard_ranks)}"
            )
        return ranks // launch.shard_ranks
    if data % launch.replicas:
        raise SpecError(
            f"{launch.source}: {launch.replicas} copies of sharded state do not divide data "
            f"parallelism {data}; the nearest that does is {nearest_divisor(data, launch.replicas)}"
        )
    return launch.replicas


def _recompute_ratio(launch: LaunchSettings, stages: Sequence[StageContent]) -> float:
    """Share of the layers that full recomputation covers."""
    if launch.recompute is not Recompute.FULL:
        return 0.0
    if launch.recompute_ratio is not None:
        return launch.recompute_ratio
    if launch.recompute_method == "block" and launch.recompute_layers:
        covered = sum(min(launch.recompute_layers, stage.layers) for stage in stages)
        return covered / sum(stage.layers for stage in stages)
    return 1.0
