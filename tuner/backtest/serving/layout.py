"""The columns of a table of serving runs; imported for help, so that it imports nothing itself."""

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "id": "name of the row",
    "silicon_data_source": "provenance; states silicon_concurrency=N, concurrent requests",
    "backend": "vllm, sglang or trtllm",
    "backend_version": "release of the engine",
    "model_path": "name of the model, one of examples/models",
    "system": "h100_sxm, h200_sxm, b200_sxm, b300_sxm, gb200, gb300, a100_sxm or l40s",
    "precision": "fp8, fp4, mxfp4, int4 or bf16; blank: bf16",
    "formats": "optional: formats of attention, its output, networks, experts and KV cache, joined "
    "by /: bf16, fp8, fp8_block, nvfp4, mxfp4, int4_wo; blank: those of precision",
    "mode": "agg or disagg",
    "isl": "tokens of a prompt",
    "osl": "output tokens",
    "tp_size": "attention tensor parallelism",
    "pp_size": "pipeline parallelism",
    "attention_dp_size": "attention data parallelism; blank: 1",
    "moe_tp_size": "tensor parallelism of experts; blank: all ranks",
    "moe_ep_size": "expert parallelism; blank: 1",
    "prefill_*, decode_*": "the degrees of either side of a disaggregated launch, and num_workers",
    "prefix_hit": "optional: share of every prompt that is in the prefix cache",
    "draft_tokens": "optional: tokens drafted before each step; blank: none",
    "draft_acceptance": "conditional acceptance rate of a draft token, with draft_tokens; by "
    "position joined by ;",
    "draft_method": "mtp or eagle; blank: mtp",
    "harness": "name of the load driver: errors and factors are kept apart by it; blank: other",
    "length_ratio": "shortest prompt and output as a share of isl and osl; blank: 0.95",
    "step_tokens": "optional: token budget of a step; blank: the engine's",
    "poll_steps": "optional: steps between two polls for new requests; blank: 1",
    "stream_steps": "optional: steps that a token waits to be streamed; blank: 0",
    "sequence_us": "optional: host microseconds per running sequence and step; blank: the engine's",
    "experts_table": "optional: table of the expert kernels, e.g. vllm@0.19.0; blank: the newest",
    "silicon_ttft_ms": "measured mean time to the first token, milliseconds",
    "silicon_tpot_ms": "measured mean time per further token, milliseconds",
}
"""Columns that a serving table may hold, with their meaning."""
