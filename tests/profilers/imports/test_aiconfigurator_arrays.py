"""Tables read directly say what imported ones say."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from profilers.arrays import Arrays
from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_arrays import read_system
from profilers.imports.registry import import_measurements
from profilers.records import Measurement
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
EXPERTS = {
    "moe_dtype": "fp8_block",
    "num_tokens": 16,
    "hidden_size": 64,
    "inter_size": 32,
    "topk": 2,
    "num_experts": 8,
    "moe_tp_size": 1,
    "moe_ep_size": 4,
    "distribution": "power_law_1.01",
}
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
    "moe_perf": EXPERTS,
    "wideep_context_moe_perf": EXPERTS,
    "wideep_generation_moe_perf": EXPERTS,
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


HEADS = "heads8-kv_heads2-head_dim128"
MOE = "tokens16-hidden64-ffn32-top_k2-experts8-tensor1-expert4"
SPARSE = "GlmMoeDsaForCausalLM"
IDS: Mapping[str, str] = {
    "gemm_perf": "gemm/bf16/forward/m4-n8-k16",
    "context_attention_perf": f"attention/kv_fp8/bf16/forward/batch2-sequence64-{HEADS}",
    "generation_attention_perf": (
        f"decode_attention/kv_fp8/bf16/forward/batch2-past127-{HEADS}-window0"
    ),
    "context_mla_perf": "latent_attention/core/bf16/forward/batch2-sequence64-heads16",
    "generation_mla_perf": "latent_decode/core/kv_fp8/bf16/forward/batch2-past63-heads16",
    "mla_context_module_perf": (
        "latent_attention/module/kv_fp8/gemm_fp8_block/bf16/forward/batch2-sequence64-heads16"
    ),
    "mla_generation_module_perf": (
        "latent_decode/module/kv_fp8/gemm_bf16/bf16/forward/batch2-past9-heads16"
    ),
    "mla_bmm_perf": "latent_product/pre/fp8/forward/tokens8-heads16",
    "dsa_context_module_perf": (
        f"sparse_latent_attention/{SPARSE}/kv_fp8/gemm_fp8_block/bf16/forward/"
        "batch2-past128-sequence64-heads16"
    ),
    "dsa_generation_module_perf": (
        f"sparse_latent_decode/{SPARSE}/gemm_bf16/bf16/forward/batch2-past128-heads16"
    ),
    "gdn_perf": ("gated_delta/generation/k/bf16/forward/batch4-sequence1-key_heads2-value_heads8"),
    "moe_perf": f"moe/power_law_1.01/fp8_block/forward/{MOE}",
    "wideep_context_moe_perf": f"moe/wideep_context/power_law_1.01/fp8_block/forward/{MOE}",
    "wideep_generation_moe_perf": (f"moe/wideep_generation/power_law_1.01/fp8_block/forward/{MOE}"),
    # 256 elements of two bytes
    "nccl_perf": "collective/all_to_all/bytes512-ranks4-stride1-world4",
    "custom_allreduce_perf": ("collective/all_reduce/vllm_graph/bytes256-ranks8-stride1-world8"),
}


@each_row("table", IDS)
def test_a_row_says_the_same_read_directly_and_imported(
    table: str, systems: Path, write: Write
) -> None:
    framework = "nccl" if table == "nccl_perf" else "vllm"
    row = {"kernel_source": "k", **ROWS[table], "latency": 0.25}
    file = write(f"family/{framework}/1.2.0/{table}.parquet", [row])
    (found,) = read_system(systems, system="tiny_sxm")
    write("other/vllm/1.2.0/other_perf.parquet", [row])
    (stored,) = _imported(systems)
    file.unlink()
    assert stored.case.id == IDS[table]
    _agree(found, stored)
    assert stored.times_s == (0.00025,)
    assert found.software == ("" if framework == "nccl" else "vllm")


def test_dispatch_and_combine_are_read(systems: Path, write: Write) -> None:
    axes = {"node_num": 2, "num_token": 64, "hidden_size": 7168, "num_topk": 8, "num_experts": 256}
    times = {"dispatch_avg_t_us": 50.0, "combine_avg_t_us": 70.0}
    row = {"kernel_source": "k", **axes, **times}
    write("comm/sglang/0.5.12/wideep_deepep_ll_perf.parquet", [row])
    found = read_system(systems, system="tiny_sxm")
    stored = _imported(systems)
    assert [one.case.id for one in stored] == [
        f"expert_all_to_all/deepep_low_latency_{half}/"
        "tokens64-hidden7168-top_k8-experts256-ranks16-nodes2-units0"
        for half in ("dispatch", "combine")
    ]
    for one, row_of in zip(found, stored, strict=True):
        _agree(one, row_of)


def test_tables_and_rows_that_only_the_importer_reads(systems: Path, write: Write) -> None:
    moe = {**ROWS["moe_perf"], "kernel_source": "nongated_x", "num_slots": 16, "latency": 1.0}
    write("moe/trtllm/1.0/wideep_moe_perf.parquet", [moe, {**moe, "num_slots": 8, "topk": 1}])
    a2a = {"comm_backend": "nvl", "phase": "dispatch", "comm_dtype": "default", "latency": 3.0}
    axes = {"num_tokens": 8, "hidden_size": 64, "topk": 2, "num_experts": 8, "ep_size": 4}
    write("comm/trtllm/1.0/moe_a2a_perf.parquet", [{**a2a, **axes, "node_num": 1}])
    windowed = {**ROWS["context_attention_perf"], "window_size": 32, "latency": 1.0}
    write("attention/trtllm/1.0/context_attention_perf.parquet", [windowed])
    assert read_system(systems, system="tiny_sxm") == ()
    assert {row.case.id for row in _imported(systems)} == {
        f"moe/wideep/power_law_1.01/nongated/16_slots/fp8_block/forward/{MOE}",
        f"moe/wideep/power_law_1.01/nongated/fp8_block/forward/{MOE.replace('k2', 'k1')}",
        "expert_all_to_all/nvl_dispatch/tokens8-hidden64-top_k2-experts8-ranks4-nodes1-units0",
        f"windowed_attention/kv_fp8/bf16/forward/batch2-sequence64-{HEADS}-window32",
    }


def _imported(systems: Path, **options: str) -> tuple[Measurement, ...]:
    found = import_measurements("aiconfigurator", systems, options=options, created="now")
    return found.profile.measurements


def _agree(found: Arrays, stored: Measurement) -> None:
    case = stored.case
    assert found.operation == case.operation
    assert (found.kind_N.tolist(), found.dtype_N.tolist()) == ([case.kind], [case.dtype])
    assert {axis: int(values[0]) for axis, values in found.axes_N.items()} == case.axes
    assert found.time_s_N.tolist() == list(stored.times_s)


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
