"""Columns say of a row what the importer's records say of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_arrays import read_system
from profilers.imports.aiconfigurator_tables import TABLES
from tests.rows import each_row

Write = Callable[[str, Sequence[Mapping[str, Any]]], Path]

ATTENTION = {
    "batch_size": 2,
    "isl": 64,
    "num_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "window_size": 0,
    "beam_width": 1,
}
LATENT = {"mla_dtype": "bfloat16", "num_heads": 16, "batch_size": 2, "isl": 64}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "gemm_perf": {"gemm_dtype": "bfloat16", "m": 4, "n": 8, "k": 16},
    "context_attention_perf": {**ATTENTION, "step": 0},
    "generation_attention_perf": {**ATTENTION, "step": 127},
    "context_mla_perf": {**LATENT, "kv_cache_dtype": "bfloat16", "step": 0},
    "generation_mla_perf": {**LATENT, "kv_cache_dtype": "fp8", "step": 63},
    "mla_context_module_perf": {
        **LATENT,
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
        "step": 0,
    },
    "mla_generation_module_perf": {
        **LATENT,
        "kv_cache_dtype": "fp8",
        "gemm_type": "bfloat16",
        "step": 9,
    },
    "mla_bmm_perf": {
        "op_name": "mla_gen_pre",
        "bmm_dtype": "fp8",
        "num_tokens": 8,
        "num_heads": 16,
    },
    "dsa_context_module_perf": {
        **LATENT,
        "op_name": "dsa_context_module",
        "architecture": "GlmMoeDsaForCausalLM",
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
        "step": 128,
    },
    "dsa_generation_module_perf": {
        **LATENT,
        "op_name": "dsa_generation_module",
        "architecture": "GlmMoeDsaForCausalLM",
        "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "step": 128,
    },
    "gdn_perf": {
        "phase": "generation",
        "batch_size": 4,
        "seq_len": 1,
        "num_k_heads": 2,
        "num_v_heads": 8,
        "head_k_dim": 128,
        "head_v_dim": 128,
    },
    "moe_perf": {
        "moe_dtype": "fp8_block",
        "num_tokens": 16,
        "hidden_size": 64,
        "inter_size": 32,
        "topk": 2,
        "num_experts": 8,
        "moe_tp_size": 1,
        "moe_ep_size": 4,
        "distribution": "power_law_1.01",
    },
    "nccl_perf": {
        "op_name": "alltoall",
        "nccl_dtype": "half",
        "num_gpus": 4,
        "message_size": 256,
    },
    "custom_allreduce_perf": {
        "allreduce_dtype": "bfloat16",
        "num_gpus": 8,
        "message_size": 128,
        "backend": "vllm_graph",
    },
}


@each_row("table", ROWS)
def test_a_row_says_the_same_in_columns_as_in_records(
    table: str, systems: Path, write: Write
) -> None:
    framework = "nccl" if table == "nccl_perf" else "vllm"
    row = {"kernel_source": "k", **ROWS[table], "latency": 0.25}
    file = write(f"family/{framework}/1.2.0/{table}.parquet", [row])
    (found,) = read_system(systems, system="tiny_sxm")
    file.unlink()
    (entry,) = TABLES[table].entries(row)
    assert found.operation == entry.operation
    assert found.kind_N.tolist() == [entry.kind]
    assert found.dtype_N.tolist() == [entry.dtype]
    assert {axis: int(values[0]) for axis, values in found.axes_N.items()} == entry.axes
    assert found.time_s_N == pytest.approx([entry.time_s])
    assert found.software == ("" if framework == "nccl" else "vllm")


def test_dispatch_and_combine_are_read(systems: Path, write: Write) -> None:
    axes = {"node_num": 2, "num_token": 64, "hidden_size": 7168, "num_topk": 8, "num_experts": 256}
    times = {"dispatch_avg_t_us": 50.0, "combine_avg_t_us": 70.0}
    row = {"kernel_source": "k", **axes, **times}
    write("comm/sglang/0.5.12/wideep_deepep_ll_perf.parquet", [row])
    found = read_system(systems, system="tiny_sxm")
    entries = list(TABLES["wideep_deepep_ll_perf"].entries(row))
    assert [one.kind_N.tolist() for one in found] == [[entry.kind] for entry in entries]
    for one, entry in zip(found, entries, strict=True):
        assert {axis: int(values[0]) for axis, values in one.axes_N.items()} == entry.axes
        assert one.time_s_N == pytest.approx([entry.time_s])


def test_a_system_without_tables_gives_nothing(systems: Path) -> None:
    assert read_system(systems, system="other") == ()


def test_a_damaged_table_is_refused_in_one_line(systems: Path, write: Write) -> None:
    file = write("gemm/vllm/1.0/gemm_perf.parquet", [{**ROWS["gemm_perf"], "latency": 1.0}])
    file.write_bytes(b"PAR1")
    with pytest.raises(ProfileUnreadableError, match=r"gemm_perf\.parquet"):
        read_system(systems, system="tiny_sxm")


def test_a_table_that_lacks_a_column_is_refused(systems: Path, write: Write) -> None:
    write("gemm/vllm/1.0/gemm_perf.parquet", [{"gemm_dtype": "fp8", "m": 1, "latency": 1.0}])
    with pytest.raises(ProfileUnreadableError, match="'n' is missing"):
        read_system(systems, system="tiny_sxm")
