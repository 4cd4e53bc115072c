"""How the router of a launch spreads requests, out of its command or its file.

    sglang_router.launch_router, vllm-router    --policy, --prefill-policy, --decode-policy
    python -m dynamo.frontend                   --router-mode
    trtllm-serve disaggregated                  `router: {type: ...}` of each role in its file
    nginx                                       the directive of `upstream`, weights of its servers
    vllm-ascend's example proxy                 it has one policy

A router answers no requests: what is read of it is said beside an instance's prediction, which
counts an even share for each. Names are those of tuner/spec/serving/manifests/routers.py.

Not covered: gateways of Kubernetes (endpoint pickers), whose policies lie in other objects.
"""

import re
from dataclasses import dataclass
from typing import Final

from tuner.errors import SpecError
from tuner.estimate.readers.arguments import Flags
from tuner.estimate.serving.words import Server, flags_of_server
from tuner.serve_plan import ServeRouter
from tuner.spec.files import shown_value
from tuner.spec.serving.manifests.routers import (
    ASCEND_PROXY,
    DYNAMO_FRONTEND,
    LEAST_THRESHOLD,
    NGINX,
    SGLANG_ROUTER,
    TRTLLM_DISAGGREGATED,
    VLLM_ROUTER,
    RouterCapabilities,
)
from tuner.spec.serving.routers import CACHE_THRESHOLD, RouterPolicy

_APART: Final = frozenset({"pd-disaggregation", "vllm-pd-disaggregation"})


def _program(*starts: tuple[str, ...]) -> Server:
    nothing = frozenset[str]()
    return Server(
        starts=starts,
        spellings={},
        switches=_APART,
        read=nothing,
        unpriced=nothing,
        timeless=nothing,
    )


_GATEWAYS: Final = (
    (SGLANG_ROUTER, _program(("sglang_router.launch_router",), ("smg", "launch"))),
    (VLLM_ROUTER, _program(("vllm-router",), ("vllm_router.launch_router",))),
)
_FRONTEND: Final = _program(("dynamo.frontend",))
_PROXY: Final = re.compile(r"load_balance_proxy_server_example\.py")
_DISAGGREGATED: Final = re.compile(r"\btrtllm-serve\s+disaggregated\b")
_ROLES: Final = re.compile(
    r"(context|generation)_servers:(?:\\n|\s)*router:\s*\{?\s*type:\s*(\w+)", re.ASCII
)
_UPSTREAM: Final = re.compile(r"\bupstream\s+[\w.-]{1,64}\s*\{([^}']{0,4096})")
_WEIGHTS: Final = re.compile(r"\bWEIGHTS=\(([\d ]{1,4096})\)|\bweight=(\d{1,9})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLaunch:
    """One router."""

    name: str
    """Of the program."""
    router: ServeRouter

    def __str__(self) -> str:
        """Return the program and its policies."""
        own = self.router
        decode = own.decode_policy
        apart = "" if decode in (None, own.policy) else f", {decode} for decode"
        return f"{self.name} by {own.policy}{apart}"


def read_router(text: str, *, source: str) -> RouterLaunch | None:
    """Return the router that a text starts; None where it starts none.

    Raises:
        SpecError: no shell text, several routers, or a policy that the router does not have.
    """
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for capabilities, server in _GATEWAYS:
        flags = flags_of_server(text, source=source, server=server)
        if flags is not None:
            return _of_gateway(flags, capabilities)
    frontend = flags_of_server(text, source=source, server=_FRONTEND)
    if frontend is not None:
        mode = frontend.word("router-mode") or "round-robin"
        policy = _policy(mode, DYNAMO_FRONTEND, is_apart=False, source=source)
        return _launch(DYNAMO_FRONTEND, policy, policy)
    if _DISAGGREGATED.search(text):
        types = dict(_ROLES.findall(text))
        first, last = (
            _policy(
                types.get(role, "round_robin"), TRTLLM_DISAGGREGATED, is_apart=True, source=source
            )
            for role in ("context", "generation")
        )
        return _launch(TRTLLM_DISAGGREGATED, first, last)
    if _PROXY.search(text):
        return _launch(ASCEND_PROXY, RouterPolicy.LEAST_REQUESTS, RouterPolicy.LEAST_REQUESTS)
    upstream = _UPSTREAM.search(text)
    if upstream is not None:
        return _launch(NGINX, _of_upstream(upstream[1], text), None)
    return None


def _of_gateway(flags: Flags, capabilities: RouterCapabilities) -> RouterLaunch:
    is_apart = bool(_APART & set(flags.values))
    common = flags.word("policy") or "cache_aware"
    threshold = _threshold(flags)
    first, last = (
        _policy(
            flags.word(f"{role}-policy") or common,
            capabilities,
            is_apart=is_apart,
            source=flags.source,
            threshold=threshold,
        )
        for role in ("prefill", "decode")
    )
    return _launch(
        capabilities, first, last if is_apart else None, threshold=flags.word("cache-threshold")
    )


def _threshold(flags: Flags) -> float:
    word = flags.word("cache-threshold")
    try:
        found = CACHE_THRESHOLD if word is None else float(word)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= 1.0:
        raise SpecError(
            f"{flags.source}: --cache-threshold {shown_value(str(word))} is no share of 0 to 1"
        )
    return found


def _policy(
    word: str,
    capabilities: RouterCapabilities,
    *,
    is_apart: bool,
    source: str,
    threshold: float = CACHE_THRESHOLD,
) -> RouterPolicy:
    """Return the policy that a router calls so."""
    names = capabilities.policies(is_apart=is_apart)
    found = [policy for policy, name in names.items() if name == word]
    if not found:
        raise SpecError(
            f"{source}: {capabilities.name} {capabilities.release} has no policy"
            f" {shown_value(word)}; there are {', '.join(dict.fromkeys(names.values()))}"
        )
    if len(found) > 1 and capabilities.threshold:
        follows_load = threshold >= LEAST_THRESHOLD
        return RouterPolicy.LEAST_REQUESTS if follows_load else RouterPolicy.CACHE_AWARE
    return found[0]


def _of_upstream(directives: str, text: str) -> RouterPolicy:
    for policy in (RouterPolicy.POWER_OF_TWO, RouterPolicy.LEAST_REQUESTS, RouterPolicy.RANDOM):
        if re.search(rf"\b{NGINX.aggregated[policy]}\s*;", directives):
            break
    else:
        return RouterPolicy.ROUND_ROBIN
    weights = {
        weight for several, one in _WEIGHTS.findall(text) for weight in (several or one).split()
    }
    if policy is RouterPolicy.LEAST_REQUESTS and len(weights) > 1:
        return RouterPolicy.WEIGHTED_LEAST_REQUESTS
    return policy


def _launch(
    capabilities: RouterCapabilities,
    policy: RouterPolicy,
    decode_policy: RouterPolicy | None,
    *,
    threshold: str | None = None,
) -> RouterLaunch:
    follows = RouterPolicy.CACHE_AWARE in (policy, decode_policy)
    router = ServeRouter(
        policy=policy,
        decode_policy=decode_policy,
        cache_threshold=float(threshold) if threshold is not None and follows else None,
    )
    return RouterLaunch(name=capabilities.name, router=router)
