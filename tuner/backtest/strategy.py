"""Reads the layout of a published run: degrees, batch, sharding, flags; blanks are filled by rule.

- degrees: 1; dp: num_gpus / (tp * pp * cp). Where the degrees that are printed give fewer devices,
  a blank cp is what is missing.
- ep of a model with experts: as many as a server has devices, as far as that divides, until
  tuner/backtest/assumptions.py chooses; etp: 1.
- micro-batch: 1. Global batch: one micro-batch per replica. Sequence: the architecture's.
- flags: off where they are blank.

Recomputed are Megatron's modules by name, joined by +; `full` is every layer as a whole;
`selective` is the core of attention in Megatron-LM (arXiv:2205.05198) and, in torchtitan, all but
attention and every second GEMM.
"""

import math
from collections.abc import Mapping
from typing import Final

from tuner.backtest.engines import SoftwareFamily, parse_precision
from tuner.backtest.rows import Row
from tuner.backtest.stages import divide_layers
from tuner.config.columns import Strategies
from tuner.config.knobs import COLUMN_OF_MODULE
from tuner.config.shapes import ModelShape
from tuner.devices.datasheet import Datasheet
from tuner.prices.train.constants import GemmPrecision, Software
from tuner.units import parse_whole

Fields = Mapping[str, float]
"""Values by field of `Strategies`."""

FIELD_OF_MODULE: Final[Mapping[str, str]] = {
    "full": "recompute_full",
    "selective": COLUMN_OF_MODULE["core_attn"],
    **COLUMN_OF_MODULE,
}
"""Module to the field of `Strategies` with its recomputed share."""
GUESSED: Final = ("near", "none")
"""Matches of a recipe that leave its flags open."""
NOTHING: Final = ("none", "off", "false")
ALSO: Final = ("sp",)
"""Other words in the column: sequence parallelism."""


def build_strategy(
    row: Row, shape: ModelShape, device: Datasheet, engine: SoftwareFamily
) -> tuple[Strategies, tuple[int, ...], tuple[str, ...]]:
    """Return the strategy, layers per stage, and the columns that a rule filled.

    Raises:
        ValueError: the degrees, the batch or a flag cannot be.
    """
    degrees, assumed = _degrees_of(row)
    sequence, micro_batch, num_microbatches, filled = _batch_of_row(row, degrees)
    assumed += filled
    stage, shard_ranks = _sharding(row, engine, degrees)
    expert, expert_tensor, filled = _expert_degrees(row, shape, degrees, device)
    assumed += filled
    counts, embedding_loss_count = divide_layers(
        int(shape.dense_layers + shape.moe_layers),
        mtp_layers=int(shape.mtp_layers),
        num_stages=int(degrees["pipeline"] * degrees["virtual_pipeline"]),
    )
    flags, filled = _flags_of(row, has_experts=bool(shape.experts))
    assumed += filled
    recompute = _read_recompute(
        row,
        stage_layers=sum(counts) / degrees["pipeline"],
        by_op=engine.family == "torchtitan",
    )
    is_open = recompute is None and not _knows_recipe(row)
    if is_open or row.text("recipe_match") in GUESSED:
        assumed += ("recompute",)
    if recompute is None:
        recompute = {engine.recompute: 1.0} if engine.recompute else {}
    overlaps_gradients = float(row.flags.get("overlap_grad_reduce", engine.overlaps_gradients))
    is_parallel_sequence = degrees["tensor"] > 1.0 and (
        engine.sequence_parallel or "sp" in row.text("recompute").split("+")
    )
    return (
        Strategies(
            sequence=sequence,
            micro_batch=micro_batch,
            num_microbatches=num_microbatches,
            **degrees,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence_parallel=float(is_parallel_sequence),
            zero_stage=stage,
            shard_ranks=shard_ranks,
            gradient_bytes=engine.gradient_bytes,
            weight_bytes=1.0 if _shards_quantized(row, engine, stage) else 2.0,
            has_flash_attention=float(engine.has_flash_attention),
            dropout=engine.dropout,
            overlap_gradients=overlaps_gradients,
            overlap_parameters=overlaps_gradients,
            overlap_tensor=float(
                row.flags.get(
                    "tensor_overlap",
                    parse_precision(row) in engine.overlaps_tensor
                    and degrees["tensor"] > 1.0
                    and not shape.experts,
                )
            ),
            embedding_loss_as_layers=float(embedding_loss_count),
            activation_offload=min(
                1.0, row.number_or("cpu_offload_layers", 0.0) * degrees["pipeline"] / sum(counts)
            ),
            **flags,
            **recompute,
        ),
        counts,
        tuple(dict.fromkeys(assumed)),
    )


def _degrees_of(row: Row) -> tuple[Fields, tuple[str, ...]]:
    """Return parallel degrees, and the columns that a rule filled."""
    if "num_gpus" not in row.numbers:
        raise ValueError("num_gpus is missing")
    devices = row.numbers["num_gpus"]
    tensor, pipeline = row.number_or("tp", 1.0), row.number_or("pp", 1.0)
    context = row.number_or("cp", 1.0)
    assumed = tuple(name for name in ("tp", "pp", "cp") if name not in row.numbers)
    if pipeline > 1.0 and "vpp" not in row.numbers:
        assumed += ("vpp",)
    data = row.number_or("dp", devices / (tensor * pipeline * context))
    missing = devices / (tensor * pipeline * context * data)
    if missing > 1.0 and missing % 1.0 == 0.0 and "cp" not in row.numbers:
        context *= missing
    if data < 1.0 or data % 1.0 or tensor * pipeline * context * data != devices:
        raise ValueError(
            f"tp {tensor:g} * pp {pipeline:g} * cp {context:g}"
            + (f" * dp {data:g}" if "dp" in row.numbers else "")
            + f" does not divide num_gpus {devices:g}"
        )
    chunks = row.number_or("vpp", 1.0) if pipeline > 1.0 else 1.0
    degrees = {
        "tensor": tensor,
        "context": context,
        "pipeline": pipeline,
        "virtual_pipeline": chunks,
        "data": data,
    }
    return degrees, assumed


def _knows_recipe(row: Row) -> bool:
    """Return whether a row states every flag that its recipe sets; a blank one is off then."""
    return row.text("recipe_match") in ("exact", "layout") or "a2a_overlap" in row.flags


def _flags_of(row: Row, *, has_experts: bool) -> tuple[Fields, tuple[str, ...]]:
    """Return dispatcher, overlap, CUDA graphs and fusion, and the columns that are blank.

    Raises:
        ValueError: a flag has a value that is not known.
    """
    dispatcher, graph = row.text("dispatcher").lower(), row.text("cuda_graph").lower()
    if dispatcher not in ("", "alltoall", "allgather", "flex", "deepep", "hybridep"):
        raise ValueError(f"dispatcher {dispatcher[:40]!r} is none of alltoall, deepep, hybridep")
    if graph not in ("", "none", "local", "transformer_engine", "full_iteration"):
        raise ValueError(
            f"cuda_graph {graph[:40]!r} is none of none, local, transformer_engine, full_iteration"
        )
    scope = row.text("cuda_graph_scope").lower()
    is_full = graph == "full_iteration" or (graph == "local" and scope == "full_iteration")
    fields = {
        "a2a_overlap": float(has_experts and row.flags.get("a2a_overlap", False)),
        "is_deepep": float(dispatcher == "deepep"),
        "is_hybridep": float(dispatcher == "hybridep"),
        "full_graph": float(is_full),
        "partial_graph": float(graph in ("local", "transformer_engine") and not is_full),
        "fused_grouped_mlp": float(row.flags.get("fused_grouped_mlp", False)),
    }
    if row.text("recipe_match") in GUESSED:
        return fields, ("dispatcher", "a2a_overlap", "cuda_graph", "fused_grouped_mlp")
    if _knows_recipe(row) or not has_experts:
        return fields, ()
    return fields, ("a2a_overlap",) if dispatcher else ("dispatcher", "a2a_overlap")


def _batch_of_row(row: Row, degrees: Fields) -> tuple[float, float, float, tuple[str, ...]]:
    """Return sequence, micro-batch and number of micro-batches."""
    assumed: tuple[str, ...] = ()
    sequence = row.number_or("seq", 0.0)
    if not sequence:
        printed = row.architecture.get("seq")
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
        total = micro_batch * degrees["data"]
        assumed += ("gbs",)
    num_microbatches = total / (micro_batch * degrees["data"])
    if num_microbatches < 1.0 or num_microbatches % 1.0:
        raise ValueError(
            f"gbs {total:g} is no multiple of mbs {micro_batch:g} * dp {degrees['data']:g}"
        )
    return sequence, micro_batch, num_microbatches, assumed


def _expert_degrees(
    row: Row,
    shape: ModelShape,
    degrees: Fields,
    device: Datasheet,
) -> tuple[float, float, tuple[str, ...]]:
    if not shape.experts:
        return 1.0, 1.0, ()
    assumed: tuple[str, ...] = ()
    stage_ranks = degrees["tensor"] * degrees["context"] * degrees["data"]
    expert_tensor = row.number_or("etp", 1.0)
    if "etp" not in row.numbers and degrees["tensor"] > 1.0:
        assumed = ("etp",)
    expert = row.number_or("ep", 0.0)
    if not expert:
        counts = (device.devices_per_node, int(stage_ranks), int(shape.experts))
        expert = float(math.gcd(*counts))
        assumed += ("ep",)
    if shape.experts % expert:
        raise ValueError(f"ep {expert:g} does not divide {shape.experts:g} experts")
    if stage_ranks % (expert * expert_tensor):
        raise ValueError(
            f"ep {expert:g} * etp {expert_tensor:g} does not divide the {stage_ranks:g} ranks "
            "of a pipeline stage"
        )
    return expert, expert_tensor, assumed


def _sharding(row: Row, engine: SoftwareFamily, degrees: Fields) -> tuple[float, float]:
    """Return the ZeRO stage and the ranks that state is sharded over, 0 for all."""
    text = row.text("zero_or_fsdp").lower().replace("_", "-")
    if not text or text == "ddp":
        return engine.zero_stage, 0.0
    if text.startswith("zero-"):
        stage = text.removeprefix("zero-")
        if stage not in ("0", "1", "2", "3"):
            raise ValueError(f"zero_or_fsdp {text[:40]!r} is not one of ZeRO-0 to ZeRO-3")
        # Megatron reduces gradients once, after the last micro-batch, whatever the stage.
        highest_stage = 3.0 if engine.software is Software.TORCH_FSDP else 1.0
        return min(float(stage), highest_stage), 0.0
    if "shard-grad-op" in text:
        return 2.0, 0.0
    name, _, ranks = text.partition("=")
    if name not in ("fsdp", "fsdp-full-shard", "hsdp", "megatron-fsdp", "fsdp2"):
        raise ValueError(f"zero_or_fsdp {text[:40]!r} is not known")
    if not ranks:
        return 3.0, 0.0
    if not 1 <= (parse_whole(ranks) or 0) <= degrees["data"] * degrees["context"]:
        raise ValueError(f"zero_or_fsdp {text[:40]!r} shards over more ranks than there are")
    return 3.0, float(ranks) if float(ranks) < degrees["data"] else 0.0


def _shards_quantized(row: Row, engine: SoftwareFamily, stage: float) -> bool:
    """Return whether parameters are sharded and gathered in 8 bits, once: MXFP8's are twice.

    Source: Megatron-Core 0.16, megatron_fsdp, `model_weight_buffer` and `transpose_weight_buffer`;
    recipes of Megatron-Bridge set `fp8_param_gather`.
    """
    is_once = stage >= 3.0 and parse_precision(row) is GemmPrecision.FP8
    return is_once and engine.family == "nemo"


def _read_recompute(row: Row, *, stage_layers: float, by_op: bool) -> dict[str, float] | None:
    """Return fields of `Strategies`, or None where the row does not say.

    Raises:
        ValueError: a module is not one of Megatron's.
    """
    text = "+".join(part for part in (row.text("recompute"), row.text("recompute_modules")) if part)
    whole = row.number_or("recompute_num_layers", 0.0)
    if not text and not whole:
        return None
    fields: dict[str, float] = {}
    for module in (part.strip().lower() for part in text.split("+")):
        if not module or module in (*NOTHING, *ALSO):
            continue
        if by_op and module.startswith("selective"):
            fields["recompute_by_op"] = 1.0
            continue
        if module not in FIELD_OF_MODULE:
            known = ", ".join(FIELD_OF_MODULE)
            raise ValueError(f"recompute {module[:40]!r} is none of none, {known}")
        fields[FIELD_OF_MODULE[module]] = 1.0
    if whole:
        fields["recompute_full"] = min(1.0, whole / stage_layers)
    return fields
