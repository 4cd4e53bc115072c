"""Routers of the serving stacks: which policies a release has, under which names.

Read from the wheels' option parsers and sources:

- sglang-router 0.3.2, router_args.py and src/policies of sgl-model-gateway. `cache_aware` sends a
  prompt without a cached prefix above `--cache-threshold` to the instance with the fewest requests
  outstanding, so that a threshold of 1 is pure least-requests. `power_of_two` is left out: it
  compares loads from `/get_load`, which sglang 0.5.23 no longer has (it has `/v1/loads`), counts
  each failure as -1 and so picks at random. A request counts on its prefill instance until its
  output ends (src/routers/http/pd_router.rs has a guard for both).
- vllm-router 0.1.17 (source distribution), src/policies and src/routers/http/pd_types.rs: the same
  names; `power_of_two` finds no `/get_load` in vLLM and falls back to the router's count of
  outstanding requests; a request leaves its prefill instance after prefill.
- Dynamo 1.6.1, common/configuration/groups/router_args.py: `--router-mode` applies to both roles.
- TensorRT-LLM 1.3.0rc27, tensorrt_llm/serve/router.py: `router: {type: ...}` of the disaggregated
  server, by role. Its `kv_cache_aware` needs KV events from every server, which emitted files do
  not enable, so it is left out.
- nginx 1.29, ngx_http_upstream_module: `least_conn` divides by a server's `weight`. Used for
  aggregated instances of any engine.
- vllm-ascend 0.23.0, examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py: each
  request goes to the instance with the least outstanding prompt length, simulated as the fewest
  requests. A prefill instance is released after prefill, except for its cache, which counts 0.3
  until the first token. It has one policy, without prefixes.

Not covered: sessions by header (`manual`, `consistent_hash`, `sticky_least_loaded`), length buckets
of prompts, `kv_aware` of vllm-router with its events, endpoint pickers of a Kubernetes gateway
(llm-d), whose scorers use the metrics of the engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tuner.devices.datasheet import Vendor
from tuner.engines.serve_rules.manifest import ServingCapabilities
from tuner.spec.serving.routers import RouterPolicy

LEAST_THRESHOLD: Final = 1.0
"""Value of `--cache-threshold` that no prompt exceeds, so that all are balanced by load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCapabilities:
    """What one release of a router can do."""

    name: str
    release: str
    source: str
    aggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """Its name of each policy for aggregated instances; empty: not supported."""
    disaggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """The same for disaggregated instances."""
    one_policy: bool = False
    """Prefill and decode instances have the same policy."""
    threshold: bool = False
    """Least-requests is its cache-aware policy at a threshold, which all roles share."""
    holds_prefill: bool = False
    """A request counts on its prefill instance until its output ends."""

    def policies(self, *, is_disaggregated: bool) -> Mapping[RouterPolicy, str]:
        """Return its names of policies, disaggregated or aggregated."""
        return self.disaggregated if is_disaggregated else self.aggregated


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
"""By engine, in order of preference: the first one that has a policy is used."""
ON_ASCEND: Final[Mapping[str, tuple[RouterCapabilities, ...]]] = {
    **ROUTERS,
    "vllm": (ASCEND_PROXY, replace(VLLM_ROUTER, disaggregated={}), NGINX),
}
"""The same on Ascend, where vllm-ascend's proxy pairs prefill and decode instances."""
DYNAMO: Final = "dynamo"
"""The target with its own router (frontend)."""


def router_stacks(
    releases: Iterable[ServingCapabilities], targets: Iterable[str]
) -> tuple[tuple[RouterCapabilities, ...], ...]:
    """Return the routers of every stack that a spec names, by default the engines' own.

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
    routers: Iterable[RouterCapabilities], policy: RouterPolicy, *, is_disaggregated: bool
) -> RouterCapabilities | None:
    """Return the first router of a stack that has the policy."""
    return next(
        (one for one in routers if policy in one.policies(is_disaggregated=is_disaggregated)), None
    )
