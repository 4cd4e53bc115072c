"""Convert a spec's model, pool and layouts to the columns that the analytic formulas read.

One model gives one `ModelShape` of plain numbers, one pool one `Hardware`; layouts become `Stages`
with one column each, shorter ones padded with empty stages.

Letters: C columns, S pipeline stages in execution order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from profilers.steps.config import LayerKind
from tuner.config.shapes import Grid, Hardware, ModelShape, Stages
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import SpecError
from tuner.prices.rated_gemm import gemm_share
from tuner.prices.train.constants import VECTOR_RATIO, GemmPrecision
from tuner.spec.cluster import Pool
from tuner.spec.linear_attention import LINEAR_KINDS, LINEAR_NAMES
from tuner.spec.model import Mixer, ModelSpec, QkNorm

PEAK_OF: Final[Mapping[GemmPrecision, Mapping[str, str]]] = {
    GemmPrecision.BF16: {"bf16": "bf16"},
    GemmPrecision.FP8: {"fp8": "fp8", "bf16": "bf16"},
    GemmPrecision.MXFP8: {"fp8": "fp8_block", "bf16": "bf16"},
    GemmPrecision.NVFP4: {"fp4": "nvfp4", "fp8": "fp8_block", "bf16": "bf16"},
    GemmPrecision.FP32: {"fp32": "fp32"},
}
"""Peaks of a datasheet that the linear layers run at, by precision, and the format of a kernel that
does (rated_gemm.py); the next one where a device has none."""

PRECISION_OF: Final[Mapping[str, GemmPrecision]] = {
    "bf16": GemmPrecision.BF16,
    "fp32": GemmPrecision.FP32,
    "fp8-delayed": GemmPrecision.FP8,
    "fp8-tensorwise": GemmPrecision.FP8,
    "fp8-blockwise": GemmPrecision.MXFP8,
    "mxfp8": GemmPrecision.MXFP8,
    "nvfp4": GemmPrecision.NVFP4,
}
"""Precisions that those of tuner/spec/goal.py are priced as. Block scales are priced as MXFP8,
whose kernels also scale inside the GEMM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers of one stage of one layout."""

    layers: int
    """Transformer layers; the model's order says which have experts."""
    embedding: bool = False
    head: bool = False
    mtp_layers: int = 0


def shape_of_model(model: ModelSpec, *, mtp_layers: int) -> ModelShape:
    """Return a model as numbers, trained with `mtp_layers` multi-token-prediction layers.

    Dense layers are priced as if they came first, also where a model interleaves them.
    """
    attention, moe = model.attention, model.moe
    is_mla = attention.kind == "mla"
    return ModelShape(
        **_layer_shares(model),
        **_linear_widths(model),
        **_indexer_sizes(model),
        **_compressors(model),
        hidden=float(model.hidden_size),
        heads=float(attention.num_heads),
        kv_heads=float(attention.num_kv_heads),
        head_dim=float(attention.head_dim),
        value_dim=float(attention.value_head_dim),
        is_mla=float(is_mla),
        q_lora_rank=float(attention.q_lora_rank or 0),
        kv_lora_rank=float(attention.kv_lora_rank),
        rope_dim=float(attention.qk_rope_head_dim),
        has_qk_norm=float(attention.qk_norm is not QkNorm.NONE),
        has_sinks=float(attention.has_sinks),
        has_output_gate=float(attention.has_output_gate),
        output_groups=float(attention.output_groups) if attention.kind == "shared_kv" else 0.0,
        output_rank=float(attention.output_rank),
        streams=float(model.residual_streams),
        window=float(attention.sliding_window or 0) if any(model.windowed) else 0.0,
        window_is_chunk=float(attention.window_is_chunk),
        windowed_ratio=sum(model.windowed) / max(model.num_attention_layers, 1),
        dense_ffn=float(model.dense_ffn_size),
        is_gated=float(model.ffn_is_gated),
        vocab=float(model.vocab_size),
        is_tied=float(model.tie_word_embeddings),
        dense_layers=float(model.num_layers - model.num_moe_layers),
        moe_layers=float(model.num_moe_layers),
        experts=float(moe.num_experts) if moe else 0.0,
        top_k=float(moe.computed_top_k) if moe else 0.0,
        zero_experts=float(moe.zero_experts) if moe else 0.0,
        num_groups=float(moe.num_groups) if moe else 1.0,
        groups_per_token=float(moe.groups_per_token) if moe else 1.0,
        moe_ffn=float(moe.expert_ffn_size) if moe else 0.0,
        moe_latent=float(moe.latent_size) if moe else 0.0,
        shared_ffn=float(moe.shared_ffn_size) if moe else 0.0,
        mtp_layers=float(mtp_layers),
        mtp_is_dense=float(model.layers[-1] is LayerKind.DENSE),
    )


def _layer_shares(model: ModelSpec) -> dict[str, float]:
    """Shares of the two kinds of layers that have each mixer, and a network."""
    is_moe = [kind is LayerKind.MOE for kind in model.layers]
    pairs = list(zip(is_moe, model.mixer_by_layer, strict=True))

    def share(*, of_moe: bool, mixer: Mixer) -> float:
        total = is_moe.count(of_moe)
        return pairs.count((of_moe, mixer)) / total if total else float(mixer is Mixer.ATTENTION)

    without = is_moe.count(False)
    return {
        "dense_attention": share(of_moe=False, mixer=Mixer.ATTENTION),
        "dense_linear": share(of_moe=False, mixer=Mixer.LINEAR),
        "dense_network": model.layers.count(LayerKind.DENSE) / without if without else 1.0,
        "moe_attention": share(of_moe=True, mixer=Mixer.ATTENTION),
        "moe_linear": share(of_moe=True, mixer=Mixer.LINEAR),
    }


def _indexer_sizes(model: ModelSpec) -> dict[str, float]:
    """Sizes of the indexer over tokens, or of that of the compressor which has one."""
    indexers = [
        model.attention.indexer,
        *(compressor.indexer for compressor in model.attention.compressors),
    ]
    indexer = next((spec for spec in indexers if spec is not None), None)
    if indexer is None:
        return {}
    return {
        "index_heads": float(indexer.num_heads),
        "index_dim": float(indexer.head_dim),
        "index_share": model.num_indexers / max(model.num_attention_layers, 1)
        if model.shared_indexers
        else 1.0,
        "index_top_k": float(indexer.top_k),
    }


def _compressors(model: ModelSpec) -> dict[str, float]:
    """Sizes of the two kinds of compressors, and the shares of the attention layers with each."""
    sizes: dict[str, float] = {}
    for compressor in model.attention.compressors:
        kind, keys = (
            ("hca", 0) if compressor.indexer is None else ("csa", compressor.indexer.head_dim)
        )
        share = model.compressor_by_layer.count(compressor) / max(model.num_attention_layers, 1)
        sizes |= {
            f"{kind}_ratio": float(compressor.ratio),
            f"{kind}_share": share,
            f"{kind}_outputs": float(compressor.outputs(model.attention.head_dim + keys)),
        }
    return sizes


def _linear_widths(model: ModelSpec) -> dict[str, float]:
    linear = model.linear
    if linear is None:
        return {}
    projections = LINEAR_KINDS[linear.kind].projections(linear)
    return {
        "linear_inputs": float(projections.inputs),
        "linear_rank": float(projections.low_rank),
        "linear_rank_outputs": float(projections.low_rank_outputs),
        "linear_heads": float(linear.num_value_heads),
        "linear_key_heads": float(linear.num_key_heads),
        "linear_key_dim": float(linear.key_head_dim),
        "linear_value_dim": float(linear.value_head_dim),
        "linear_chunk": float(linear.chunk_size),
        "linear_kind": float(LINEAR_NAMES.index(linear.kind)),
    }


def matmul_peak(sheet: Datasheet, precision: GemmPrecision) -> float:
    """Return the peak of GEMMs in FLOP/s, that of the next wider type where there is none."""
    vector = sheet.flop_per_s["bf16"] / VECTOR_RATIO
    return (sheet.flop_per_s | {"fp32": sheet.flop_per_s.get("fp32", vector)})[
        matmul_peak_type(sheet, precision)
    ]


def matmul_peak_type(sheet: Datasheet, precision: GemmPrecision) -> str:
    """Return the type of that peak."""
    *narrow, widest = PEAK_OF[precision]
    return next((name for name in narrow if name in sheet.flop_per_s), widest)


def matmul_share(sheet: Datasheet, precision: GemmPrecision) -> float:
    """Return the share of that peak which large GEMMs reach alone."""
    units = matmul_peak_type(sheet, precision)
    return gemm_share(sheet, units=units, dtype=PEAK_OF[precision][units])


def hardware_of_pool(sheet: Datasheet, pool: Pool, *, precision: GemmPrecision) -> Hardware:
    """Return a pool as numbers: the datasheet, and what the spec says instead of it.

    NICs of a machine are shared evenly by its devices; divided by the oversubscription.

    Raises:
        SpecError: the device is a processor, which has no datasheet.
    """
    if sheet.generation is Generation.PROCESSOR:
        raise SpecError(
            f"cluster.pools: {pool.name!r}: a processor has no datasheet to plan training or"
            " placement on; leave its 'device' out and name its profile, which the reference step"
            " is planned on"
        )
    nic = sheet.scale_out_bytes_per_s if pool.nic is None else pool.nic
    wide = GemmPrecision.BF16 if precision.is_narrow else precision
    return Hardware(
        matmul_flop_per_s=matmul_peak(sheet, precision),
        attention_flop_per_s=matmul_peak(sheet, wide),
        gemm_share=matmul_share(sheet, precision),
        bf16_share=matmul_share(sheet, wide),
        exponential_ratio=sheet.exponential_ratio,
        matrix_ratio=sheet.matrix_ratio,
        compute_units=float(sheet.compute_units),
        memory_bytes=float(pool.memory_per_device or sheet.memory_bytes),
        memory_bytes_per_s=sheet.memory_bytes_per_s,
        scale_up_bytes_per_s=sheet.scale_up_bytes_per_s,
        domain=float(pool.domain),
        devices_per_node=float(pool.devices_per_node),
        scale_out_bytes_per_s=nic * pool.nics / pool.devices_per_node / pool.oversubscription,
        host_bytes_per_s=sheet.host_bytes_per_s,
    )


def stages_of_layouts(model: ModelSpec, layouts: Sequence[Sequence[StageLayers]]) -> Stages:
    """Return layouts as columns, in the order given."""
    num_stages = max(len(layout) for layout in layouts)
    grids: dict[str, Grid] = {
        name: np.zeros((num_stages, len(layouts)))
        for name in ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")
    }
    dense_before = np.cumsum([0, *(kind is not LayerKind.MOE for kind in model.layers)])
    for column, layout in enumerate(layouts):
        count_S = np.array([stage.layers for stage in layout])
        end_S = np.cumsum(count_S)
        rows = slice(len(layout))
        dense_S = dense_before[end_S] - dense_before[end_S - count_S]
        grids["dense_SC"][rows, column] = dense_S
        grids["moe_SC"][rows, column] = count_S - dense_S
        grids["embedding_SC"][rows, column] = [stage.embedding for stage in layout]
        grids["head_SC"][rows, column] = [stage.head for stage in layout]
        grids["mtp_SC"][rows, column] = [stage.mtp_layers for stage in layout]
    return Stages(**grids)


def nic_bytes_per_s(pool: Pool) -> float:
    """The network bandwidth of one device of a pool, in bytes per second and direction.

    Raises:
        SpecError: neither the spec nor a device description states a NIC.
        UnknownDeviceError: the pool's device has no description.
    """
    nic = pool.nic
    if nic is None and pool.device is not None:
        nic = pool.sheet.scale_out_bytes_per_s
    if nic is None:
        raise SpecError(
            f"cluster: pool {pool.name!r} states no 'nic'; heterogeneous pools need its bandwidth"
        )
    return nic * pool.nics / pool.devices_per_node / pool.oversubscription
