"""SGLang: what `python -m sglang.launch_server` accepts.

Read from the wheel of 0.5.23, sglang/srt/arg_groups (fields/, moe_hook.py, parallel_hook.py,
pd_disaggregation_hook.py), sglang/srt/environ.py and sglang/srt/layers/moe/token_dispatcher:

- Attention data parallelism is `--attn-dp-size`, a divisor of `--tp-size`, which counts all devices
  of a pipeline stage; `--dp-size N --enable-dp-attention` is its deprecated spelling.
- `--max-running-requests` and `--chunked-prefill-size` are divided by the attention-DP size;
  CUDA graph sizes and `--max-prefill-tokens` are of one rank.
- `--cuda-graph-max-bs` is refused as ambiguous: decode and prefill have an option each.
- DeepEP sets the expert-parallel size to `--tp-size`. Its mode `auto` sends prompts through the
  normal kernels and decode through the low-latency ones; `normal` turns decode graphs off.
- Low-latency buffers hold SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens, 1024 at most.

Not covered: prefill context parallelism, speculative decoding, pipeline micro-batches.
"""

from typing import Final

from tuner.spec.serving.manifests.manifest import ServingCapabilities

SGLANG_0_5_23: Final = ServingCapabilities(
    name="sglang",
    release="0.5.23",
    source="sglang 0.5.23 (wheel), docs.sglang.io",
    image="lmsysorg/sglang:v0.5.23",
    options=frozenset(
        {
            "--attn-dp-size",
            "--chunked-prefill-size",
            "--context-length",
            "--cuda-graph-max-bs-decode",
            "--deepep-mode",
            "--disaggregation-bootstrap-port",
            "--disaggregation-mode",
            "--disaggregation-transfer-backend",
            "--dist-init-addr",
            "--ep-dispatch-algorithm",
            "--ep-num-redundant-experts",
            "--ep-size",
            "--host",
            "--init-expert-location",
            "--kv-cache-dtype",
            "--max-prefill-tokens",
            "--max-running-requests",
            "--model-path",
            "--moe-a2a-backend",
            "--nnodes",
            "--node-rank",
            "--port",
            "--pp-size",
            "--quantization",
            "--tp-size",
        }
    ),
    environment=frozenset({"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"}),
    quantization={"bf16": "", "fp8": "fp8", "fp8_block": "", "nvfp4": "modelopt_fp4"},
    kv_cache_dtype={"bf16": "", "fp8": "fp8_e4m3"},
    connectors={"nixl": "nixl", "mooncake": "mooncake"},
)
