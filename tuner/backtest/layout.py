"""The columns of a table of measured runs, and what each means.

This file imports nothing heavy: the command line lists the columns in its help.
"""

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "id": "stable name of the row",
    "source": "where it was published; implies the software where `release` is blank",
    "model": "name of the model",
    "arch_json": "architecture: hidden, layers, heads, kv_heads, head_dim, ffn, glu, vocab, seq, "
    "tied, qk_norm; experts, topk, moe_ffn, shared_ffn, dense_layers; attn: mla with q_lora_rank, "
    "kv_lora_rank, qk_head_dim, qk_rope_dim, v_head_dim; mtp_layers",
    "gpu": "device as published, e.g. DGX-H100",
    "num_gpus": "devices of the run",
    "gbs": "global batch in sequences",
    "mbs": "micro-batch in sequences",
    "seq": "tokens of a sequence",
    "tp": "tensor parallel degree; blank: 1",
    "pp": "pipeline parallel degree; blank: 1",
    "vpp": "chunks per pipeline rank; blank: 1",
    "cp": "context parallel degree; blank: 1",
    "dp": "data parallel degree; blank: num_gpus / (tp * pp * cp)",
    "ep": "expert parallel degree; blank: the fastest",
    "etp": "tensor parallel degree of the experts; blank: 1",
    "zero_or_fsdp": "DDP, ZeRO-1 .. ZeRO-3, FSDP, FSDP=<ranks>, FSDP-FULL_SHARD, "
    "FSDP-SHARD_GRAD_OP",
    "recompute": "none, full, selective, or modules joined by +",
    "precision": "bf16, fp16, fp8, fp8-rowwise, MXFP8, NVFP4, ...",
    "tokens_per_sec_per_gpu": "measured",
    "tflops_per_gpu": "measured, model FLOP in the source's convention",
    "mfu": "measured, percent of the dense peak of bf16",
    "step_time_s": "measured",
    "peak_mem_gib": "measured, GiB of the device with the highest peak",
    "status": "out_of_memory: the run did not fit",
    "workload": "pretrain, sft, lora, ...; lora trains adapters as its recipe has them",
    "group": "rows that are the same recipe; cross-validation keeps them together",
    "notes": "conditions, e.g. w/o MTP, EP overlap on, MegaScale",
    "url": "where it was published",
    "release": "software and its version, e.g. nemo-26.04",
    "recipe_match": "exact, layout, near, none: how far the flags below are known",
    "recompute_modules": "modules joined by +",
    "recompute_num_layers": "layers that are recomputed as a whole",
    "dispatcher": "alltoall, deepep, hybridep",
    "a2a_overlap": "true, false",
    "cuda_graph": "none, local, transformer_engine, full_iteration",
    "cuda_graph_scope": "what is captured, joined by +",
    "cpu_offload_layers": "layers whose activations live in host memory",
    "fused_grouped_mlp": "true, false",
}
"""What a table may hold, and what it means; everything else is ignored."""

COUNTS: Final = (
    "num_gpus",
    "gbs",
    "mbs",
    "seq",
    "tp",
    "pp",
    "vpp",
    "cp",
    "dp",
    "ep",
    "etp",
)
"""Whole numbers from 1 on."""
OPTIONAL_COUNTS: Final = ("recompute_num_layers", "cpu_offload_layers")
"""Whole numbers from 0 on."""
QUANTITIES: Final = (
    "tokens_per_sec_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "step_time_s",
    "peak_mem_gib",
)
"""Numbers above 0."""
FLAGS: Final = ("a2a_overlap", "fused_grouped_mlp")
TRUE: Final = ("true", "1", "yes")
FALSE: Final = ("false", "0", "no")
