"""What one row of each of aiconfigurator's tables says, in our operations and SI units.

aiconfigurator (NVIDIA, Apache-2.0) measures kernels of TensorRT-LLM, SGLang and vLLM. `latency` is
milliseconds, except in moe_a2a_perf and in columns that end in `_us`: microseconds. `message_size`
counts elements, as its collector divides nccl-tests' size by that of an element.

Tables that hold no operation of ours (other linear attention, quantisation kernels, vendor
calibrations) are absent here, and the importer names them. aiconfigurator_arrays.py reads the same
tables column by column.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from profilers.imports.columns import Row
from profilers.records import Direction


class Entry(NamedTuple):
    """One measured size."""

    operation: str
    kind: str
    dtype: str
    direction: Direction
    axes: dict[str, int]
    time_s: float


DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float": "fp32",
}
"""Their names for ours; others, such as fp8_block, keep their own."""

ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp16": 2, "bf16": 2, "int8": 1, "fp8": 1, "fp32": 4}

COLLECTIVES: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

DEVICES_PER_NODE: Final = 8
"""Of the servers on which DeepEP was measured; its tables state nodes, not ranks."""

LONGEST_NAME: Final = 200
"""Characters of a dtype, distribution or library that are taken from a row."""

LONGEST_SHOWN: Final = 80
"""Characters of a value that a message repeats."""


def _gemm(row: Row) -> Iterator[Entry]:
    axes = {name: _count(row, name) for name in ("m", "n", "k")}
    yield Entry("gemm", "", _dtype(row, "gemm_dtype"), "forward", axes, _milliseconds(row))


def _prefill(row: Row) -> Iterator[Entry]:
    if _optional(row, "step") or _optional(row, "beam_width") > 1:
        return
    axes = {
        "batch": _count(row, "batch_size"),
        "sequence": _count(row, "isl"),
        "heads": _count(row, "num_heads"),
        "kv_heads": _count(row, "num_key_value_heads"),
        "head_dim": _count(row, "head_dim"),
    }
    dtype, time_s = _dtype(row, "attn_dtype"), _milliseconds(row)
    window = _optional(row, "window_size")
    if window:
        yield Entry(
            "windowed_attention",
            _stored(row, dtype),
            dtype,
            "forward",
            {**axes, "window": window},
            time_s,
        )
    else:
        yield Entry("attention", _stored(row, dtype), dtype, "forward", axes, time_s)


def _decode(row: Row) -> Iterator[Entry]:
    if _optional(row, "beam_width") > 1:
        return
    axes = {
        "batch": _count(row, "batch_size"),
        "past": _optional(row, "step"),
        "heads": _count(row, "num_heads"),
        "kv_heads": _count(row, "num_key_value_heads"),
        "head_dim": _count(row, "head_dim"),
        "window": _optional(row, "window_size"),
    }
    dtype = _dtype(row, "attn_dtype")
    kind, time_s = _stored(row, dtype), _milliseconds(row)
    yield Entry("decode_attention", kind, dtype, "forward", axes, time_s)


def _latent(row: Row, *, part: str, is_decode: bool) -> Iterator[Entry]:
    """MLA; the heads are those of the rank, whatever tensor parallelism left it with them."""
    dtype = _dtype(row, "mla_dtype")
    words = [part, _stored(row, dtype)]
    if row.get("gemm_type"):
        words.append(f"gemm_{_dtype(row, 'gemm_type')}")
    kind = "/".join(word for word in words if word)
    axes = {"batch": _count(row, "batch_size"), "heads": _count(row, "num_heads")}
    if is_decode:
        axes["past"] = _optional(row, "step")
        yield Entry("latent_decode", kind, dtype, "forward", axes, _milliseconds(row))
    elif not _optional(row, "step"):
        axes["sequence"] = _count(row, "isl")
        yield Entry("latent_attention", kind, dtype, "forward", axes, _milliseconds(row))


def _latent_product(row: Row) -> Iterator[Entry]:
    """Absorbed MLA's batched GEMMs around the kernel."""
    kind = _text(row, "op_name").removeprefix("mla_gen_")
    axes = {"tokens": _count(row, "num_tokens"), "heads": _count(row, "num_heads")}
    dtype = _dtype(row, "bmm_dtype")
    yield Entry("latent_product", kind, dtype, "forward", axes, _milliseconds(row))


def _sparse_latent(row: Row, *, is_decode: bool) -> Iterator[Entry]:
    """DeepSeek's sparse attention as a module; a release that skips its indexer is another one."""
    if "skip_indexer" in _text(row, "op_name"):
        return
    dtype = _dtype(row, "mla_dtype")
    gemm = f"gemm_{_dtype(row, 'gemm_type')}"
    words = (_text(row, "architecture"), _stored(row, dtype), gemm)
    kind = "/".join(word for word in words if word)
    axes = {"batch": _count(row, "batch_size"), "past": _optional(row, "step")}
    if not is_decode:
        axes["sequence"] = _count(row, "isl")
    axes["heads"] = _count(row, "num_heads")
    operation = "sparse_latent_decode" if is_decode else "sparse_latent_attention"
    yield Entry(operation, kind, dtype, "forward", axes, _milliseconds(row))


def _gated_delta(row: Row) -> Iterator[Entry]:
    if (_count(row, "head_k_dim"), _count(row, "head_v_dim")) != (128, 128):
        return
    axes = {
        "batch": _count(row, "batch_size"),
        "sequence": max(_optional(row, "seq_len"), 1),
        "key_heads": _count(row, "num_k_heads"),
        "value_heads": _count(row, "num_v_heads"),
    }
    kind = f"{_text(row, 'phase')}/{_text(row, 'kernel_source')}"
    yield Entry("gated_delta", kind, "bf16", "forward", axes, _milliseconds(row))


def _moe(row: Row, *, prefix: str = "") -> Iterator[Entry]:
    axes = {
        "tokens": _count(row, "num_tokens"),
        "hidden": _count(row, "hidden_size"),
        "ffn": _count(row, "inter_size"),
        "top_k": _count(row, "topk"),
        "experts": _count(row, "num_experts"),
        "tensor": _count(row, "moe_tp_size"),
        "expert": _count(row, "moe_ep_size"),
    }
    words = [prefix, _text(row, "distribution")]
    if "nongated" in _text(row, "kernel_source"):
        words.append("nongated")
    if row.get("num_slots") not in (None, axes["experts"]):
        words.append(f"{_count(row, 'num_slots')}_slots")
    kind = "/".join(word for word in words if word)
    yield Entry("moe", kind, _dtype(row, "moe_dtype"), "forward", axes, _milliseconds(row))


def _nccl(row: Row) -> Iterator[Entry]:
    name, dtype = _text(row, "op_name"), _dtype(row, "nccl_dtype")
    if name not in COLLECTIVES:
        raise ValueError(f"op_name {name!r} is not one of {', '.join(COLLECTIVES)}")
    yield _collective(row, kind=COLLECTIVES[name], dtype=dtype)


def _custom_all_reduce(row: Row) -> Iterator[Entry]:
    """A framework's own all-reduce kernel, beside NCCL's."""
    named = next((n for n in ("backend", "implementation") if row.get(n)), "kernel_source")
    library = _text(row, named).lower()
    yield _collective(row, kind=f"all_reduce/{library}", dtype=_dtype(row, "allreduce_dtype"))


def _collective(row: Row, *, kind: str, dtype: str) -> Entry:
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"the size of an element of {dtype!r} is not known")
    ranks = _count(row, "num_gpus")
    size = _count(row, "message_size") * ELEMENT_BYTES[dtype]
    axes = {"bytes": size, "ranks": ranks, "stride": 1, "world": ranks}
    # Two-byte elements are what every other collective of a profile is measured with.
    written = "" if ELEMENT_BYTES[dtype] == 2 else dtype
    return Entry("collective", kind, written, "", axes, _milliseconds(row))


def _deepep_normal(row: Row) -> Iterator[Entry]:
    for half in ("dispatch", "combine"):
        parts = (f"{half}_transmit_us", f"{half}_notify_us")
        time_s = sum(_number(row, part) for part in parts) * 1e-6
        units = _optional(row, f"{half}_sms")
        yield _deepep(row, f"deepep_normal_{half}", units=units, time_s=time_s)


def _deepep_low_latency(row: Row) -> Iterator[Entry]:
    for half in ("dispatch", "combine"):
        time_s = _number(row, f"{half}_avg_t_us") * 1e-6
        yield _deepep(row, f"deepep_low_latency_{half}", units=0, time_s=time_s)


def _deepep(row: Row, kind: str, *, units: int, time_s: float) -> Entry:
    nodes = _count(row, "node_num")
    axes = {
        "tokens": _count(row, "num_token"),
        "hidden": _count(row, "hidden_size"),
        "top_k": _count(row, "num_topk"),
        "experts": _count(row, "num_experts"),
        "ranks": nodes * DEVICES_PER_NODE,
        "nodes": nodes,
        "units": units,
    }
    return Entry("expert_all_to_all", kind, "", "", axes, time_s)


def _moe_all_to_all(row: Row) -> Iterator[Entry]:
    axes = {
        "tokens": _count(row, "num_tokens"),
        "hidden": _count(row, "hidden_size"),
        "top_k": _count(row, "topk"),
        "experts": _count(row, "num_experts"),
        "ranks": _count(row, "ep_size"),
        "nodes": _count(row, "node_num"),
        "units": _optional(row, "sms"),
    }
    kind = f"{_text(row, 'comm_backend')}_{_text(row, 'phase')}"
    dtype = _dtype(row, "comm_dtype")
    written = "" if dtype == "default" else dtype
    yield Entry("expert_all_to_all", kind, written, "", axes, _number(row, "latency") * 1e-6)


class TableFormat(NamedTuple):
    """How the rows of one table are read."""

    entries: Callable[[Row], Iterator[Entry]]
    operations: frozenset[str]
    """What they can become."""


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
    "wideep_moe_perf": TableFormat(partial(_moe, prefix="wideep"), _EXPERTS),
    "wideep_context_moe_perf": TableFormat(partial(_moe, prefix="wideep_context"), _EXPERTS),
    "wideep_generation_moe_perf": TableFormat(partial(_moe, prefix="wideep_generation"), _EXPERTS),
    "nccl_perf": TableFormat(_nccl, _COLLECTIVE),
    "custom_allreduce_perf": TableFormat(_custom_all_reduce, _COLLECTIVE),
    "wideep_deepep_normal_perf": TableFormat(_deepep_normal, _EXPERT_TRAFFIC),
    "wideep_deepep_ll_perf": TableFormat(_deepep_low_latency, _EXPERT_TRAFFIC),
    "moe_a2a_perf": TableFormat(_moe_all_to_all, _EXPERT_TRAFFIC),
}
"""By file name."""


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {str(value)[:LONGEST_SHOWN]!r}, must be a number")
    return float(value)


def _count(row: Row, name: str) -> int:
    value = _number(row, name)
    if value < 1.0 or value != int(value):
        raise ValueError(f"{name} is {value}, must be a whole number of at least 1")
    return int(value)


def _optional(row: Row, name: str) -> int:
    """A column that not every release has; 0 where it is absent."""
    return 0 if row.get(name) in (None, 0) else _count(row, name)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise ValueError(f"{name} is {str(value)[:LONGEST_SHOWN]!r}, must be a short text")
    return value


def _dtype(row: Row, name: str) -> str:
    text = _text(row, name)
    return DTYPES.get(text, text)


def _milliseconds(row: Row) -> float:
    value = _number(row, "latency")
    if value <= 0.0:
        raise ValueError(f"latency is {value}, must be positive")
    return value * 1e-3


def _stored(row: Row, dtype: str) -> str:
    """What keys and values are stored as, where it is not what the kernel computes in."""
    stored = _dtype(row, "kv_cache_dtype")
    return "" if stored == dtype else f"kv_{stored}"
