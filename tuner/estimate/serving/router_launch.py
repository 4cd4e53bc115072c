"""Routing of requests by the router of a launch, read from its command or its file.

    sglang_router.launch_router, vllm-router    --policy, --prefill-policy, --decode-policy
    python -m dynamo.frontend                   --router-mode
    trtllm-serve disaggregated -c FILE          `router: {type: ...}` of each role
    nginx                                       the directive of `upstream`, weights of its servers
    vllm-ascend's example proxy                 it has one policy

A router serves no requests itself: its policy is noted beside an instance's prediction, which
assumes an even share for each. Names are those of the releases' routers.

Routing to attention-data ranks is `--intra-node-data-parallel-size` of vllm-router and `--dp-aware`
of SGLang's; disaggregated vllm-router and Dynamo's `kv` always choose among ranks.

Not covered: gateways of Kubernetes (endpoint pickers), whose policies lie in other objects.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.catalog.serve_rules.routers import (
    DYNAMO_FRONTEND,
    LEAST_THRESHOLD,
    NGINX,
    RouterCapabilities,
)
from tuner.config.serve import ServeRouter
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.options_file import Beside
from tuner.engines.reading.serve_words import ServerFlags, server_flags
from tuner.engines.serving.releases import EVERY_RELEASE
from tuner.engines.trtllm.capabilities import TRTLLM_DISAGGREGATED
from tuner.engines.vllm_ascend.capabilities import ASCEND_PROXY
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.serving.routers import CACHE_THRESHOLD, RouterPolicy
from tuner.spec.yaml_text import parse_documents

_DISAGGREGATED_FLAGS: Final = frozenset({"pd-disaggregation", "vllm-pd-disaggregation"})

_DP_AWARE: Final = "dp-aware"
_RANKS: Final = "intra-node-data-parallel-size"


def _program(*starts: tuple[str, ...]) -> ServerFlags:
    nothing = frozenset[str]()
    return ServerFlags(
        starts=starts,
        spellings={"c": "config"},
        switches=_DISAGGREGATED_FLAGS | {_DP_AWARE},
        read=nothing,
        unpriced=nothing,
        timeless=nothing,
    )


_GATEWAYS: Final = {
    router.name: (router, _program(*router.gateway.starts))
    for release in EVERY_RELEASE
    for router in release.routers
    if router.gateway is not None and router.disaggregated
}
_FRONTEND: Final = _program(("dynamo.frontend",))
_PROXY: Final = _program(("load_balance_proxy_server_example.py",))
_TRTLLM: Final = _program(("trtllm-serve", "disaggregated"))
_ROLES: Final = re.compile(
    r"(context|generation)_servers:(?:\\n|\s){0,64}router:\s{0,64}(?:\{\s{0,64})?type:\s{0,64}(\w{1,64})"
)
"""Router types of `trtllm-serve disaggregated`, as emitted scripts print them."""
_UPSTREAM: Final = re.compile(r"\bupstream\s{1,64}[\w.-]{1,64}\s{0,64}\{([^}']{0,4096})")
_WEIGHTS: Final = re.compile(r"\bWEIGHTS=\(([\d ]{1,4096})\)")
_WEIGHT: Final = re.compile(r"\bweight=(\d{1,9})\b")
_BALANCERS: Final = re.compile(
    r"\b(least_conn|random|ip_hash|hash|least_time|queue|sticky)\b([^;]*);"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLaunch:
    """One router."""

    name: str
    """Name of the program."""
    router: ServeRouter | None
    """Policies of the router; None: its policy is not modelled, or is set where it was not read."""
    finds_ranks: bool = False
    """The router's policy looks for prefixes among the attention-data ranks of all instances."""
    note: str = ""
    """Caveat about its options."""

    @property
    def follows_prefixes(self) -> bool:
        """Whether its policy looks for prefixes, as far as it is known."""
        return self.router is None or self.router.policy is RouterPolicy.CACHE_AWARE

    def cautions(self, ranks: int) -> tuple[str, ...]:
        """Return caveats in front of instances of so many attention-data ranks."""
        stated = None if self.router is None else self.router.ranks
        if stated not in (None, ranks):
            return (f"--{_RANKS} {stated} is not the {ranks} data ranks of an instance",)
        return (self.note,) if self.note else ()

    def __str__(self) -> str:
        """Return the program and its policies."""
        router = self.router
        if router is None:
            return f"{self.name} by a policy that is not known here"
        decode = router.decode_policy
        decode_words = "" if decode in (None, router.policy) else f", {decode} for decode"
        return f"{self.name} by {router.policy}{decode_words}"


def read_router(text: str, *, source: str, beside: Beside = lambda _: None) -> RouterLaunch | None:
    """Return the router that a text starts; None where it starts none.

    Args:
        text: of a script, a command, or a configuration of nginx.
        source: what messages call it.
        beside: gives the files that the text names.

    Raises:
        SpecError: no shell text, several routers, or a policy that is not modelled.
    """
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    upstreams = _UPSTREAM.findall(text)
    for capabilities, server in _GATEWAYS.values():
        flags = _flags(text, server, source=source, is_nginx=bool(upstreams))
        if flags is not None:
            return _read_gateway(flags, capabilities)
    frontend = _flags(text, _FRONTEND, source=source, is_nginx=bool(upstreams))
    if frontend is not None:
        stated = frontend.environment.get("DYN_ROUTER_MODE", "round-robin")
        mode = frontend.word("router-mode") or stated
        policy = _policy(mode, DYNAMO_FRONTEND, disaggregated=False, source=source)
        return _launch(DYNAMO_FRONTEND, policy, policy)
    trtllm = _flags(text, _TRTLLM, source=source, is_nginx=bool(upstreams))
    if trtllm is not None:
        return _read_trtllm(trtllm, text, beside)
    if _flags(text, _PROXY, source=source, is_nginx=bool(upstreams)) is not None:
        return _launch(ASCEND_PROXY, RouterPolicy.LEAST_REQUESTS, RouterPolicy.LEAST_REQUESTS)
    return _read_nginx(upstreams, text) if upstreams else None


def _flags(text: str, server: ServerFlags, *, source: str, is_nginx: bool) -> Flags | None:
    try:
        return server_flags(text, source=source, server=server)
    except SpecError:
        if is_nginx:
            return None  # A configuration need not be shell text.
        raise


def _read_trtllm(flags: Flags, text: str, beside: Beside) -> RouterLaunch:
    """Read the router types of both roles from the file or the script that writes it."""
    types = dict(_ROLES.findall(text))
    named = flags.values.get("config", ())
    written = beside(named[0]) if len(named) == 1 and not types else None
    if written is not None:
        types = _types(written, source=flags.source)
    if not types and written is None:
        return RouterLaunch(name=TRTLLM_DISAGGREGATED.name, router=None)
    first, last = (
        _policy(
            types.get(role, "round_robin"),
            TRTLLM_DISAGGREGATED,
            disaggregated=True,
            source=flags.source,
        )
        for role in ("context", "generation")
    )
    return _launch(TRTLLM_DISAGGREGATED, first, last)


def _types(written: str, *, source: str) -> dict[str, str]:
    whole = next(iter(parse_documents(written, source=source)), None)
    types = {}
    for role in ("context", "generation"):
        servers = whole.get(f"{role}_servers") if isinstance(whole, dict) else None
        router = servers.get("router") if isinstance(servers, dict) else None
        kind = router.get("type") if isinstance(router, dict) else None
        if isinstance(kind, str):
            types[role] = kind
    return types


def _read_gateway(flags: Flags, capabilities: RouterCapabilities) -> RouterLaunch:
    disaggregated = bool(_DISAGGREGATED_FLAGS & set(flags.values))
    common = flags.word("policy") or "cache_aware"
    threshold = flags.share("cache-threshold")
    first, last = (
        _policy(
            flags.word(f"{role}-policy") or common,
            capabilities,
            disaggregated=disaggregated,
            source=flags.source,
            threshold=CACHE_THRESHOLD if threshold is None else threshold,
        )
        for role in ("prefill", "decode")
    )
    ranks = flags.number(_RANKS)
    launch = _launch(
        capabilities,
        first,
        last if disaggregated else None,
        threshold=threshold,
        ranks=ranks if ranks != 1 else None,
        is_disaggregated=disaggregated,
    )
    return replace(launch, note=capabilities.lacks_ranks) if _DP_AWARE in flags.values else launch


def _policy(
    word: str,
    capabilities: RouterCapabilities,
    *,
    disaggregated: bool,
    source: str,
    threshold: float = CACHE_THRESHOLD,
) -> RouterPolicy:
    """Return the policy of a router's name for it."""
    names = capabilities.policies(is_disaggregated=disaggregated)
    policies = [policy for policy, name in names.items() if name == word]
    if not policies:
        raise SpecError(
            f"{source}: policy {shown_value(word)} of {capabilities.name} is not modelled; those"
            f" that are: {', '.join(dict.fromkeys(names.values()))}"
        )
    if len(policies) > 1 and capabilities.threshold:
        follows_load = threshold >= LEAST_THRESHOLD
        return RouterPolicy.LEAST_REQUESTS if follows_load else RouterPolicy.CACHE_AWARE
    return policies[0]


def _read_nginx(upstreams: Sequence[str], text: str) -> RouterLaunch:
    """Read the policy of nginx's single upstream group."""
    if len(upstreams) > 1:
        return RouterLaunch(name=NGINX.name, router=None)
    (group,) = upstreams
    weights = {int(weight) for weight in _WEIGHT.findall(group)}
    weights |= {int(weight) for several in _WEIGHTS.findall(text) for weight in several.split()}
    balancer = _BALANCERS.search(group)
    words = " ".join((balancer[1] + balancer[2]).split()) if balancer else ""
    policy = {
        "": RouterPolicy.ROUND_ROBIN,
        "random": RouterPolicy.RANDOM,
        "random two": RouterPolicy.POWER_OF_TWO,
        "random two least_conn": RouterPolicy.POWER_OF_TWO,
        "least_conn": RouterPolicy.WEIGHTED_LEAST_REQUESTS
        if len(weights) > 1
        else RouterPolicy.LEAST_REQUESTS,
    }.get(words)
    if policy is None:
        return RouterLaunch(name=NGINX.name, router=None)
    return _launch(NGINX, policy, None)


def _launch(
    capabilities: RouterCapabilities,
    policy: RouterPolicy,
    decode_policy: RouterPolicy | None,
    *,
    threshold: float | None = None,
    ranks: int | None = None,
    is_disaggregated: bool = False,
) -> RouterLaunch:
    follows = RouterPolicy.CACHE_AWARE in (policy, decode_policy)
    router = ServeRouter(
        policy=policy,
        decode_policy=decode_policy,
        cache_threshold=threshold if follows else None,
        ranks=ranks,
    )
    option = capabilities.ranks_option(is_disaggregated=is_disaggregated)
    return RouterLaunch(
        name=capabilities.name,
        router=router,
        finds_ranks=policy is RouterPolicy.CACHE_AWARE
        and option is not None
        and (not option or ranks is not None),
    )
