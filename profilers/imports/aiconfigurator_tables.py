"""Readers of aiconfigurator's tables, in our operations and SI units.

aiconfigurator (NVIDIA, Apache-2.0) measures kernels of TensorRT-LLM, SGLang and vLLM. `latency` is
milliseconds, except in moe_a2a_perf and in columns that end in `_us`: microseconds. `message_size`
counts elements, as its collector divides nccl-tests' size by that of an element.

Tables that hold no operation of ours (other linear attention, quantisation kernels, vendor
calibrations) are absent here, and the importer names them.

Letters: N rows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from profilers.arrays import Counts, Seconds, Texts
from profilers.imports.aiconfigurator_columns import (
    DTYPES,
    Columns,
    cells,
    counts,
    dtypes,
    joined,
    num_rows,
    numbers,
    optional_counts,
    positive,
    same,
    stored_types,
    texts,
)

ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp16": 2, "bf16": 2, "int8": 1, "fp8": 1, "fp32": 4}

COLLECTIVES: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

DEVICES_PER_NODE: Final = 8
"""Devices of a server on which DeepEP was measured; its tables state nodes, not ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableRows:
    """Rows of one operation in one table."""

    operation: str
    kind_N: Texts
    dtype_N: Texts
    axes_N: Mapping[str, Counts]
    time_s_N: Seconds
    keep_N: npt.NDArray[np.bool_]
    """Rows that are of this operation."""


def _rows(
    columns: Columns,
    operation: str,
    *,
    kind: Texts | str = "",
    dtype: Texts | str = "",
    axes: Mapping[str, Counts],
    keep_N: npt.NDArray[np.bool_] | None = None,
    time_s_N: Seconds | None = None,
) -> TableRows:
    """Return rows: every one, with its latency in milliseconds, where nothing else is said."""
    return TableRows(
        operation=operation,
        kind_N=same(columns, kind) if isinstance(kind, str) else kind,
        dtype_N=same(columns, dtype) if isinstance(dtype, str) else dtype,
        axes_N=axes,
        time_s_N=positive(columns, "latency") * 1e-3 if time_s_N is None else time_s_N,
        keep_N=np.ones(num_rows(columns), dtype=np.bool_) if keep_N is None else keep_N,
    )


def _axes(columns: Columns, **names: str) -> dict[str, Counts]:
    return {axis: counts(columns, name) for axis, name in names.items()}


_heads = partial(_axes, heads="num_heads", kv_heads="num_key_value_heads", head_dim="head_dim")


def _gemm(columns: Columns) -> Iterator[TableRows]:
    axes = _axes(columns, m="m", n="n", k="k")
    yield _rows(columns, "gemm", dtype=dtypes(columns, "gemm_dtype"), axes=axes)


def _prefill(columns: Columns) -> Iterator[TableRows]:
    dtype_N = dtypes(columns, "attn_dtype")
    kind_N = stored_types(columns, dtype_N)
    axes = _axes(columns, batch="batch_size", sequence="isl") | _heads(columns)
    window_N = optional_counts(columns, "window_size")
    is_whole_N = optional_counts(columns, "step") == 0
    is_whole_N &= optional_counts(columns, "beam_width") <= 1
    rows = partial(_rows, columns, kind=kind_N, dtype=dtype_N)
    yield rows("attention", axes=axes, keep_N=is_whole_N & (window_N == 0))
    windowed = {**axes, "window": window_N}
    yield rows("windowed_attention", axes=windowed, keep_N=is_whole_N & (window_N > 0))


def _decode(columns: Columns) -> Iterator[TableRows]:
    dtype_N = dtypes(columns, "attn_dtype")
    axes = {
        "batch": counts(columns, "batch_size"),
        "past": optional_counts(columns, "step"),
        **_heads(columns),
        "window": optional_counts(columns, "window_size"),
    }
    is_greedy_N = optional_counts(columns, "beam_width") <= 1
    kind_N = stored_types(columns, dtype_N)
    yield _rows(
        columns, "decode_attention", kind=kind_N, dtype=dtype_N, axes=axes, keep_N=is_greedy_N
    )


def _latent(columns: Columns, *, part: str, is_decode: bool) -> Iterator[TableRows]:
    """MLA; the heads are those of the rank, whatever tensor parallelism left it with them."""
    dtype_N = dtypes(columns, "mla_dtype")
    words = [same(columns, part), stored_types(columns, dtype_N)]
    if any(cells(columns, "gemm_type")):
        words.append("gemm_" + dtypes(columns, "gemm_type"))
    axes = _axes(columns, batch="batch_size", heads="num_heads")
    step_N = optional_counts(columns, "step")
    rows = partial(_rows, columns, kind=joined(*words), dtype=dtype_N)
    if is_decode:
        yield rows("latent_decode", axes={**axes, "past": step_N})
    else:
        axes["sequence"] = counts(columns, "isl")
        yield rows("latent_attention", axes=axes, keep_N=step_N == 0)


def _latent_product(columns: Columns) -> Iterator[TableRows]:
    """Absorbed MLA's batched GEMMs around the kernel."""
    kind_N = texts(columns, "op_name", lambda text: text.removeprefix("mla_gen_"))
    axes = _axes(columns, tokens="num_tokens", heads="num_heads")
    dtype_N = dtypes(columns, "bmm_dtype")
    yield _rows(columns, "latent_product", kind=kind_N, dtype=dtype_N, axes=axes)


def _sparse_latent(columns: Columns, *, is_decode: bool) -> Iterator[TableRows]:
    """DeepSeek's sparse attention as a module; a release that skips its indexer is another one."""
    dtype_N = dtypes(columns, "mla_dtype")
    gemm_N = "gemm_" + dtypes(columns, "gemm_type")
    axes = _axes(columns, batch="batch_size", heads="num_heads")
    axes["past"] = optional_counts(columns, "step")
    if not is_decode:
        axes["sequence"] = counts(columns, "isl")
    yield _rows(
        columns,
        "sparse_latent_decode" if is_decode else "sparse_latent_attention",
        kind=joined(texts(columns, "architecture"), stored_types(columns, dtype_N), gemm_N),
        dtype=dtype_N,
        axes=axes,
        keep_N=~_holds(columns, "op_name", "skip_indexer"),
    )


def _gated_delta(columns: Columns) -> Iterator[TableRows]:
    axes = _axes(columns, batch="batch_size", key_heads="num_k_heads", value_heads="num_v_heads")
    axes["sequence"] = np.maximum(optional_counts(columns, "seq_len"), 1)
    kind_N = joined(texts(columns, "phase"), texts(columns, "kernel_source"))
    is_known_N = (counts(columns, "head_k_dim") == 128) & (counts(columns, "head_v_dim") == 128)
    yield _rows(columns, "gated_delta", kind=kind_N, dtype="bf16", axes=axes, keep_N=is_known_N)


def _moe(columns: Columns, *, prefix: str = "") -> Iterator[TableRows]:
    axes = _axes(
        columns,
        tokens="num_tokens",
        hidden="hidden_size",
        ffn="inter_size",
        top_k="topk",
        experts="num_experts",
        tensor="moe_tp_size",
        expert="moe_ep_size",
    )
    kind_N = texts(columns, "distribution", lambda load: prefix + load)
    kind_N[_holds(columns, "kernel_source", "nongated")] += "/nongated"
    slots_N = optional_counts(columns, "num_slots")
    has_more_N = (slots_N > 0) & (slots_N != axes["experts"])
    kind_N[has_more_N] += [f"/{slots}_slots" for slots in slots_N[has_more_N].tolist()]
    yield _rows(columns, "moe", kind=kind_N, dtype=dtypes(columns, "moe_dtype"), axes=axes)


def _nccl(columns: Columns) -> Iterator[TableRows]:
    def kind(name: str) -> str:
        if name not in COLLECTIVES:
            raise ValueError(f"op_name {name!r} is not one of {', '.join(COLLECTIVES)}")
        return COLLECTIVES[name]

    yield _collective(columns, texts(columns, "op_name", kind), dtype="nccl_dtype")


def _custom_all_reduce(columns: Columns) -> Iterator[TableRows]:
    """A framework's own all-reduce kernel, beside NCCL's."""
    place = next((n for n in ("backend", "implementation") if n in columns), "kernel_source")
    kind_N = texts(columns, place, lambda text: f"all_reduce/{text.lower()}")
    yield _collective(columns, kind_N, dtype="allreduce_dtype")


def _collective(columns: Columns, kind_N: Texts, *, dtype: str) -> TableRows:
    def element(text: str) -> str:
        name = DTYPES.get(text, text)
        if name not in ELEMENT_BYTES:
            raise ValueError(f"the size of an element of {name!r} is not known")
        return name

    dtype_N = texts(columns, dtype, element)
    element_N = np.array([ELEMENT_BYTES[name] for name in dtype_N], dtype=np.int64)
    ranks_N = counts(columns, "num_gpus")
    axes = {"bytes": counts(columns, "message_size") * element_N, "ranks": ranks_N}
    axes |= {"stride": np.ones_like(ranks_N), "world": ranks_N}
    # Two-byte elements are what every other collective of a profile is measured with.
    written_N = np.where(element_N == 2, "", dtype_N).astype(object)
    return _rows(columns, "collective", kind=kind_N, dtype=written_N, axes=axes)


def _deepep_normal(columns: Columns) -> Iterator[TableRows]:
    for half in ("dispatch", "combine"):
        parts = (f"{half}_transmit_us", f"{half}_notify_us")
        time_s_N = np.sum([numbers(columns, part) for part in parts], axis=0) * 1e-6
        units_N = optional_counts(columns, f"{half}_sms")
        yield _deepep(columns, f"deepep_normal_{half}", units_N=units_N, time_s_N=time_s_N)


def _deepep_low_latency(columns: Columns) -> Iterator[TableRows]:
    for half in ("dispatch", "combine"):
        time_s_N = numbers(columns, f"{half}_avg_t_us") * 1e-6
        none_N = np.zeros(num_rows(columns), dtype=np.int64)
        yield _deepep(columns, f"deepep_low_latency_{half}", units_N=none_N, time_s_N=time_s_N)


def _deepep(columns: Columns, kind: str, *, units_N: Counts, time_s_N: Seconds) -> TableRows:
    axes = _axes(
        columns,
        tokens="num_token",
        hidden="hidden_size",
        top_k="num_topk",
        experts="num_experts",
        nodes="node_num",
    )
    axes |= {"ranks": axes["nodes"] * DEVICES_PER_NODE, "units": units_N}
    return _rows(columns, "expert_all_to_all", kind=kind, axes=axes, time_s_N=time_s_N)


def _moe_all_to_all(columns: Columns) -> Iterator[TableRows]:
    axes = _axes(
        columns,
        tokens="num_tokens",
        hidden="hidden_size",
        top_k="topk",
        experts="num_experts",
        ranks="ep_size",
        nodes="node_num",
    )
    axes["units"] = optional_counts(columns, "sms")
    kind_N = texts(columns, "comm_backend") + "_" + texts(columns, "phase")
    dtype_N = dtypes(columns, "comm_dtype")
    written_N = np.where(dtype_N == "default", "", dtype_N).astype(object)
    time_s_N = numbers(columns, "latency") * 1e-6
    yield _rows(
        columns, "expert_all_to_all", kind=kind_N, dtype=written_N, axes=axes, time_s_N=time_s_N
    )


def _holds(columns: Columns, name: str, part: str) -> npt.NDArray[np.bool_]:
    """Return which texts contain a part, [N]."""
    held_N = texts(columns, name, lambda text: part if part in text else "")
    return np.array(held_N != "", dtype=np.bool_)


class TableFormat(NamedTuple):
    """Reader of one table."""

    read: Callable[[Columns], Iterator[TableRows]]
    operations: frozenset[str]
    """Operations that the table's rows can hold."""


_PREFILL: Final = frozenset({"attention", "windowed_attention"})
_DECODE: Final = frozenset({"decode_attention"})
_LATENT: Final = frozenset({"latent_attention"})
_LATENT_DECODE: Final = frozenset({"latent_decode"})
_LATENT_PRODUCT: Final = frozenset({"latent_product"})
_SPARSE: Final = frozenset({"sparse_latent_attention"})
_SPARSE_DECODE: Final = frozenset({"sparse_latent_decode"})
_GATED_DELTA: Final = frozenset({"gated_delta"})
_EXPERTS: Final = frozenset({"moe"})
_COLLECTIVE: Final = frozenset({"collective"})
_EXPERT_TRAFFIC: Final = frozenset({"expert_all_to_all"})

TABLES: Final[Mapping[str, TableFormat]] = {
    "gemm_perf": TableFormat(_gemm, frozenset({"gemm"})),
    "context_attention_perf": TableFormat(_prefill, _PREFILL),
    "generation_attention_perf": TableFormat(_decode, _DECODE),
    "context_mla_perf": TableFormat(partial(_latent, part="core", is_decode=False), _LATENT),
    "generation_mla_perf": TableFormat(
        partial(_latent, part="core", is_decode=True), _LATENT_DECODE
    ),
    "mla_context_module_perf": TableFormat(
        partial(_latent, part="module", is_decode=False), _LATENT
    ),
    "mla_generation_module_perf": TableFormat(
        partial(_latent, part="module", is_decode=True), _LATENT_DECODE
    ),
    "mla_bmm_perf": TableFormat(_latent_product, _LATENT_PRODUCT),
    "dsa_context_module_perf": TableFormat(partial(_sparse_latent, is_decode=False), _SPARSE),
    "dsa_generation_module_perf": TableFormat(
        partial(_sparse_latent, is_decode=True), _SPARSE_DECODE
    ),
    "gdn_perf": TableFormat(_gated_delta, _GATED_DELTA),
    "moe_perf": TableFormat(_moe, _EXPERTS),
    "wideep_moe_perf": TableFormat(partial(_moe, prefix="wideep/"), _EXPERTS),
    "wideep_context_moe_perf": TableFormat(partial(_moe, prefix="wideep_context/"), _EXPERTS),
    "wideep_generation_moe_perf": TableFormat(partial(_moe, prefix="wideep_generation/"), _EXPERTS),
    "nccl_perf": TableFormat(_nccl, _COLLECTIVE),
    "custom_allreduce_perf": TableFormat(_custom_all_reduce, _COLLECTIVE),
    "wideep_deepep_normal_perf": TableFormat(_deepep_normal, _EXPERT_TRAFFIC),
    "wideep_deepep_ll_perf": TableFormat(_deepep_low_latency, _EXPERT_TRAFFIC),
    "moe_a2a_perf": TableFormat(_moe_all_to_all, _EXPERT_TRAFFIC),
}
"""Formats by the name of a table's file."""
