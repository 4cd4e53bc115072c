"""TensorRT-LLM: the options file of `trtllm-serve`, PyTorch backend.

Read from the reference of the LLM API of 1.3.0rc27 (TorchLlmArgs, MoeConfig,
CacheTransceiverConfig), docs/source/features/disagg-serving.md, and
tensorrt_llm/_torch/modules/fused_moe/communication of github.com/NVIDIA/TensorRT-LLM:

- `tensor_parallel_size` counts all devices of a pipeline stage. `enable_attention_dp` makes every
  one of them an attention data-parallel rank, so there are no intermediate degrees. Those with the
  fewest tokens get the next requests, unless `attention_dp_config.enable_kv_cache_aware_routing`
  asks each for its cached prefix (_torch/pyexecutor/scheduler/adp_router.py, pull request 12315);
  emitted files set it where sessions have prefixes.
- An all-to-all needs attention data parallelism and whole experts; TRTLLM_FORCE_COMM_METHOD names
  one, TRTLLM_DEEP_EP_TOKEN_LIMIT bounds its low-latency buffers, and batches above it fall back.
- `moe_config.load_balancer`, a mapping or a file, gives `num_slots` to the experts of a layer: at
  least one each, a multiple of the expert ranks, only under attention data parallelism
  (modules/fused_moe/interface.py). `layer_updates_per_iter` above 0 moves them by the loads that it
  records. Its documents name DeepSeek-V3 and Qwen3 (features/parallel-strategy, wide expert
  parallelism).
- Weights are quantised beforehand, as the checkpoint says. MXFP4 experts run with MXFP8 activations
  on Blackwell, BF16 on Hopper (deployment-guide-for-gpt-oss-on-trtllm). DeepSeek-V4 runs on
  Blackwell alone, and its disaggregated serving is untested (docs/source/models/
  supported-models.md, note 11).
- A prefill instance cannot overlap its scheduler. Prompts have no graph, nor unpadded batches.
- One process streams 4,009 tokens/s at most of GPUStack's performance lab (Qwen3-14B on H100).
- `speculative_config` of type MTP drafts `max_draft_len` tokens with the model's MTP layers;
  another draft model needs a path in the options file, which a plan does not have.
- `tokens_per_block` is a power of two (docs/source/features/kvcache.md).

Not covered: the TensorRT backend, context parallelism, chunked KV transfer, drafting across
pipeline stages, which its documents do not mention and which is therefore refused. The release
cannot be installed without GPU libraries, so these names were checked against documents only.
"""

from typing import Final

from tuner.catalog.place_rules import IN_TURN, PlaceTarget
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.models import EVERY, ServedModels
from tuner.catalog.serve_rules.routers import NGINX, RouterCapabilities
from tuner.catalog.serve_rules.traits import (
    Batching,
    EngineTraits,
    MemoryFractionKind,
    MemoryRule,
    StateRule,
)
from tuner.devices.datasheet import Generation
from tuner.engines.trtllm.kv import PAGES, TRANSFERS
from tuner.spec.serving.routers import RouterPolicy

TRAITS: Final = EngineTraits(
    name="trtllm",
    batching=Batching.WHOLE,
    step_tokens=8192,
    scheduler_s=0.5e-3,
    aligns_prompts=True,
    waits_for_host=True,
    stream_s=0.15e-3,
    streams_by_rank=False,
    memory=(
        MemoryRule(
            share=MemoryFractionKind.OF_LEFT,
            ratio=0.9,
            sampler_bytes=8.0,
            allocates_late=True,
            window_pool_ratio=1.0,
            states=StateRule(bf16_architectures=frozenset({"Qwen3NextForCausalLM"})),
        ),
    ),
    spoilt_gemms=frozenset({"fp8", "nvfp4"}),
    multiplies_fp8_caches=True,
    experts_like={("fp8_block", Generation.BLACKWELL): "sglang"},
)
"""Admission: the default policy GUARANTEED_NO_EVICT. Prompts of ranks: as public recipes configure
it and emitted files do (`attention_dp_config: enable_balance`, InferenceX, benchmarks/); a launch
that is read decides itself. Memory: `llmapi/llm_args.py`,
`free_gpu_memory_fraction`; the share is of what the peak of a dry run leaves
(_torch/pyexecutor/_util.py, `configure_kv_cache_capacity`), whose one or few prompts of
`max_num_tokens` fill no sampler; that holds fp32 logits and probabilities (4 + 4;
pyexecutor/sampler.py and its grouped sampler, where a batch samples alike). Graphs and buffers of
transfers exist in the dry run and are made again for the final cache (py_executor_creator.py);
PyTorch frees no cached memory while a graph is captured. Batches of 512 did not run with 0.95 and
ran with 0.85 (ai-dynamo/dynamo pull request 9746). States: `mamba_ssm_cache_dtype` auto is that of
config.json, else the type of the model (_torch/pyexecutor/config_utils.py,
`extract_mamba_kv_cache_params`); Qwen3.5's
`mamba_ssm_dtype`, float32, is taken, which the main branch no longer reads (pull request 16065).
Measured GEMMs of fp8 and nvfp4 hold a quantisation that static checkpoints do not run (6 to 9 us).
Block-scaled experts were timed with DeepGEMM, which its recipes take for many tokens; for few they
take generated kernels (`moe_config.backend: TRTLLM`), which SGLang's table measured."""

TRTLLM_DISAGGREGATED: Final = RouterCapabilities(
    name="trtllm-serve disaggregated",
    release="1.3.0rc27",
    source="github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/serve/router.py",
    disaggregated={
        RouterPolicy.ROUND_ROBIN: "round_robin",
        RouterPolicy.LEAST_REQUESTS: "load_balancing",
    },
    script="""\
CONFIG="$(mktemp --suffix=.yaml)"
{
  printf 'hostname: "%s"\\nport: %s\\nbackend: pytorch\\n' "$ROUTER_HOST" "$ROUTER_PORT"
  printf 'context_servers:\\n  router: {type: @PREFILL@}\\n'
  printf '  num_instances: %s\\n  urls:\\n' "${#PREFILL[@]}"
  printf '    - "%s"\\n' "${PREFILL[@]#http://}"
  printf 'generation_servers:\\n  router: {type: @DECODE@}\\n'
  printf '  num_instances: %s\\n  urls:\\n' "${#DECODE[@]}"
  printf '    - "%s"\\n' "${DECODE[@]#http://}"
} > "$CONFIG"
# Both limits are seconds: until the instances are ready, and of one request.
exec trtllm-serve disaggregated -c "$CONFIG" -t 3600 -r 3600 "$@"
""",
)
"""`router: {type: ...}` of the disaggregated server, by role. Its `kv_cache_aware` needs KV events
from every server, which emitted files do not enable, so it is left out."""

_ABSENT: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "KimiLinearForCausalLM",
        "Llama4ForCausalLM",
        "LongcatFlashForCausalLM",
        "OlmoeForCausalLM",
    }
)
"""Models that the PyTorch backend does not support; DeepSeek-V2 and GLM-4.7-Flash run with
AutoDeploy alone. _torch/models/_arch_index.py of the main branch has Kimi Linear beside Kimi K3
(pull request 17269), which no document of the release describes."""

TRTLLM_1_3: Final = ServingCapabilities(
    is_mpi_job=True,
    traits=TRAITS,
    release="1.3.0rc27",
    source="nvidia.github.io/TensorRT-LLM/1.3.0rc27, github.com/NVIDIA/TensorRT-LLM",
    image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc27",
    options=frozenset(
        {
            "attention_dp_config",
            "cache_transceiver_config",
            "cuda_graph_config",
            "disable_overlap_scheduler",
            "enable_attention_dp",
            "enable_chunked_prefill",
            "gpus_per_node",
            "kv_cache_config",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "moe_config",
            "moe_expert_parallel_size",
            "moe_tensor_parallel_size",
            "pipeline_parallel_size",
            "speculative_config",
            "tensor_parallel_size",
        }
    ),
    environment=frozenset(
        {"TRTLLM_CAN_USE_DEEP_EP", "TRTLLM_DEEP_EP_TOKEN_LIMIT", "TRTLLM_FORCE_COMM_METHOD"}
    ),
    models=ServedModels(
        architectures=EVERY - _ABSENT,
        only_on={"DeepseekV4ForCausalLM": frozenset({Generation.BLACKWELL})},
        source="docs/source/models/supported-models.md, PyTorch backend",
    ),
    quantization={
        "bf16": "",
        "fp8": "",
        "fp8_block": "",
        "nvfp4": "",
        "mxfp4": "",
        "fp8_block_mxfp4": "",
    },
    kv_cache_dtype={"bf16": "auto", "fp8": "fp8"},
    connectors={"nixl": "NIXL", "mooncake": "MOONCAKE"},
    pages=PAGES,
    transfers=TRANSFERS,
    routers=(TRTLLM_DISAGGREGATED, NGINX),
    deepep_needs_attention_dp=True,
    both_attention_degrees=False,
    rank_dispatch="by their tokens",
    finds_ranks=True,
    whole_prompt_in_one_batch=True,
    redundant_architectures=frozenset({"DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"}),
    redundant_needs_attention_dp=True,
    drafting={"mtp": "MTP"},
    page_is_power_of_two=True,
)

RELEASES: Final = (TRTLLM_1_3,)

PLACE_TARGET: Final = PlaceTarget(name="trtllm", release="1.3.0rc27", dispatches=IN_TURN)
"""Target of placements, by TensorRT-LLM's ep_load_balancer examples."""
