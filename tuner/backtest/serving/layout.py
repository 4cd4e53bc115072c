"""The columns of a table of serving runs; imported for help, so that it imports nothing itself."""

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "id": "name of the row",
    "silicon_data_source": "provenance; states silicon_concurrency=N, concurrent requests",
    "backend": "vllm, sglang or trtllm",
    "backend_version": "release of the engine",
    "model_path": "name of the model",
    "system": "h100_sxm, h200_sxm, b200_sxm, b300_sxm, gb200, gb300, a100_sxm or l40s",
    "precision": "fp8, fp4, int4 or bf16; blank: bf16",
    "mode": "agg or disagg",
    "isl": "tokens of a prompt",
    "osl": "output tokens",
    "tp_size": "attention tensor parallelism",
    "pp_size": "pipeline parallelism",
    "attention_dp_size": "attention data parallelism",
    "moe_tp_size": "tensor parallelism of experts",
    "moe_ep_size": "expert parallelism",
    "prefill_*, decode_*": "the degrees of either side of a disaggregated launch, and num_workers",
    "prefix_hit": "optional: share of every prompt that is in the prefix cache",
    "draft_tokens": "optional: tokens drafted before each step; blank: none",
    "draft_acceptance": "conditional acceptance rate of a draft token, with draft_tokens",
    "draft_method": "mtp or eagle; blank: mtp",
    "silicon_ttft_ms": "measured mean time to the first token, milliseconds",
    "silicon_tpot_ms": "measured mean time per further token, milliseconds",
}
"""What a serving table may hold, for people."""
