"""Turns published rows into columns of models, strategies and machines, and says what was assumed.

What a row leaves blank is chosen by one rule each, and named in `Run.assumed`:

- degrees: 1; dp: num_gpus / (tp * pp * cp). Where the printed degrees and dp do not give the
  devices, cp is what is missing, as in NeMo's long-context tables.
- ep of a model with experts: as many as a server has devices, and under FSDP all that share the
  state, as far as that divides; etp: 1.
- micro-batch: 1. Global batch: one micro-batch per replica. Sequence: the architecture's.
- flags of Megatron-Bridge rows whose recipe is not known: the majority of those that are, see
  `tuner/backtest/flags.py`.
- recompute: see `tuner/backtest/assumptions.py`; here an unknown one is none.

A row whose time or setup cannot be had becomes no column and keeps its reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.backtest.architecture import shape_of
from tuner.backtest.engines import Engine, engine_of, memory_family_of, precision_of, software_of
from tuner.backtest.flags import Flags, flags_of
from tuner.backtest.measured import measured_step_s
from tuner.backtest.recompute import recompute_of
from tuner.backtest.rows import Row
from tuner.backtest.stages import layers_of_stages, stacked_stages, stages_of
from tuner.costs.analytic.constants import Precision, Software
from tuner.costs.analytic.shapes import Hardware, ModelShape, Stages, Strategies, stacked
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.errors import UnknownDeviceError

INTERLEAVED_CHUNKS = 2.0
"""Of torchtitan's interleaved schedule, where a row names the schedule and not its depth."""
PEAK_OF = {
    Precision.BF16: ("bf16",),
    Precision.FP8: ("fp8", "bf16"),
    Precision.MXFP8: ("fp8", "bf16"),
    Precision.NVFP4: ("fp4", "fp8", "bf16"),
}
"""Which peak of a datasheet the linear layers run at; the next one where a device has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One row that can be predicted."""

    row: Row
    device: Datasheet
    precision: Precision
    software: Software
    family: str
    """Software as residuals know it."""
    memory_family: str
    """The same as constants of memory know it."""
    release: str
    """Its version, empty where unknown."""
    shape: ModelShape
    strategy: Strategies
    hardware: Hardware
    counts: tuple[int, ...]
    """Layers per stage."""
    measured_s: float | None
    """Seconds of one step; None where the run ran out of memory."""
    peak_bytes: float | None
    assumed: tuple[str, ...]
    """Columns that were blank and that a rule filled."""
    knows_recompute: bool
    reports_reserved: bool
    """Its peak is what the allocator reserved, not what tensors took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Runs as columns; C runs."""

    runs: tuple[Run, ...]
    shape: ModelShape
    strategy: Strategies
    hardware: Hardware
    stages: Stages
    measured_s_C: npt.NDArray[np.float64]
    """NaN where the run ran out of memory."""


def batch_of(runs: Sequence[Run]) -> Batch:
    """Stack runs into columns.

    Raises:
        ValueError: there are none.
    """
    if not runs:
        raise ValueError("no run to stack")
    return Batch(
        runs=tuple(runs),
        shape=stacked([run.shape for run in runs]),
        strategy=stacked([run.strategy for run in runs]),
        hardware=stacked([run.hardware for run in runs]),
        stages=stacked_stages([stages_of(run.shape, run.counts) for run in runs]),
        measured_s_C=np.array([np.nan if r.measured_s is None else r.measured_s for r in runs]),
    )


def runs_of(rows: Sequence[Row]) -> tuple[tuple[Run, ...], dict[int, str]]:
    """Return what can be predicted, and per row number why the others cannot."""
    runs: list[Run] = []
    reasons: dict[int, str] = {}
    for row in rows:
        try:
            runs.append(run_of(row))
        except ValueError as error:
            reasons[row.number] = str(error)
    return tuple(runs), reasons


def run_of(row: Row) -> Run:
    """Read one row.

    Raises:
        ValueError: its time or its setup cannot be had; the message is the reason.
    """
    if row.reason:
        raise ValueError(row.reason)
    if row.text("workload").lower() in ("lora", "peft"):
        raise ValueError("workload lora: only a few weights are trained, which is not modelled")
    shape = shape_of(row)
    device = _device_of(row)
    engine, release = engine_of(row)
    precision = precision_of(row)
    strategy, counts, assumed = _strategy_of(row, shape, device, engine, release)
    tokens = float(
        strategy.micro_batch * strategy.num_microbatches * strategy.data * strategy.sequence
    )
    # What did not fit has no time to compare; everything else needs one.
    is_timed = not row.has_run_out_of_memory
    peak = row.numbers.get("peak_mem_gib")
    knows_recompute = "recompute" not in assumed
    return Run(
        row=row,
        device=device,
        precision=precision,
        software=software_of(engine, release),
        family=engine.family,
        memory_family=memory_family_of(engine, release),
        release=release,
        shape=shape,
        strategy=replace(
            strategy,
            linear_bytes=float(engine.keeps_quantized and precision is not Precision.BF16),
        ),
        hardware=hardware_of(device, precision),
        counts=counts,
        measured_s=measured_step_s(
            row,
            shape=shape,
            sequence=float(strategy.sequence),
            tokens=tokens,
            device=device,
            is_causal=not engine.counts_full_square,
        )
        if is_timed
        else None,
        peak_bytes=None if peak is None else peak * 2.0**30,
        assumed=assumed,
        knows_recompute=knows_recompute,
        reports_reserved=engine.reports_reserved,
    )


def _device_of(row: Row) -> Datasheet:
    name = row.text("gpu")
    if not name:
        raise ValueError("gpu is missing")
    try:
        return find_device(name)
    except UnknownDeviceError as error:
        raise ValueError(str(error).split(";")[0]) from error


def hardware_of(device: Datasheet, precision: Precision) -> Hardware:
    """Return a device as numbers, with the peak that the linear layers run at."""
    peak = next(name for name in PEAK_OF[precision] if name in device.flop_per_s)
    return Hardware(
        matmul_flop_per_s=device.flop_per_s[peak],
        attention_flop_per_s=device.flop_per_s["bf16"],
        compute_units=float(device.compute_units),
        memory_bytes=float(device.memory_bytes),
        memory_bytes_per_s=device.memory_bytes_per_s,
        scale_up_bytes_per_s=device.scale_up_bytes_per_s,
        domain=float(device.scale_up_domain),
        devices_per_node=float(device.devices_per_node),
        scale_out_bytes_per_s=device.scale_out_bytes_per_s,
        host_bytes_per_s=device.host_bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    tensor: float
    context: float
    pipeline: float
    chunks: float
    data: float
    assumed: tuple[str, ...]


def _degrees_of(row: Row) -> _Degrees:
    if "num_gpus" not in row.numbers:
        raise ValueError("num_gpus is missing")
    devices = row.numbers["num_gpus"]
    tensor, pipeline = row.number_or("tp", 1.0), row.number_or("pp", 1.0)
    context = row.number_or("cp", 1.0)
    assumed = tuple(name for name in ("tp", "pp", "cp") if name not in row.numbers)
    if pipeline > 1.0 and "vpp" not in row.numbers:
        assumed += ("vpp",)
    model_ranks = tensor * pipeline * context
    data = row.number_or("dp", devices / model_ranks)
    if model_ranks * data != devices and devices % (tensor * pipeline * data) == 0:
        context = devices / (tensor * pipeline * data)
        assumed += ("cp",)
    if data < 1.0 or data % 1.0 or tensor * pipeline * context * data != devices:
        raise ValueError(
            f"tp {tensor:g} * pp {pipeline:g} * cp {context:g}"
            + (f" * dp {data:g}" if "dp" in row.numbers else "")
            + f" does not divide num_gpus {devices:g}"
        )
    usual = INTERLEAVED_CHUNKS if "Interleaved" in row.text("notes") else 1.0
    chunks = row.number_or("vpp", usual) if pipeline > 1.0 else 1.0
    return _Degrees(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=chunks,
        data=data,
        assumed=assumed,
    )


def _strategy_of(
    row: Row, shape: ModelShape, device: Datasheet, engine: Engine, release: str
) -> tuple[Strategies, tuple[int, ...], tuple[str, ...]]:
    degrees = _degrees_of(row)
    sequence, micro_batch, num_microbatches, filled = _batch_of_row(row, degrees, engine)
    assumed = degrees.assumed + filled
    stage, shard_ranks = _sharding(row, engine, degrees)
    expert, expert_tensor, filled = _expert_degrees(
        row, shape, degrees, device, shards_everything=stage > 2.0
    )
    assumed += filled
    counts, ends_as_layers = layers_of_stages(
        int(shape.dense_layers + shape.moe_layers),
        mtp_layers=int(shape.mtp_layers),
        num_stages=int(degrees.pipeline * degrees.chunks),
    )
    flags, filled = flags_of(row, shape, device, release=release)
    assumed += filled
    recompute = recompute_of(
        row,
        stage_layers=sum(counts) / degrees.pipeline,
        by_products=engine.family == "torchtitan",
    )
    if recompute is None and not flags.knows_recompute:
        assumed += ("recompute",)
    is_parallel_sequence = degrees.tensor > 1.0 and (
        engine.sequence_parallel or "sp" in row.text("recompute").split("+")
    )
    return (
        Strategies(
            sequence=sequence,
            micro_batch=micro_batch,
            num_microbatches=num_microbatches,
            tensor=degrees.tensor,
            context=degrees.context,
            pipeline=degrees.pipeline,
            virtual_pipeline=degrees.chunks,
            data=degrees.data,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence_parallel=float(is_parallel_sequence),
            zero_stage=stage,
            shard_ranks=shard_ranks,
            gradient_bytes=engine.gradient_bytes,
            has_flash_attention=float(engine.has_flash_attention),
            dropout=engine.dropout,
            overlap_gradients=float(engine.overlaps_gradients),
            overlap_tensor=float(
                engine.overlaps_tensor and degrees.tensor > 1.0 and not shape.experts
            )
            or float("async TP" in row.text("notes") or "AsyncTP" in row.text("notes")),
            ends_as_layers=float(ends_as_layers),
            activation_offload=min(
                1.0, row.number_or("cpu_offload_layers", 0.0) * degrees.pipeline / sum(counts)
            ),
            **flags.fields,
            **_recompute_fields(recompute, flags, engine),
        ),
        counts,
        tuple(dict.fromkeys(assumed)),
    )


def _recompute_fields(
    printed: dict[str, float] | None, flags: Flags, engine: Engine
) -> dict[str, float]:
    if printed is not None:
        return printed
    return {engine.recompute: 1.0} if engine.recompute else flags.recompute


def _batch_of_row(
    row: Row, degrees: _Degrees, engine: Engine
) -> tuple[float, float, float, tuple[str, ...]]:
    """Return sequence, micro-batch and number of micro-batches."""
    assumed: tuple[str, ...] = ()
    sequence = row.number_or("seq", 0.0)
    if not sequence:
        printed = row.architecture.get("seq", engine.sequence)
        if isinstance(printed, bool) or not isinstance(printed, int | float) or printed < 1:
            raise ValueError("seq is missing")
        sequence, assumed = float(printed), ("seq",)
    micro_batch = row.number_or("mbs", 1.0)
    total = row.number_or("gbs", 0.0)
    if "mbs" not in row.numbers:
        assumed += ("mbs",)
    if not total:
        if "mbs" not in row.numbers:
            raise ValueError("gbs and mbs are missing")
        total = micro_batch * degrees.data
        assumed += ("gbs",)
    if engine.is_local_batch and degrees.pipeline > 1.0:
        micro_batch = 1.0
        assumed += ("mbs",)
    num_microbatches = total / (micro_batch * degrees.data)
    if num_microbatches < 1.0 or num_microbatches % 1.0:
        raise ValueError(
            f"gbs {total:g} is no multiple of mbs {micro_batch:g} * dp {degrees.data:g}"
        )
    return sequence, micro_batch, num_microbatches, assumed


def _expert_degrees(
    row: Row,
    shape: ModelShape,
    degrees: _Degrees,
    device: Datasheet,
    *,
    shards_everything: bool,
) -> tuple[float, float, tuple[str, ...]]:
    if not shape.experts:
        return 1.0, 1.0, ()
    assumed: tuple[str, ...] = ()
    stage_ranks = degrees.tensor * degrees.context * degrees.data
    expert_tensor = row.number_or("etp", 1.0)
    if "etp" not in row.numbers and degrees.tensor > 1.0:
        assumed = ("etp",)
    expert = row.number_or("ep", 0.0)
    if not expert:
        widest = stage_ranks if shards_everything else device.devices_per_node
        expert = float(np.gcd.reduce([int(widest), int(stage_ranks), int(shape.experts)]))
        assumed += ("ep",)
    if shape.experts % expert:
        raise ValueError(f"ep {expert:g} does not divide {shape.experts:g} experts")
    if stage_ranks % (expert * expert_tensor):
        raise ValueError(
            f"ep {expert:g} * etp {expert_tensor:g} does not divide the {stage_ranks:g} ranks "
            "of a pipeline stage"
        )
    return expert, expert_tensor, assumed


def _sharding(row: Row, engine: Engine, degrees: _Degrees) -> tuple[float, float]:
    """Return the ZeRO stage and the ranks that state is sharded over, 0 for all."""
    text = row.text("zero_or_fsdp").lower().replace("_", "-")
    if not text or text == "ddp":
        return engine.zero_stage, 0.0
    if text.startswith("zero-"):
        stage = text.removeprefix("zero-")
        if stage not in ("0", "1", "2", "3"):
            raise ValueError(f"zero_or_fsdp {text[:40]!r} is not one of ZeRO-0 to ZeRO-3")
        # Megatron sums gradients once, after the last micro-batch, whatever the stage is called.
        most = 3.0 if engine.software is Software.TORCH_FSDP else 1.0
        return min(float(stage), most), 0.0
    if "shard-grad-op" in text:
        return 2.0, 0.0
    name, _, ranks = text.partition("=")
    if name not in ("fsdp", "fsdp-full-shard", "hsdp", "megatron-fsdp", "fsdp2"):
        raise ValueError(f"zero_or_fsdp {text[:40]!r} is not known")
    if not ranks:
        return 3.0, 0.0
    if not ranks.isdigit() or not 1 <= int(ranks) <= degrees.data * degrees.context:
        raise ValueError(f"zero_or_fsdp {text[:40]!r} shards over more ranks than there are")
    return 3.0, float(ranks) if float(ranks) < degrees.data else 0.0
