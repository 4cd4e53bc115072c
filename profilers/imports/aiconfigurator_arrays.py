"""aiconfigurator's tables of one system as arrays, for callers that need every framework at once.

A profile holds one machine with one software. A comparison of engines needs the tables of all of
them, more than a million rows, so that they are read column by column here and never become
records. Names, kinds, axes and units are those that aiconfigurator_tables.py gives to the same
rows: a table that was imported and stored says what is said here.

Letters: N rows. Not covered: TensorRT-LLM's table of wide expert parallelism, the one of all-to-all
kernels beside DeepEP's, and attention with a window, which only the importer reads.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.arrays import Arrays, Counts, Texts
from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_columns import (
    Columns,
    counts,
    dtypes,
    every_row,
    holds_part,
    joined,
    numbers,
    optional_counts,
    read_columns,
    renamed,
    same,
    stored_types,
)
from profilers.imports.aiconfigurator_tables import (
    COLLECTIVES,
    DEVICES_PER_NODE,
    ELEMENT_BYTES,
    TABLES,
)
from profilers.imports.columns import table_name
from profilers.records import AXES, Source

PACKAGE: Final = "aiconfigurator_core"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Read:
    """What one table says: its rows in our words."""

    operation: str
    kind_N: Texts
    dtype_N: Texts
    axes_N: dict[str, Counts]
    keep_N: npt.NDArray[np.bool_]
    time_s_N: npt.NDArray[np.float64] | None = None
    """None: the table's column of latencies."""


def installed_systems() -> Path | None:
    """The folder of the installed package's tables, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) / "systems" if places else None


def holds_system(root: Path, *, system: str) -> bool:
    """Whether a systems folder has a known table of a system."""
    return any(True for _ in _files(root, system))


def read_system(
    root: Path, *, system: str, operations: Collection[str] | None = None
) -> tuple[Arrays, ...]:
    """Read known tables of a system below a systems folder; empty where it has none.

    Args:
        root: the systems folder.
        system: name of the system.
        operations: those whose tables are read; None: every one.

    Raises:
        ProfileUnreadableError: a table is damaged, too large or lacks a column.
    """
    tables: list[Arrays] = []
    for file, name in _files(root, system):
        if operations is None or TABLES[name].operations & set(operations):
            *_, framework, version, _ = file.parts
            tables.extend(_arrays(file, name, framework=framework, version=version))
    return tuple(tables)


def _files(root: Path, system: str) -> Iterator[tuple[Path, str]]:
    """Every table that is known, with its name."""
    places = [root / "data" / system, root / system]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        return
    for file in sorted(folder.rglob("*.parquet")):
        name = table_name(file)
        if name is not None and name in _READERS and len(file.relative_to(folder).parts) >= 3:
            yield file, name


def _arrays(file: Path, name: str, *, framework: str, version: str) -> Iterator[Arrays]:
    columns = read_columns(file)
    for reader in _READERS[name]:
        try:
            read = reader(columns)
            time_s_N = read.time_s_N
            if time_s_N is None:
                time_s_N = numbers(columns, "latency") * 1e-3
        except (KeyError, ValueError) as error:
            raise ProfileUnreadableError(f"{file}: column {error} is missing or odd") from error
        yield from _kept(read, time_s_N, framework=framework, version=version)


def _kept(
    read: _Read, time_s_N: npt.NDArray[np.float64], *, framework: str, version: str
) -> Iterator[Arrays]:
    """Rows of our operations with a time; nothing where there are none."""
    keep_N = read.keep_N & np.isfinite(time_s_N) & (time_s_N > 0.0)
    if not keep_N.any():
        return
    is_shared = read.operation == "collective" and framework == "nccl"
    yield Arrays(
        operation=read.operation,
        software="" if is_shared else framework.lower(),
        version=version,
        source=Source.IMPORTED,
        kind_N=read.kind_N[keep_N],
        dtype_N=read.dtype_N[keep_N],
        axes_N={axis: read.axes_N[axis][keep_N] for axis in AXES[read.operation]},
        time_s_N=time_s_N[keep_N],
    )


def _gemm(columns: Columns) -> _Read:
    axes = {name: counts(columns, name) for name in ("m", "n", "k")}
    dtype_N = dtypes(columns, "gemm_dtype")
    return _Read(
        operation="gemm",
        kind_N=same(columns, ""),
        dtype_N=dtype_N,
        axes_N=axes,
        keep_N=every_row(columns),
    )


def _heads(columns: Columns) -> dict[str, Counts]:
    return {
        "heads": counts(columns, "num_heads"),
        "kv_heads": counts(columns, "num_key_value_heads"),
        "head_dim": counts(columns, "head_dim"),
    }


def _prefill(columns: Columns) -> _Read:
    dtype_N = dtypes(columns, "attn_dtype")
    axes = {"batch": counts(columns, "batch_size"), "sequence": counts(columns, "isl")}
    is_whole = (optional_counts(columns, "step") == 0) & (
        optional_counts(columns, "window_size") == 0
    )
    return _Read(
        operation="attention",
        kind_N=stored_types(columns, dtype_N),
        dtype_N=dtype_N,
        axes_N={**axes, **_heads(columns)},
        keep_N=is_whole & (optional_counts(columns, "beam_width") <= 1),
    )


def _decode(columns: Columns) -> _Read:
    dtype_N = dtypes(columns, "attn_dtype")
    return _Read(
        operation="decode_attention",
        kind_N=stored_types(columns, dtype_N),
        dtype_N=dtype_N,
        axes_N={
            "batch": counts(columns, "batch_size"),
            "past": optional_counts(columns, "step"),
            **_heads(columns),
            "window": optional_counts(columns, "window_size"),
        },
        keep_N=optional_counts(columns, "beam_width") <= 1,
    )


def _latent(columns: Columns, *, part: str, is_decode: bool) -> _Read:
    dtype_N = dtypes(columns, "mla_dtype")
    gemm_N = same(columns, "")
    if "gemm_type" in columns:
        gemm_N = renamed(dtypes(columns, "gemm_type"), lambda text: f"gemm_{text}" if text else "")
    axes = {"batch": counts(columns, "batch_size")}
    step_N = optional_counts(columns, "step")
    axes |= {"past": step_N} if is_decode else {"sequence": counts(columns, "isl")}
    return _Read(
        operation="latent_decode" if is_decode else "latent_attention",
        kind_N=joined(same(columns, part), stored_types(columns, dtype_N), gemm_N),
        dtype_N=dtype_N,
        axes_N={**axes, "heads": counts(columns, "num_heads")},
        keep_N=every_row(columns) if is_decode else step_N == 0,
    )


def _latent_product(columns: Columns) -> _Read:
    names = {"mla_gen_pre": "pre", "mla_gen_post": "post"}
    return _Read(
        operation="latent_product",
        kind_N=renamed(columns["op_name"], lambda text: names.get(text, text)),
        dtype_N=dtypes(columns, "bmm_dtype"),
        axes_N={"tokens": counts(columns, "num_tokens"), "heads": counts(columns, "num_heads")},
        keep_N=every_row(columns),
    )


def _sparse_latent(columns: Columns, *, is_decode: bool) -> _Read:
    """DeepSeek's sparse attention as a module; those that skip the indexer are other ones."""
    dtype_N = dtypes(columns, "mla_dtype")
    gemm_N = renamed(dtypes(columns, "gemm_type"), lambda text: f"gemm_{text}")
    skips = holds_part(columns["op_name"], "skip_indexer")
    axes = {"batch": counts(columns, "batch_size"), "past": optional_counts(columns, "step")}
    if not is_decode:
        axes["sequence"] = counts(columns, "isl")
    operation = "sparse_latent_decode" if is_decode else "sparse_latent_attention"
    axes["heads"] = counts(columns, "num_heads")
    return _Read(
        operation=operation,
        kind_N=joined(
            renamed(columns["architecture"], str), stored_types(columns, dtype_N), gemm_N
        ),
        dtype_N=dtype_N,
        axes_N=axes,
        keep_N=~skips,
    )


def _gated_delta(columns: Columns) -> _Read:
    return _Read(
        operation="gated_delta",
        kind_N=joined(renamed(columns["phase"], str), renamed(columns["kernel_source"], str)),
        dtype_N=same(columns, "bf16"),
        axes_N={
            "batch": counts(columns, "batch_size"),
            "sequence": np.maximum(optional_counts(columns, "seq_len"), 1),
            "key_heads": counts(columns, "num_k_heads"),
            "value_heads": counts(columns, "num_v_heads"),
        },
        keep_N=(counts(columns, "head_k_dim") == 128) & (counts(columns, "head_v_dim") == 128),
    )


def _moe(columns: Columns, *, prefix: str = "") -> _Read:
    is_gated_N = ~holds_part(columns["kernel_source"], "nongated")
    load_N = renamed(columns["distribution"], lambda load: prefix + load)
    ungated_N = renamed(columns["distribution"], lambda load: f"{prefix}{load}/nongated")
    return _Read(
        operation="moe",
        kind_N=np.where(is_gated_N, load_N, ungated_N),
        dtype_N=dtypes(columns, "moe_dtype"),
        axes_N={
            "tokens": counts(columns, "num_tokens"),
            "hidden": counts(columns, "hidden_size"),
            "ffn": counts(columns, "inter_size"),
            "top_k": counts(columns, "topk"),
            "experts": counts(columns, "num_experts"),
            "tensor": counts(columns, "moe_tp_size"),
            "expert": counts(columns, "moe_ep_size"),
        },
        keep_N=every_row(columns),
    )


def _collective(columns: Columns, *, kind_N: Texts, dtype_N: Texts) -> _Read:
    element_N = np.array([ELEMENT_BYTES.get(str(name), 0) for name in dtype_N], dtype=np.int64)
    ranks_N = counts(columns, "num_gpus")
    return _Read(
        operation="collective",
        kind_N=kind_N,
        dtype_N=np.where(element_N == 2, "", dtype_N).astype(object),
        axes_N={
            "bytes": counts(columns, "message_size") * element_N,
            "ranks": ranks_N,
            "stride": np.ones_like(ranks_N),
            "world": ranks_N,
        },
        keep_N=element_N > 0,
    )


def _nccl(columns: Columns) -> _Read:
    kind_N = renamed(columns["op_name"], lambda text: COLLECTIVES.get(text, text))
    return _collective(columns, kind_N=kind_N, dtype_N=dtypes(columns, "nccl_dtype"))


def _custom_all_reduce(columns: Columns) -> _Read:
    place = next((n for n in ("backend", "implementation") if n in columns), "kernel_source")
    kind_N = renamed(columns[place], lambda text: f"all_reduce/{text.lower()}")
    return _collective(columns, kind_N=kind_N, dtype_N=dtypes(columns, "allreduce_dtype"))


def _deepep(columns: Columns, *, kind: str, times: tuple[str, ...], units: str = "") -> _Read:
    nodes_N = counts(columns, "node_num")
    units_N = counts(columns, units) if units else np.zeros_like(nodes_N)
    return _Read(
        operation="expert_all_to_all",
        kind_N=same(columns, kind),
        dtype_N=same(columns, ""),
        axes_N={
            "tokens": counts(columns, "num_token"),
            "hidden": counts(columns, "hidden_size"),
            "top_k": counts(columns, "num_topk"),
            "experts": counts(columns, "num_experts"),
            "ranks": nodes_N * DEVICES_PER_NODE,
            "nodes": nodes_N,
            "units": units_N,
        },
        keep_N=every_row(columns),
        time_s_N=np.sum([numbers(columns, name) for name in times], axis=0) * 1e-6,
    )


_DEEPEP_NORMAL: Final = tuple(
    partial(
        _deepep,
        kind=f"deepep_normal_{half}",
        times=(f"{half}_transmit_us", f"{half}_notify_us"),
        units=f"{half}_sms",
    )
    for half in ("dispatch", "combine")
)
_DEEPEP_LOW_LATENCY: Final = tuple(
    partial(_deepep, kind=f"deepep_low_latency_{half}", times=(f"{half}_avg_t_us",))
    for half in ("dispatch", "combine")
)

_READERS: Final[Mapping[str, tuple[Callable[[Columns], _Read], ...]]] = {
    "gemm_perf": (_gemm,),
    "context_attention_perf": (_prefill,),
    "generation_attention_perf": (_decode,),
    "context_mla_perf": (partial(_latent, part="core", is_decode=False),),
    "generation_mla_perf": (partial(_latent, part="core", is_decode=True),),
    "mla_context_module_perf": (partial(_latent, part="module", is_decode=False),),
    "mla_generation_module_perf": (partial(_latent, part="module", is_decode=True),),
    "mla_bmm_perf": (_latent_product,),
    "dsa_context_module_perf": (partial(_sparse_latent, is_decode=False),),
    "dsa_generation_module_perf": (partial(_sparse_latent, is_decode=True),),
    "gdn_perf": (_gated_delta,),
    "moe_perf": (_moe,),
    "wideep_context_moe_perf": (partial(_moe, prefix="wideep_context/"),),
    "wideep_generation_moe_perf": (partial(_moe, prefix="wideep_generation/"),),
    "nccl_perf": (_nccl,),
    "custom_allreduce_perf": (_custom_all_reduce,),
    "wideep_deepep_normal_perf": _DEEPEP_NORMAL,
    "wideep_deepep_ll_perf": _DEEPEP_LOW_LATENCY,
}
