"""SGLang: what `python -m sglang.launch_server` accepts.

Read from the wheel of 0.5.23, sglang/srt/arg_groups (fields/, moe_hook.py, parallel_hook.py,
pd_disaggregation_hook.py), sglang/srt/environ.py and sglang/srt/layers/moe/token_dispatcher:

- Attention data parallelism is `--attn-dp-size`, a divisor of `--tp-size`, which counts all devices
  of a pipeline stage; `--dp-size N --enable-dp-attention` is its deprecated spelling. Ranks get
  requests in turn, of prefill instances by a random number (srt/managers/data_parallel_controller).
- `--max-running-requests` and `--chunked-prefill-size` are divided by the attention-DP size; CUDA
  graph sizes and `--max-prefill-tokens` are of one rank.
- `--cuda-graph-max-bs` is refused as ambiguous: decode and prefill have an option each.
- DeepEP sets the expert-parallel size to `--tp-size`. Its mode `auto` sends prompts through the
  normal kernels and decode through the low-latency ones; `normal` turns decode graphs off.
- Low-latency buffers have SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK tokens, 1024 at most. A
  verification step dispatches all draft tokens (`_decode_graph_dispatch_tokens_per_rank` of
  moe_hook.py multiplies requests by draft tokens); decode graphs are counted in requests.
- EAGLE drafts with the model's MTP layers unless `--speculative-draft-model-path` names others;
  with one candidate per step it verifies `--speculative-num-steps` + 1 tokens
  (speculative_hook.py). Drafts across pipeline stages exist on prefill instances only
  (validation_hook.py).
- A prefill instance also transfers the draft layer's cache (disaggregation/prefill.py), so both
  sides draft or neither does.
- `--ep-num-redundant-experts` copies are of the first experts (eplb/expert_location.py,
  `init_trivial`) unless `--init-expert-location` names others or `--enable-eplb` moves them by the
  loads that it records; both choose `--ep-dispatch-algorithm` where it is not stated, without which
  copies get no tokens (parallel_hook.py, `handle_eplb_and_dispatch`). Experts and copies are a
  multiple of the expert ranks (`_init_common`); models add copies themselves (models/*.py,
  `ep_num_redundant_experts` and `get_model_config_for_expert_location`).
- `--enable-two-batch-overlap` needs an all-to-all (check_two_batch_overlap), and models whose
  expert layers are split into its operations (models/*.py, op_dispatch_a).
- `--enable-pdmux` partitions a device's SMs between prefill and decode: no pipeline, no chunked
  prefill, no overlap schedule (validation_hook.py); its loop does not synchronise data-parallel
  ranks (multiplex/multiplexing_mixin.py); models need `forward_split_prefill`.
- `--chunked-prefill-size` is a whole number of pages (validation_hook.py).
- srt/models has every class that moetune reads. DeepSeek-V3.2, GLM-5 and Kimi-K2.5 share the expert
  layers of deepseek_v2.py.
- DeepSeek-V4 (models/deepseek_v4.py) reads fp8 with experts in mxfp4 as it is published, and is
  moved between instances (disaggregation/common/conn.py, its layout of C4 and C128 caches).
- LongCat-Flash (models/longcat_flash.py) runs in one stage, without DeepEP ("needs to be supported
  in the future") and, by its own refusal, without redundant experts or placements. Copies for
  experts without weights go to expert 0 with weight 0 (kernels/ops/moe/ep_moe_kernels.py,
  `zero_experts_compute_triton`), so that they are dispatched and computed. MTP is one dense layer
  (models/longcat_flash_nextn.py).
- FP8 and NVFP4 weights use Marlin kernels where a device lacks tensor cores for them
  (layers/quantization/{fp8,modelopt_quant}.py, get_min_capability).
- gpt-oss checkpoints say "quant_method": "mxfp4" themselves; no option is needed
  (layers/quantization/mxfp4.py). So do those with experts in int4 (Kimi-K2.5: compressed-tensors),
  whose Marlin kernels take no tokens from DeepEP (quantization/compressed_tensors).

- Decode context parallelism shares the positions of keys that tensor ranks would copy; those of an
  indexer and of a draft stay whole on every rank (model_executor/pool_configurator.py,
  mem_cache/kv_cache_configurator.py, `loc_space_scale`).

Not covered: prefill context parallelism, pipeline micro-batches, draft trees wider than one token,
drafting or two-batch overlap under `--enable-pdmux`, which the code does not consider.

Other vendors:
- sglang 0.5.23: arg_groups/choices.py (transfer backends mooncake, nixl, ascend, mori),
  disaggregation/ascend/transfer_engine.py (ASCEND_MF_STORE_URL), hardware_backend/npu/utils.py
  (attention backend "ascend", pages of 128 tokens). Container names: its documents for AMD GPUs and
  for Ascend NPUs.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.place_rules import DispatchOffer, PlaceTarget
from tuner.catalog.serve_rules.autoscalers import LoadMetrics
from tuner.catalog.serve_rules.manifest import DEEPEP, ServingCapabilities
from tuner.catalog.serve_rules.models import EVERY, ZERO_EXPERTS, ServedModels
from tuner.catalog.serve_rules.routers import (
    GATEWAY_POLICIES,
    NGINX,
    Gateway,
    RouterCapabilities,
)
from tuner.catalog.serve_rules.traits import (
    Batching,
    EngineTraits,
    LayerKernels,
    MemoryFractionKind,
    MemoryRule,
    PromptGraphs,
    StateRule,
)
from tuner.catalog.serve_rules.vendors import PLAIN_EXCHANGES
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.sglang.kv import ASCEND_PAGES, NODE_LINKS, PAGES, TRANSFERS

STATE_SLOTS: Final = 5
"""States of linear attention of a running request with the radix cache and the overlap schedule:
three, and two that follow the output (`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`,
mem_cache/kv_cache_configurator.py; `get_mamba_tracking_slots`, mem_cache/allocation_sizing.py;
`--mamba-radix-cache-strategy auto` is `extra_buffer` for every hybrid that moetune reads). A launch
states `--max-mamba-cache-size` for them; without it states get 0.9 / 1.9 of the memory
(`--mamba-full-memory-ratio`). A prefix hit ends where a state was kept."""

_SHORT_LATENT: Final = 2048.0
"""Tokens of the largest graph of latent attention, up to 0.5.20."""
_QWEN: Final = frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"})
_EVERYWHERE: Final = frozenset(Generation)
_TRTLLM_MLA: Final = {"DeepseekV3ForCausalLM": frozenset({Generation.BLACKWELL})}
"""Beside the attention of TensorRT-LLM, its own on Blackwell, DeepSeek-V3's class has no graphs."""
PROMPT_GRAPHS: Final = (
    PromptGraphs(
        since=(0, 5, 21),
        eager_mixers=frozenset({"kda", "compressed"}),
        eager_models=_TRTLLM_MLA,
        vision_models=_QWEN | {"KimiK25ForConditionalGeneration"},
        latent_tokens=8192.0,
    ),
    PromptGraphs(
        since=(0, 5, 17),
        eager_mixers=frozenset({"latent", "compressed"}),
        eager_models={"NemotronHForCausalLM": _EVERYWHERE},
        vision_models=_QWEN,
        latent_tokens=_SHORT_LATENT,
    ),
    PromptGraphs(
        since=(0, 5, 15),
        eager_mixers=frozenset({"latent", "sparse_latent", "compressed"}),
        vision_models=_QWEN,
        data_ranks=False,
        dispatches=False,
    ),
    PromptGraphs(
        since=(0, 5, 14),
        eager_mixers=frozenset({"compressed"}),
        eager_models={"Qwen3NextForCausalLM": _EVERYWHERE},
        data_ranks=False,
        dispatches=False,
        drafts=False,
        latent_tokens=_SHORT_LATENT,
    ),
    PromptGraphs(
        since=(0, 5, 10),
        eager_mixers=frozenset({"compressed"}),
        eager_models=dict.fromkeys(
            ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Qwen3NextForCausalLM"), _EVERYWHERE
        ),
        data_ranks=False,
        dispatches=False,
        drafts=False,
        latent_tokens=_SHORT_LATENT,
    ),
)
"""Wheels: 0.5.23, arg_groups/cuda_graph_hook.py and memory_hook.py; 0.5.17 and 0.5.15,
server_args.py, `_disable_breakable_cudagraph_if_incompatible`; 0.5.14,
`_disable_tc_piecewise_cudagraph_if_incompatible`; 0.5.10.post1, `_handle_piecewise_cuda_graph`;
lists of models in configs/model_config.py. 0.5.18 to 0.5.22 were not read: the first three count as
0.5.17. Left out: prefill instances, LoRA, EPLB and caches on hosts, which have none up to 0.5.14,
and Qwen3.5 on 0.5.15, which has none."""

_FP8: Final = frozenset({"fp8", "fp8_block", "nvfp4"})
_BF16: Final = _FP8 | {"bf16"}
_FUSED_DEVICES: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
_TORCH_ROUTING: Final = frozenset(
    {
        ("Glm4MoeForCausalLM", 128),
        ("Glm4MoeForCausalLM", 160),
        ("Glm4vMoeForConditionalGeneration", 128),
    }
)
_QWEN_MIXERS: Final = {
    "Qwen3NextForCausalLM": 1,
    "Qwen3_5ForConditionalGeneration": 1,
    "Qwen3_5MoeForConditionalGeneration": 1,
}
_DEEPSEEK_KERNELS: Final = dict.fromkeys(
    ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), _FP8
)
_KERNELS: Final = LayerKernels(
    since=(0, 5, 12),
    fused_norms=dict.fromkeys(
        (
            "DeepseekV3ForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GptOssForCausalLM",
            "KimiK25ForConditionalGeneration",
            "Qwen3MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        _FUSED_DEVICES,
    ),
    torch_routing=_TORCH_ROUTING,
    portable_experts=frozenset({"bf16", "fp8", "fp8_block", "int4_wo"}),
    generated_experts={
        **_DEEPSEEK_KERNELS,
        "KimiK25ForConditionalGeneration": _FP8 | {"int4_wo"},
        "Glm4MoeForCausalLM": frozenset({"nvfp4"}),
        "GptOssForCausalLM": frozenset({"mxfp4"}),
        "Llama4ForConditionalGeneration": _FP8,
        "Qwen3MoeForCausalLM": _BF16,
        "Qwen3NextForCausalLM": _BF16,
        "Qwen3VLMoeForConditionalGeneration": _BF16,
        "Qwen3_5MoeForConditionalGeneration": _BF16,
    },
    latent_kernels=3,
    delta_kernels=_QWEN_MIXERS,
)
_KERNELS_0_5_10: Final = replace(_KERNELS, since=(0, 5, 10), all_reduce="vllm")
_KERNELS_0_5_9: Final = replace(
    _KERNELS_0_5_10,
    since=(0, 5, 9),
    generated_experts={**_KERNELS.generated_experts, "KimiK25ForConditionalGeneration": _FP8},
    fused_norms={
        name: devices
        for name, devices in _KERNELS.fused_norms.items()
        if not name.startswith("Qwen3_5")
    },
    # Four GEMMs before the mixer, and copies of the decays and of the strengths.
    delta_kernels=_QWEN_MIXERS | dict.fromkeys(_QWEN, 4),
)
_KERNELS_0_5_8: Final = replace(
    _KERNELS_0_5_9,
    since=(0, 5, 8),
    fused_norms={
        name: devices
        for name, devices in _KERNELS_0_5_9.fused_norms.items()
        if not name.startswith("Kimi")
    },
)
_KERNELS_0_5_7: Final = replace(
    _KERNELS_0_5_8,
    since=(0, 5, 7),
    fused_norms={**_KERNELS_0_5_8.fused_norms, "Glm4MoeLiteForCausalLM": frozenset()},
    generated_experts={
        name: formats - {"bf16"} for name, formats in _KERNELS_0_5_8.generated_experts.items()
    },
)
_KERNELS_0_5_5: Final = replace(
    _KERNELS_0_5_7,
    since=(0, 5, 5),
    fused_norms=dict.fromkeys(
        ("DeepseekV3ForCausalLM", "GptOssForCausalLM"), frozenset({Generation.BLACKWELL})
    ),
)
_KERNELS_0_5_4: Final = replace(
    _KERNELS_0_5_5,
    since=(0,),
    torch_routing=_TORCH_ROUTING | {("DeepseekV3ForCausalLM", 384)},
    generated_experts={
        "DeepseekV3ForCausalLM": frozenset({"nvfp4"}),
        "GptOssForCausalLM": frozenset({"mxfp4"}),
    },
)
LAYER_KERNELS: Final = (
    _KERNELS,
    _KERNELS_0_5_10,
    _KERNELS_0_5_9,
    _KERNELS_0_5_8,
    _KERNELS_0_5_7,
    _KERNELS_0_5_5,
    _KERNELS_0_5_4,
)
"""Wheels of 0.5.4, 0.5.6 to 0.5.10, 0.5.12, 0.5.14 and 0.5.17; 0.5.5 was not read and counts as
0.5.6. Fused norms: server_args.py, `enable_flashinfer_allreduce_fusion`. Routing:
layers/moe/topk.py, `biased_grouped_topk_gpu`, whose kernels want a power of two of experts without
shared ones among them, or at most 32 in a group; GLM's shared expert is among them. Experts:
server_args.py, `moe_runner_backend`, where it becomes "flashinfer_trtllm"; other formats in blocks
of fp8, fp8 and bf16 are Triton's (layers/quantization/fp8.py, `create_moe_runner`). All-reduce:
distributed/device_communicators/custom_all_reduce.py, whose older kernels are vLLM's; the second
version is the default in 0.5.12 and not in 0.5.10. MLA: models/deepseek_v2.py,
`forward_absorb_prepare`: norms of queries and keys, which run side by side, the rotation, and the
store. Delta rules: models/qwen3_next.py and
qwen3_5.py: one kernel splits what a GEMM gives; up to 0.5.9 Qwen3.5 has no such GEMM
(`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`)."""

_RECENT: Final = MemoryRule(
    since=(0, 5, 17),
    share=MemoryFractionKind.OF_FREE,
    ratio=None,
    sampler_bytes=12.0,
    window_pool_ratio=0.8,
    entry_window_pool_ratio=0.1,
    states=StateRule(per_request=STATE_SLOTS),
)
_SIZED: Final = replace(_RECENT, since=(0, 5, 14), sizes_plain_sparse=True)
"""Up to 0.5.16 the room of a sparse cache is divided by a byte an element (`cell_size` of
model_executor/pool_configurator.py and model_runner_kv_cache_mixin.py of the wheels)."""
_OLDER: Final = replace(_SIZED, since=(0,), states=StateRule(per_request=3))
"""Up to 0.5.13 `--mamba-scheduler-strategy auto` is `no_buffer` (server_args.py of the wheels)."""

EXPOSED_HOST_S: Final = 7e-3
"""The median of five steps on 2 x 8 H100, 4 to 12 ms: Qwen3-235B-A22B, 32 sequences, 1.50 times the
throughput without calls of the host, of which 1.26 are faster all-reduces (SzymonOzog, A worklog of
creating Penny, part 3, 2025); DeepSeek-R1 by SGLang and vLLM, 1 and 32 sequences, beyond their
kernels (tenstorrent/tt-inference-server, issue 356) and, for vLLM of that time, 8 ms of graphs in
pieces (vllm, pull request 25444)."""

DRAFT_GAP_S: Final = 1.5e-3
"""Seconds of the host between two steps with drafts. Until 0.5.11 made SGLANG_ENABLE_SPEC_V2 its
default (environ.py of the wheels) nothing else ran beside a step with drafts: one request to
Llama-3.1-8B with five drafts takes 12.1 ms a step without it and 11.0 with it (pull request 11398),
DeepSeek-R1 with three on 8 H200 16.3 and 14.4 (12128); Qwen3-8B in fp8 with two takes 1.0 ms more
than its kernels (GPUStack, performance lab)."""

CLIENT_S: Final = 10e-3
"""The first token of a prompt on an idle server comes 0 to 19 ms, median 6, after the pause that
such a prompt makes in other outputs and 1.5 of their steps (ten launches of sgl-cookbook,
docs/autoregressive, SGLang 0.5.6 to 0.5.9)."""

TRAITS: Final = EngineTraits(
    name="sglang",
    batching=Batching.PREFILL_FIRST,
    step_tokens=16384,
    scheduler_s=0.5e-3,
    draft_gaps_s=(((0, 5, 11), 0.0), ((0,), DRAFT_GAP_S)),
    exposed_host_s=EXPOSED_HOST_S,
    untuned_experts=frozenset({(Vendor.AMD, "fp8_block"), (Vendor.AMD, "int4_wo")}),
    client_s=CLIENT_S,
    memory=(_RECENT, _SIZED, _OLDER),
    waits_for_host=True,
    prompt_graphs=PROMPT_GRAPHS,
    layer_kernels=LAYER_KERNELS,
    indexer_kernels=(((0, 5, 14), 4), ((0,), 12)),
    shares_networks=True,
    fp8_caches={
        "DeepseekV32ForCausalLM": frozenset({Generation.BLACKWELL, Generation.BLACKWELL_RTX}),
        "DeepseekV4ForCausalLM": frozenset(Generation) - {Generation.ASCEND},
        "GlmMoeDsaForCausalLM": frozenset({Generation.BLACKWELL, Generation.BLACKWELL_RTX}),
    },
    plain_sparse_since=dict.fromkeys(
        (Generation.BLACKWELL, Generation.BLACKWELL_RTX, Generation.CDNA3, Generation.CDNA4),
        (0, 5, 10),
    ),
    mxfp4_multiples=(256, 64),
    computes_zero_copies=True,
    has_context=True,
)
"""0.5.23: `managers/schedule_policy.py` sets `new_token_ratio` of what outputs may still grow by
aside, which is taken as all of it. Memory: `mem_cache/kv_cache_configurator.py`,
`_profile_available_bytes`; `swa_full_tokens_ratio` is 0.8, and 0.1 of DeepSeek-V4
(arg_groups/model_overrides/deepseek_v4.py); the sampler holds gathered logits in bf16 twice
(2 + 2), in fp32, and probabilities (4 + 4; `layers/logits_processor.py`, `layers/sampler.py`). Up
to 0.5.2 the share hung on the device alone, which is not covered. Under attention data parallelism
embeddings are whole on every rank, heads and networks not (models/deepseek_v2.py, `parallel_group`
"tp", `use_attn_tp_group`).
Sparse caches in fp8: 0.5.10, server_args.py (`_set_default_nsa_backends`: TileLang on HIP, trtllm
from compute capability 10 on) and `calculate_mla_kv_cache_dim`, which adds nothing for these two.
Caches of type `auto`: arg_groups/overrides.py, `_dsa_kv_cache_dtype_default` (compute capability 10
and newer) and `_deepseek_v4_kv_cache_dtype`.
Indexers: of 0.5.8 (layers/attention/nsa/nsa_indexer.py) a norm, angles, two copies, two rotations,
two scalings to fp8 and one of the heads' weights, the store, what deep_gemm plans, and the choice.
Padding:
`quantization/mxfp4.py`."""

SGLANG_ROUTER: Final = RouterCapabilities(
    name="sglang-router",
    release="0.3.2",
    source="sglang-router 0.3.2 (wheel), sgl-model-gateway of github.com/sgl-project/sglang",
    aggregated=GATEWAY_POLICIES,
    disaggregated=GATEWAY_POLICIES,
    threshold=True,
    holds_prefill=True,
    lacks_ranks=(
        "sglang-router 0.3.2 --dp-aware reads dp_size of /server_info, which is 1 in sglang 0.5.23"
        " whatever --attn-dp-size: every request goes to rank 0"
    ),
    gateway=Gateway(
        program="python -m sglang_router.launch_router",
        starts=(("sglang_router.launch_router",), ("smg", "launch")),
        disaggregated="--pd-disaggregation",
        annotation="sglang.ai/bootstrap-port",
        # Its `prompt` is a string or a list of strings; others are answered with 422.
        takes_token_ids=False,
    ),
)
"""router_args.py and src/policies. `power_of_two` is left out: it compares loads from `/get_load`,
which sglang 0.5.23 no longer has (it has `/v1/loads`), counts each failure as -1 and so picks at
random. A request counts on its prefill instance until its output ends
(src/routers/http/pd_router.rs has a guard for both).

`--dp-aware` makes a worker of its own of each of `dp_size` ranks (src/core/steps/worker/local,
discover_dp.rs), also in the prefix tree, and writes `data_parallel_rank` into requests. Attention
data parallelism is `attn_dp_size` in sglang 0.5.23, in either spelling, beside a `dp_size` of 1
(srt/arg_groups/parallel_hook.py; dynamo/sglang/capacity.py of ai-dynamo 1.6.1 tells the same).
Disaggregated, the release sends requests to `url@rank`, which is no address."""

_ONE_STAGE: Final = frozenset(
    {
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "OlmoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
"""models/{llama4,mllama4,longcat_flash,olmoe}.py pass no hidden states between stages, and
qwen3_next.py asserts one."""

SGLANG_0_5_23: Final = ServingCapabilities(
    traits=TRAITS,
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
            "--disable-overlap-schedule",
            "--disaggregation-bootstrap-port",
            "--disaggregation-mode",
            "--disaggregation-transfer-backend",
            "--dist-init-addr",
            "--enable-eplb",
            "--enable-metrics",
            "--enable-pdmux",
            "--enable-two-batch-overlap",
            "--ep-dispatch-algorithm",
            "--ep-num-redundant-experts",
            "--ep-size",
            "--host",
            "--init-expert-location",
            "--kv-cache-dtype",
            "--max-mamba-cache-size",
            "--max-prefill-tokens",
            "--max-running-requests",
            "--model-path",
            "--moe-a2a-backend",
            "--nnodes",
            "--node-rank",
            "--page-size",
            "--pdmux-config-path",
            "--port",
            "--pp-size",
            "--quantization",
            "--sm-group-num",
            "--speculative-algorithm",
            "--speculative-draft-model-path",
            "--speculative-eagle-topk",
            "--speculative-num-draft-tokens",
            "--speculative-num-steps",
            "--tp-size",
        }
    ),
    environment=frozenset(
        {
            "MC_INTRANODE_NVLINK",
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        }
    ),
    quantization={
        "bf16": "",
        "fp8": "fp8",
        "fp8_block": "",
        "nvfp4": "modelopt_fp4",
        "mxfp4": "",
        "fp8_block_mxfp4": "",
        "int4": "",
    },
    no_deepep_quantization=frozenset({"int4"}),
    weight_only_fallback=True,
    kv_cache_dtype={"bf16": "", "fp8": "fp8_e4m3"},
    connectors={"nixl": "nixl", "mooncake": "mooncake"},
    node_links=NODE_LINKS,
    pages=PAGES,
    transfers=TRANSFERS,
    routers=(SGLANG_ROUTER, NGINX),
    modes=frozenset({"aggregated", "disaggregated", "shared_device"}),
    low_latency_leaves_prefill=True,
    models=ServedModels(only_one={"pp": _ONE_STAGE}, source="srt/models, without pp_group"),
    redundant_architectures=frozenset(
        {
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Glm4MoeForCausalLM",
            "GlmMoeDsaForCausalLM",
            "GptOssForCausalLM",
            "KimiK25ForConditionalGeneration",
            "MiniMaxM2ForCausalLM",
            "NemotronHForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        }
    ),
    drafting={"mtp": "EAGLE", "eagle": "EAGLE"},
    drafting_pipeline_roles=frozenset({"prefill"}),
    overlap_backends=DEEPEP,
    a2a_architectures=frozenset(
        {
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm4vMoeForConditionalGeneration",
            "GlmMoeDsaForCausalLM",
            "KimiK25ForConditionalGeneration",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
        }
    ),
    multiplexed_architectures=frozenset(
        {
            "LlamaForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
        }
    ),
    chunk_needs_whole_pages=True,
    load_metrics=LoadMetrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        queues={
            "prefill": ("sglang:num_prefill_inflight_queue_reqs",),
            "decode": (
                "sglang:num_decode_prealloc_queue_reqs",
                "sglang:num_decode_transfer_queue_reqs",
            ),
        },
        kv_usage="sglang:token_usage",
        option="--enable-metrics",
    ),
)

SGLANG_0_5_23_ROCM: Final = replace(
    SGLANG_0_5_23,
    vendor=Vendor.AMD,
    source="sglang 0.5.23 (wheel), docs.sglang.io (AMD GPUs)",
    image="lmsysorg/sglang:v0.5.23-rocm720-mi30x",
    image_note="the tag follows those of v0.5.16 and v0.5.18: check that it exists",
    quantization={"bf16": "", "fp8": "fp8", "fp8_block": "", "mxfp4": "", "fp8_block_mxfp4": ""},
    connectors={"mooncake": "mooncake"},
    node_links={},
    a2a_backends=PLAIN_EXCHANGES,
    overlap_backends=frozenset(),
    modes=frozenset({"aggregated", "disaggregated"}),
    multiplexed_architectures=frozenset(),
)

SGLANG_0_5_23_CANN: Final = replace(
    SGLANG_0_5_23,
    vendor=Vendor.HUAWEI,
    source="sglang 0.5.23 (wheel), docs.sglang.io (Ascend NPUs)",
    image="quay.io/ascend/sglang:cann9.0.0-910b-v0.5.23",
    image_note="the tag follows that of v0.5.16: check that it exists",
    environment=frozenset({"ASCEND_MF_STORE_URL", "ASCEND_MF_TRANSFER_PROTOCOL"}),
    quantization={"bf16": ""},
    weight_only_fallback=False,
    kv_cache_dtype={"bf16": ""},
    connectors={"ascend": "ascend"},
    node_links={},
    pages=ASCEND_PAGES,
    models=replace(
        SGLANG_0_5_23.models,
        architectures=EVERY - ZERO_EXPERTS,
        only_one={"pp": _ONE_STAGE - ZERO_EXPERTS},
        source="srt/models, without pp_group; docs.sglang.io, Ascend NPUs, supported models",
    ),
    a2a_backends=PLAIN_EXCHANGES,
    redundant_architectures=frozenset(),
    overlap_backends=frozenset(),
    modes=frozenset({"aggregated", "disaggregated"}),
    multiplexed_architectures=frozenset(),
)

RELEASES: Final = (SGLANG_0_5_23, SGLANG_0_5_23_ROCM, SGLANG_0_5_23_CANN)

_LP_ARCHITECTURES: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "MistralLarge3ForCausalLM",
        "MistralLarge3ForCausalLMEagle",
    }
)
"""Models whose idle ranks join the all-reduce of counts (sglang/srt/eplb/lplb_solver.py)."""

_LP_GENERATIONS: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
"""Compute capability 9.0 and newer (sglang/kernels/ops/lplb/torch_solver.py)."""

_OFFERS: Final = (
    DispatchOffer(name="static", rule="static", has_backend=True, is_default=True),
    DispatchOffer(name="dynamic", rule="near_dynamic", has_backend=True),
    DispatchOffer(
        name="lp",
        rule="near_lp",
        has_backend=True,
        architectures=_LP_ARCHITECTURES,
        generations=_LP_GENERATIONS,
        solves_program=True,
        cost="an all-reduce and a linear program in every layer; nvidia-mathdx must be installed",
    ),
    DispatchOffer(name="dynamic", rule="dynamic", has_backend=False, is_default=True),
)
"""Dispatch rules of the engine. Without a backend it refuses `static` and `lp`
(arg_groups/parallel_hook.py). With one, each rank's table has only its near replicas if there are
any, with any rule (eplb/expert_location.py), so that `lp` affects far sources only."""

_BACKENDS: Final = (
    "deepep",
    "none",
    "mooncake",
    "nixl",
    "mori",
    "ascend_fuseep",
    "flashinfer",
    "megamoe",
    "deepep_v2",
    "ascend_tp",
    "pplx",
    "flashinfer_megamoe",
)
"""`--moe-a2a-backend` (arg_groups/fields/exec_.py); most wide deployments run DeepEP."""

PLACE_TARGET: Final = PlaceTarget(
    name="sglang",
    release="0.5.23",
    all_layers=True,
    dispatches=frozenset({"even", "static", "dynamic", "lp"}),
    default_dispatch="static",
    offers=_OFFERS,
    a2a_backends=_BACKENDS,
)
