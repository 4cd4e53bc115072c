"""vLLM with vllm-project/afd-plugin, experimental: attention-FFN disaggregation (AFD).

The plugin has no release for vLLM 0.30 (its one tag, v0.19.1rc1, is for 0.19.1), so it is pinned by
commit: 1de1a99, whose README names vLLM 0.30.0 and no other version. Where a file of that commit
was not available, the nearest stored version was read, all of which state vLLM 0.30.0:

- README.md and recipe/gpu/P2pNcclAFDConnector/deepseek_v2_lite/README.md (1de1a99): connectors,
  models, `VLLM_USE_V2_MODEL_RUNNER=0`, "FULL_DECODE_ONLY" graphs, exactly two micro-batches of a
  batch.
- afd_plugin/distributed/topology.py (99b4e88): at least as many attention as FFN ranks; attention
  ranks in blocks that differ by one at most. `resolve_role_rank` counts data and tensor ranks and
  no pipeline stage.
- afd_plugin/config.py (06a857b), validation.py (4c98691), v1/worker/cuda_graph.py (1dd2c6b),
  compat/vllm.py (3ee2e81): keys of the configuration, graphs, the one version of vLLM.
- afd_plugin/model_executor/models/qwen3_moe.py (3ee2e81): CUDA only, the gate on the FFN server,
  no sequence-parallel experts, EPLB, pipeline, speculation or LoRA.
- afd_plugin/model_executor/models/deepseek_v2.py (04ac606), remote_moe.py (2d47ec3): no EPLB, no
  redundant experts on attention ranks.
- afd_plugin/v1/worker/{ffn_worker,ffn_model_runner}.py (2e4378f): the FFN server has no scheduler
  and no KV cache, runs all layers in order and expects no requests.
- docs/gpu/NCCL_P2P_CONNECTOR_USER_GUIDE.md (0cb4ba1): `host` is the first FFN rank's; machines of
  their own are verified for DeepSeek-V2-Lite with 2 + 2 ranks and nothing else.
- recipe/gpu/P2pNcclAFDConnector/deepseek_v2_lite/prefill_decode_disaggregation (2e4378f): prefill
  instances are plain vLLM, only the attention server receives caches over NIXL.

Options of vLLM 0.30.0 were read in its wheel (vllm/engine/arg_utils.py,
vllm/entrypoints/launchers/cli_args.py), `use_sequence_parallel_moe` in vllm/config/parallel.py.
Other facts about instances without the plugin are those of 0.33.0 (vllm/capabilities.py).

Not covered: the connectors of Ascend 910C (README: operators for `SOC_VERSION=ascend910_9391`), a
device that is not described; Qwen3.5 and 3.6, whose halves end in an illegal access by the README;
GLM with sparse attention, which the README leaves out of its models; attention on CUDA's second
model runner; the gate on attention ranks; LoRA, which no spec has.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.serve_rules.afd import AfdCapabilities, AfdConnector
from tuner.engines.vllm.capabilities import VLLM_0_33
from tuner.engines.vllm.kv import nixl_rules

AFD_PLUGIN: Final = AfdCapabilities(
    plugin="vllm-project/afd-plugin",
    commit="1de1a990bf0dd638fae31705a683c74707092a29",
    connectors=(
        AfdConnector(
            name="P2pNcclAFDConnector",
            platform="cuda",
            stage="decode",
            graphs="FULL_DECODE_ONLY",
            least_attention_per_ffn=1,
        ),
        AfdConnector(
            name="CAMP2pAFDConnector",
            platform="Ascend 910C",
            stage="decode",
            graphs="FULL_DECODE_ONLY",
        ),
        AfdConnector(
            name="CAMAsyncAFDConnector",
            platform="Ascend 910C",
            stage="prefill or decode",
            graphs="",
        ),
    ),
    architectures=frozenset(
        {
            "DeepseekForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Qwen3MoeForCausalLM",
        }
    ),
    plain_experts=frozenset({"Qwen3MoeForCausalLM"}),
)

_NIXL: Final = (
    "vllm 0.30.0+afd: kv_connector/v1/nixl/base_worker.py (_validate_remote_agent_handshake); the"
    " rest is from the documents of 0.33.0"
)

VLLM_0_30_AFD: Final = replace(
    VLLM_0_33,
    release="0.30.0+afd",
    source=f"vllm 0.30.0 (wheel) and {AFD_PLUGIN.plugin} at {AFD_PLUGIN.commit}",
    image="vllm/vllm-openai:v0.30.0",
    options=VLLM_0_33.options - {"--disable-chunked-prefill"}
    | {"--additional-config", "--compilation-config", "--no-enable-chunked-prefill"},
    environment=VLLM_0_33.environment | {"VLLM_USE_V2_MODEL_RUNNER"},
    whole_prompts_option="--no-enable-chunked-prefill",
    connectors={"nixl": "NixlConnector"},
    transfers=nixl_rules(_NIXL),
    modes=VLLM_0_33.modes | {"attention_expert"},
    afd=AFD_PLUGIN,
)

RELEASES: Final = (VLLM_0_30_AFD,)
