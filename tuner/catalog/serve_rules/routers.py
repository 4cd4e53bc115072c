"""Routers of the serving stacks: which policies a release has, under which names.

An engine's own routers are in its folder; here are those in front of any engine, read from wheels
and sources:

- Dynamo 1.6.1, common/configuration/groups/router_args.py: `--router-mode` applies to both roles.
- Dynamo 1.6.1, dynamo/{vllm,sglang,trtllm}: workers register every attention-data rank and publish
  its KV events, so that `kv` chooses ranks (dynamo/sglang/capacity.py counts SGLang's ranks).
- nginx 1.29, ngx_http_upstream_module: `least_conn` divides by a server's `weight`. Used for
  aggregated instances of any engine.

Not covered: sessions by header (`manual`, `consistent_hash`, `sticky_least_loaded`), length buckets
of prompts, `kv_aware` of vllm-router with its events, endpoint pickers of a Kubernetes gateway
(llm-d), whose scorers use the metrics of the engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.spec.serving.routers import RouterPolicy

LEAST_THRESHOLD: Final = 1.0
"""Value of `--cache-threshold` that no prompt exceeds, so that all are balanced by load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The command of SGLang's gateway or of a fork of it."""

    program: str
    starts: tuple[tuple[str, ...], ...]
    """Words by which a command of it is known."""
    disaggregated: str
    """Option of disaggregated instances."""
    names_connector: bool = False
    """`--kv-connector` names the connector of disaggregated instances."""
    bootstrap_connectors: frozenset[str] | None = None
    """Connectors whose prefill instances have a bootstrap port; None: all."""
    annotation: str
    """Annotation of a prefill pod that states its bootstrap port."""
    takes_token_ids: bool = True
    """Completions may have prompts of token ids, beside text."""
    install: str = ""
    """Bash that makes sure that a container of the engine has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCapabilities:
    """Policies of one release of a router."""

    name: str
    release: str
    source: str
    aggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """The router's name of each policy for aggregated instances; empty: they are not supported."""
    disaggregated: Mapping[RouterPolicy, str] = field(default_factory=dict)
    """The router's name of each policy for disaggregated instances."""
    one_policy: bool = False
    """Prefill and decode instances have the same policy."""
    threshold: bool = False
    """Least-requests is its cache-aware policy at a threshold, which all roles share."""
    holds_prefill: bool = False
    """A request counts on its prefill instance until its output ends."""
    aggregated_ranks: str | None = None
    """Option, with `{ranks}` for their number, by which its cache-aware policy chooses among the
    attention-data ranks of all aggregated instances; empty: it always does; None: it chooses among
    instances."""
    disaggregated_ranks: str | None = None
    """Option, as in `aggregated_ranks`, for the ranks of disaggregated instances."""
    lacks_ranks: str = ""
    """Reason why `aggregated_ranks` and `disaggregated_ranks` reach no ranks of the engine's
    release."""
    gateway: Gateway | None = None
    """Command of the gateway; None: it starts by `script`, or by code for any engine."""
    script: str = ""
    """Bash that executes it; its names of both policies replace @PREFILL@ and @DECODE@."""

    def policies(self, *, is_disaggregated: bool) -> Mapping[RouterPolicy, str]:
        """Return its names of policies, disaggregated or aggregated."""
        return self.disaggregated if is_disaggregated else self.aggregated

    def ranks_option(self, *, is_disaggregated: bool) -> str | None:
        """Return its option for attention-data ranks, disaggregated or aggregated."""
        return self.disaggregated_ranks if is_disaggregated else self.aggregated_ranks


GATEWAY_POLICIES: Final = {
    RouterPolicy.ROUND_ROBIN: "round_robin",
    RouterPolicy.RANDOM: "random",
    RouterPolicy.LEAST_REQUESTS: "cache_aware",
    RouterPolicy.CACHE_AWARE: "cache_aware",
}
"""Names of policies in SGLang's gateway and its forks: `cache_aware` sends a prompt without a
cached prefix above `--cache-threshold` to the instance with the fewest requests outstanding, so
that a threshold of 1 is pure least-requests."""
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
    aggregated_ranks="",
    disaggregated_ranks="",
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
DYNAMO: Final = "dynamo"
"""The target with its own router (frontend)."""


def router_stacks(
    engine_stacks: Iterable[tuple[RouterCapabilities, ...]], targets: Iterable[str]
) -> tuple[tuple[RouterCapabilities, ...], ...]:
    """Return the routers of every stack that a spec names, by default the engines' own.

    Args:
        engine_stacks: routers of the pools' releases; each island of another release has
            one of its own.
        targets: that the spec names.
    """
    named = dict.fromkeys((target == DYNAMO) for target in targets) or {False: None}
    return tuple(
        stack
        for is_dynamo in named
        for stack in (((DYNAMO_FRONTEND,),) if is_dynamo else engine_stacks)
    )


def router_with(
    routers: Iterable[RouterCapabilities], policy: RouterPolicy, *, is_disaggregated: bool
) -> RouterCapabilities | None:
    """Return the first router of a stack that has the policy."""
    return next(
        (
            router
            for router in routers
            if policy in router.policies(is_disaggregated=is_disaggregated)
        ),
        None,
    )
