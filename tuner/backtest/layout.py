"""The columns of a table of measured runs, and what each means.

This file imports nothing heavy: the command line lists the columns in its help.
"""

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "id": "stable name of the row",
    "source": "where it was published, which errors are reported by; a software's name implies it "
    "where `release` names none",
    "model": "name of the model; one of examples/models needs no arch_json",
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
    "recompute": "none, full, selective, or modules joined by +; blank: the software's "
    "default, and more where that does not fit",
    "precision": "bf16, fp16, fp8, fp8-rowwise, MXFP8, NVFP4, ...",
    "tokens_per_sec_per_gpu": "measured",
    "tflops_per_gpu": "measured, model FLOP in the source's convention",
    "mfu": "measured, percent of the dense peak of bf16",
    "step_time_s": "measured",
    "peak_mem_gib": "measured, GiB of the device with the highest peak",
    "status": "out_of_memory: the run did not fit",
    "workload": "pretrain, sft, lora, ...; lora trains adapters of lora_rank on lora_targets",
    "lora_rank": "rank of the adapters",
    "lora_targets": "what has adapters, joined by +: qkv (fused), q, k, v, o, gate, up, down, "
    "experts",
    "group": "rows that are the same recipe; cross-validation keeps them together",
    "notes": "for readers",
    "url": "where it was published",
    "release": "software and its version, e.g. nemo-26.04; blank: Megatron-LM of 2025",
    "recipe_match": "exact, layout: blanks below are off; near, none: what stands there is a "
    "guess, and more is recomputed where that does not fit",
    "recompute_modules": "modules joined by +",
    "recompute_num_layers": "layers that are recomputed as a whole",
    "dispatcher": "alltoall, deepep, hybridep; blank: alltoall",
    "a2a_overlap": "true, false",
    "cuda_graph": "none, local, transformer_engine, full_iteration",
    "cuda_graph_scope": "what is captured, joined by +",
    "cpu_offload_layers": "layers whose activations live in host memory",
    "fused_grouped_mlp": "true, false",
    "overlap_grad_reduce": "true, false: gradients and parameters move behind the passes; blank: "
    "the software's default",
    "tensor_overlap": "true, false: asynchronous tensor parallelism; blank: the software's default",
    "compiled": "true, false: torch.compile",
    "expandable_segments": "true, false: PyTorch's allocator has them; blank: the software's "
    "default",
    "fused_loss": "true, false: the loss is computed without writing logits",
    "bf16_share": "share of the layers that stay in bf16 beside a narrower precision",
    "node_gbit_per_s": "network of one server, Gbit/s; blank: the device's usual one",
}
"""Columns that a table may hold, with their meaning; everything else is ignored."""

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
    "lora_rank",
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
    "bf16_share",
    "node_gbit_per_s",
)
"""Numbers above 0."""
FLAGS: Final = (
    "a2a_overlap",
    "fused_grouped_mlp",
    "overlap_grad_reduce",
    "tensor_overlap",
    "compiled",
    "expandable_segments",
    "fused_loss",
)
TRUE: Final = ("true", "1", "yes")
FALSE: Final = ("false", "0", "no")
