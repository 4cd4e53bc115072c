"""vLLM with vllm-ascend 0.23.0, on Huawei's Ascend.

- docs.vllm.ai, projects/ascend: supported models and tutorials name Qwen3-Next, Qwen3.5, GLM-5,
  DeepSeek-V3.2, DeepSeek-V4, Kimi-K2.5 and MiniMax-M2, no Kimi Linear, no Nemotron-H and no
  LongCat-Flash (whose code is pull request 3833); Llama-4 is marked as not supported.
- vllm-ascend, branch releases/v0.23.0: community/versioning_policy.md (plugin 0.23.0 needs vllm
  0.23.0, so Ascend runs an older release), vllm_ascend/platform.py (device_type "npu",
  supported_quantization, ASCEND_RT_VISIBLE_DEVICES), utils.py (refresh_block_size: 128 tokens),
  ascend_forward_context.py (select_moe_comm_method chooses among all-gather, MC2 and all-to-all
  itself), distributed/kv_transfer/__init__.py and kv_p2p/mooncake_connector.py (MooncakeConnectorV1
  over the transport "ascend", degrees of both sides in its extra configuration). It implements no
  `get_nixl_supported_devices`, without which vllm 0.23.0's NIXL connector refuses "npu"
  (kv_connector/v1/nixl/utils.py).

Not covered: W8A8 checkpoints and redundant experts, whose EPLB is that of the plugin; other pages
without prefix cache and chunked prefill; vllm-ascend after 0.23.0.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.place_rules import IN_TURN, PlaceTarget
from tuner.catalog.serve_rules.kv_cache import (
    CacheKind,
    Connector,
    ConnectorRules,
    DefaultPage,
    KvPages,
    LegalPages,
    PipelineRule,
)
from tuner.catalog.serve_rules.models import CHUNKED, EVERY, ZERO_EXPERTS, ServedModels
from tuner.catalog.serve_rules.routers import NGINX, RouterCapabilities
from tuner.catalog.serve_rules.vendors import PLAIN_EXCHANGES
from tuner.devices.datasheet import Vendor
from tuner.engines.vllm.capabilities import VLLM_0_33, VLLM_ROUTER
from tuner.spec.serving.routers import RouterPolicy

ASCEND_PROXY: Final = RouterCapabilities(
    name="vllm-ascend's load balance proxy",
    release="0.23.0",
    source="vllm-ascend releases/v0.23.0, examples/disaggregated_prefill_v1",
    disaggregated={RouterPolicy.LEAST_REQUESTS: ""},
    script="""\
PROXY="${PROXY:-/vllm-workspace/vllm-ascend/examples/disaggregated_prefill_v1/\
load_balance_proxy_server_example.py}"
hosts() { local url; for url in "$@"; do url="${url#http://}"; printf '%s ' "${url%%:*}"; done; }
ports() { local url; for url in "$@"; do printf '%s ' "${url##*:}"; done; }
# Unquoted: one word per host or port.
exec python "$PROXY" --host "$ROUTER_HOST" --port "$ROUTER_PORT" \\
  --prefiller-hosts $(hosts "${PREFILL[@]}") --prefiller-ports $(ports "${PREFILL[@]}") \\
  --decoder-hosts $(hosts "${DECODE[@]}") --decoder-ports $(ports "${DECODE[@]}") "$@"
""",
)
"""load_balance_proxy_server_example.py, in its container under /vllm-workspace: each request goes
to the instance with the least outstanding prompt length, simulated as the fewest requests. A
prefill instance is released after prefill, except for its cache, which counts 0.3 until the first
token. It has one policy, without prefixes."""

VLLM_ASCEND_0_23: Final = replace(
    VLLM_0_33,
    vendor=Vendor.HUAWEI,
    release="0.23.0",
    plugin="vllm-ascend 0.23.0",
    source="github.com/vllm-project/vllm-ascend releases/v0.23.0, vllm 0.23.0 (wheel)",
    image="quay.io/ascend/vllm-ascend:v0.23.0",
    options=VLLM_0_33.options - {"--disable-chunked-prefill"} | {"--no-enable-chunked-prefill"},
    whole_prompts_option="--no-enable-chunked-prefill",
    environment=frozenset(),
    models=ServedModels(
        architectures=EVERY
        - CHUNKED
        - ZERO_EXPERTS
        - {"KimiLinearForCausalLM", "NemotronHForCausalLM"},
        source="docs.vllm.ai, projects/ascend, supported models",
    ),
    quantization={"bf16": ""},
    weight_only_fallback=False,
    kv_cache_dtype={"bf16": ""},
    connectors={"ascend": "MooncakeConnectorV1"},
    node_links={},
    pages=KvPages(
        layout="nhd", defaults=(DefaultPage(tokens=128, legal=LegalPages(among=(128,))),)
    ),
    transfers=tuple(
        ConnectorRules(
            connector=Connector.ASCEND,
            cache=cache,
            one_shape=True,
            wider_decode=False,
            pipeline=PipelineRule.DECODE_ONE,
            source="vllm 0.23.0: vllm-ascend 0.23.0, distributed/kv_transfer/kv_p2p/"
            "mooncake_connector.py (MooncakeConnectorWorker.__init__, _get_prefill_decode_size)",
        )
        for cache in CacheKind
    ),
    routers=(ASCEND_PROXY, replace(VLLM_ROUTER, disaggregated={}), NGINX),
    host_path=False,
    a2a_backends=PLAIN_EXCHANGES,
    has_a2a_option=False,
    redundant_architectures=frozenset(),
    overlap_backends=frozenset(),
    portable_backends={},
)

RELEASES: Final = (VLLM_ASCEND_0_23,)

PLACE_TARGET: Final = PlaceTarget(
    name="vllm-ascend", release="182b75e", every_moe_layer=True, twins=False, dispatches=IN_TURN
)
