"""Routers of the serving stacks: which policies a release has, under which names.

Read from the wheels' option parsers and sources:

- sglang-router 0.3.2, router_args.py and src/policies of sgl-model-gateway. `cache_aware` sends a
  prompt whose prefix no instance holds above `--cache-threshold` to the one with the fewest
  requests outstanding, so that a threshold of 1 leaves only that. `power_of_two` is left out: it
  compares what it polls from `/get_load`, which sglang 0.5.23 no longer answers (there is
  `/v1/loads` instead), takes each failure for -1 and so picks at random. A request counts on its
  prefill instance until the answer ends (src/routers/http/pd_router.rs holds a guard for both).
- vllm-router 0.1.17 (source distribution), src/policies and src/routers/http/pd_types.rs: the same
  names; `power_of_two` finds no `/get_load` at vLLM and falls back to the router's own count of
  requests outstanding; a request leaves its prefill instance when the prompt is read.
- Dynamo 1.6.1, common/configuration/groups/router_args.py: `--router-mode` holds for both roles.
- TensorRT-LLM 1.3.0rc27, tensorrt_llm/serve/router.py: `router: {type: ...}` of the disaggregated
  server, by role. Its `kv_cache_aware` needs events of block reuse from every server, which emitted
  files do not turn on, so it is left out.
- nginx 1.29, ngx_http_upstream_module: `least_conn` divides by a server's `weight`. It stands in
  front of aggregated instances of any engine.
- vllm-ascend 0.23.0, examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py: each
  request goes where the least prompt length is outstanding, simulated as the fewest requests. A
  prefill instance is given free when the prompt is read, but for its cache, which counts 0.3 until
  the first token. No choice of policy, and no look at prefixes.

Not covered: sessions by header (`manual`, `consistent_hash`, `sticky_least_loaded`), prompts sorted
into buckets by length, `kv_aware` of vllm-router with its events, endpoint pickers of a Kubernetes
gateway (llm-d), whose scorers look at the metrics of the engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tuner.devices.datasheet import Vendor
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.routers import RouterPolicy

LEAST_THRESHOLD: Final = 1.0
"""Of `--cache-threshold`: no prompt matches by more, so all follow load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCapabilities:
    """What one release of a router can do."""

    name: str
    release: str
    source: str
    aggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """Its name of each policy where instances read and answer; empty: it does not stand there."""
    disaggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """The same for prefill and for decode instances."""
    one_policy: bool = False
    """Prefill and decode instances have the same."""
    threshold: bool = False
    """Least load is its cache-aware policy at a threshold, which all roles share."""
    holds_prefill: bool = False
    """A request counts on its prefill instance until its answer ends."""

    def policies(self, *, is_apart: bool) -> Mapping[RouterPolicy, str]:
        """Return its name of each policy where prefill and decode are apart, or are not."""
        return self.disaggregated if is_apart else self.aggregated


_GATEWAY: Final = {
    RouterPolicy.ROUND_ROBIN: "round_robin",
    RouterPolicy.RANDOM: "random",
    RouterPolicy.LEAST_REQUESTS: "cache_aware",
    RouterPolicy.CACHE_AWARE: "cache_aware",
}
SGLANG_ROUTER: Final = RouterCapabilities(
    name="sglang-router",
    release="0.3.2",
    source="sglang-router 0.3.2 (wheel), sgl-model-gateway of github.com/sgl-project/sglang",
    aggregated=_GATEWAY,
    disaggregated=_GATEWAY,
    threshold=True,
    holds_prefill=True,
)
VLLM_ROUTER: Final = RouterCapabilities(
    name="vllm-router",
    release="0.1.17",
    source="vllm-router 0.1.17 (source distribution)",
    aggregated={**_GATEWAY, RouterPolicy.POWER_OF_TWO: "power_of_two"},
    disaggregated={**_GATEWAY, RouterPolicy.POWER_OF_TWO: "power_of_two"},
    threshold=True,
)
_FRONTEND: Final = {
    RouterPolicy.ROUND_ROBIN: "round-robin",
    RouterPolicy.RANDOM: "random",
    RouterPolicy.POWER_OF_TWO: "power-of-two",
    RouterPolicy.LEAST_REQUESTS: "least-loaded",
    RouterPolicy.CACHE_AWARE: "kv",
}
DYNAMO_FRONTEND: Final = RouterCapabilities(
    name="dynamo",
    release="1.6.1",
    source="ai-dynamo 1.6.1 (wheel)",
    aggregated=_FRONTEND,
    disaggregated=_FRONTEND,
    one_policy=True,
)
TRTLLM_DISAGGREGATED: Final = RouterCapabilities(
    name="trtllm-serve disaggregated",
    release="1.3.0rc27",
    source="github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/serve/router.py",
    disaggregated={
        RouterPolicy.ROUND_ROBIN: "round_robin",
        RouterPolicy.LEAST_REQUESTS: "load_balancing",
    },
)
NGINX: Final = RouterCapabilities(
    name="nginx",
    release="1.29",
    source="nginx.org, ngx_http_upstream_module",
    aggregated={
        RouterPolicy.ROUND_ROBIN: "",
        RouterPolicy.RANDOM: "random",
        RouterPolicy.POWER_OF_TWO: "random two least_conn",
        RouterPolicy.LEAST_REQUESTS: "least_conn",
        RouterPolicy.WEIGHTED_LEAST_REQUESTS: "least_conn",
    },
)
ASCEND_PROXY: Final = RouterCapabilities(
    name="vllm-ascend's load balance proxy",
    release="0.23.0",
    source="vllm-ascend releases/v0.23.0, examples/disaggregated_prefill_v1",
    disaggregated={RouterPolicy.LEAST_REQUESTS: ""},
)
ROUTERS: Final[Mapping[str, tuple[RouterCapabilities, ...]]] = {
    "sglang": (SGLANG_ROUTER, NGINX),
    "vllm": (VLLM_ROUTER, NGINX),
    "trtllm": (TRTLLM_DISAGGREGATED, NGINX),
}
"""Of each engine, the first that has a policy is taken."""
ON_ASCEND: Final[Mapping[str, tuple[RouterCapabilities, ...]]] = {
    **ROUTERS,
    "vllm": (ASCEND_PROXY, replace(VLLM_ROUTER, disaggregated={}), NGINX),
}
"""The same on Ascend, where the plugin's proxy pairs vLLM's prefill and decode instances."""
DYNAMO: Final = "dynamo"
"""The target whose own frontend routes."""


def stacks_of(
    releases: Iterable[ServingCapabilities], targets: Iterable[str]
) -> tuple[tuple[RouterCapabilities, ...], ...]:
    """Return the routers of every stack that a spec names, the engines' own where it names none.

    Args:
        releases: of the pools; each island of another release has a router of its own.
        targets: that the spec names.
    """
    named = dict.fromkeys((target == DYNAMO) for target in targets) or {False: None}
    own = {
        (name, is_ascend): (ON_ASCEND if is_ascend else ROUTERS)[name]
        for name, is_ascend in ((one.name, one.vendor is Vendor.HUAWEI) for one in releases)
    }.values()
    return tuple(
        stack for is_dynamo in named for stack in (((DYNAMO_FRONTEND,),) if is_dynamo else own)
    )


def router_with(
    routers: Iterable[RouterCapabilities], policy: RouterPolicy, *, is_apart: bool
) -> RouterCapabilities | None:
    """Return the first router of a stack that has the policy."""
    return next((one for one in routers if policy in one.policies(is_apart=is_apart)), None)
