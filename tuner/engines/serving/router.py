"""The router in front of the instances.

    a gateway      both modes: SGLang's Model Gateway, or vllm-router, a fork of it
    its own script prefill and decode: TensorRT-LLM, vLLM on Ascend
    nginx          aggregated, with weights for instances of several kinds

The routers are those of the release (`routers` in capabilities.py), with their names of policies;
the policy is the decision's. nginx's `least_conn` divides active requests by a server's weight: the
requests that the instance may run at once. Older plans without a router follow prefixes where the
traffic has any, and load where instances are of several kinds.

Sources: docs.sglang.io (SGLang Model Gateway), the option parsers of sglang-router 0.3.2 and
vllm-router 0.1.17. One aggregated instance needs no router.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from tuner.catalog.serve_rules.routers import (
    LEAST_THRESHOLD,
    NGINX,
    Gateway,
    RouterCapabilities,
    router_with,
)
from tuner.config.serve import ServeRouter
from tuner.engines.serving.command import BOOTSTRAP_OFFSET
from tuner.engines.serving.shape import (
    are_heterogeneous,
    group_release,
    group_shapes,
    is_disaggregated,
    transfer,
    url_list,
)
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.serving.routers import RouterPolicy

ROUTER_PORT: Final = 8000


def needs_router(verified: VerifiedServing) -> bool:
    """Say whether there is or will be more than one instance, or a choice among ranks."""
    router = verified.decision.router
    has_choice = router is not None and router.ranks is not None
    is_scaled = verified.autoscaling is not None
    return has_choice or is_scaled or sum(group.count for group in verified.decision.instances) > 1


def router_bash(verified: VerifiedServing, *, counts: Mapping[str, int] | None = None) -> str:
    """Return bash that executes the router of the given instances.

    Args:
        verified: the deployment.
        counts: addresses in each list, where one may resolve to several instances.
    """
    router = chosen_router(verified)
    lists = _lists(verified) if counts is None else counts
    read = "".join(
        f'read -r -d "" -a {name} <<< "${{{name}_URLS:?set it to the addresses, such as'
        f' http://host:30000}}" || true\n'
        f"check {count} {name}\n"
        for name, count in lists.items()
    )
    if router.script:
        body = _own_script(verified, router)
    elif router.gateway is not None:
        body = _gateway(verified, router.gateway, disaggregated="PREFILL" in lists)
    else:
        body = _nginx(verified, by_service=counts is not None)
    return f"{_ADDRESS}{_CHECK}{read}{body}"


def planned_router(verified: VerifiedServing) -> ServeRouter:
    """Return the plan's router; older plans get the one that their files had."""
    if verified.decision.router is not None:
        return verified.decision.router
    is_theirs = engine_gateway(verified) is not None
    policy = RouterPolicy.ROUND_ROBIN
    if not is_disaggregated(verified) and (are_heterogeneous(verified) or not is_theirs):
        policy = RouterPolicy.WEIGHTED_LEAST_REQUESTS
    elif are_heterogeneous(verified):
        policy = RouterPolicy.LEAST_REQUESTS
    elif verified.plan.goal.traffic.prefix_hit and is_theirs:
        policy = RouterPolicy.CACHE_AWARE
    return ServeRouter(policy=policy, decode_policy=policy if is_disaggregated(verified) else None)


def follows_text(verified: VerifiedServing) -> bool:
    """Say whether a gateway follows prefixes, for which it asks servers for a prompt's tokens."""
    return (
        needs_router(verified)
        and engine_gateway(verified) is not None
        and planned_router(verified).policy is RouterPolicy.CACHE_AWARE
    )


def by_nginx(verified: VerifiedServing) -> bool:
    """Say whether the router is nginx."""
    return not is_disaggregated(verified) and chosen_router(verified) is NGINX


def chosen_router(verified: VerifiedServing) -> RouterCapabilities:
    """Return the engine's router that has the policy, or else its first router for the mode.

    Raises:
        UnknownTargetError: it has none for the mode.
    """
    by_role, routers = is_disaggregated(verified), _stack(verified)
    for_mode = [router for router in routers if router.policies(is_disaggregated=by_role)]
    if not for_mode:
        raise UnknownTargetError(
            f"router: {verified.plan.goal.engine.name} has none for prefill and decode instances"
        )
    policy = planned_router(verified).policy
    return router_with(routers, policy, is_disaggregated=by_role) or for_mode[0]


def _stack(verified: VerifiedServing) -> tuple[RouterCapabilities, ...]:
    return group_release(verified, verified.decision.instances[0]).routers


def engine_gateway(verified: VerifiedServing) -> Gateway | None:
    """Return the gateway of the engine, whatever the router of this deployment."""
    return next((router.gateway for router in _stack(verified) if router.gateway is not None), None)


def discovering_words(
    verified: VerifiedServing, gateway: Gateway, *, app: str, port: int
) -> tuple[str, ...]:
    """Return the command of a router that discovers the instances' pods by label."""
    common = (
        gateway.program,
        f"--host 0.0.0.0 --port {ROUTER_PORT}",
        *_policy(verified),
        f"--service-discovery --service-discovery-port {port}",
        '--service-discovery-namespace "$NAMESPACE"',
    )
    if not is_disaggregated(verified):
        return (*common, f"--selector app={app} role=aggregated")
    return (
        *common,
        *_disaggregated(verified, gateway),
        f"--prefill-selector app={app} role=prefill",
        f"--decode-selector app={app} role=decode",
    )


_CHECK: Final = """\
check() {
  local -n urls="$2"
  if (( ${#urls[@]} != $1 )); then
    echo "$2_URLS names ${#urls[@]} instances, the plan has $1" >&2
    exit 2
  fi
  local url
  for url in "${urls[@]}"; do
    if [[ ! "$url" =~ ^http://[A-Za-z0-9.-]+:[0-9]+$ ]]; then
      echo "$2_URLS: '$url' is not http://host:port" >&2
      exit 2
    fi
  done
}
"""


def _lists(verified: VerifiedServing) -> dict[str, int]:
    num_instances: dict[str, int] = {}
    for shape in group_shapes(verified):
        name = url_list(shape.group.role)
        if name is not None:
            num_instances[name] = num_instances.get(name, 0) + shape.group.count
    return num_instances


def _policy(verified: VerifiedServing) -> Iterator[str]:
    """Return the gateway's options for the policies."""
    first, last = _policy_names(verified)
    if first == last:
        yield f"--policy {first}"
    else:
        yield f"--policy {first} --prefill-policy {first}"
        yield f"--decode-policy {last}"
    planned = planned_router(verified)
    policies = (planned.policy, planned.decode_policy)
    if RouterPolicy.CACHE_AWARE in policies and planned.cache_threshold is not None:
        yield f"--cache-threshold {planned.cache_threshold:g}"
    elif RouterPolicy.LEAST_REQUESTS in policies:
        # No prompt matches by more, so that requests go to the fewest outstanding requests.
        yield f"--cache-threshold {LEAST_THRESHOLD:g}"
    yield from _ranks(verified, planned)


def _ranks(verified: VerifiedServing, planned: ServeRouter) -> Iterator[str]:
    """Return the gateway's option for attention-data ranks.

    Raises:
        UnknownTargetError: it has none.
    """
    router = chosen_router(verified)
    option = router.ranks_option(is_disaggregated=is_disaggregated(verified))
    if planned.ranks is None:
        return
    if option is None:
        why = router.lacks_ranks or f"{router.name} {router.release} chooses among instances alone"
        raise UnknownTargetError(f"router: ranks {planned.ranks}: {why}; leave 'ranks' out")
    if option:
        yield option.format(ranks=planned.ranks)


def _policy_names(verified: VerifiedServing) -> tuple[str, str]:
    """Return the router's names of the policies: of the first role, and of decode instances.

    Raises:
        UnknownTargetError: it lacks one.
    """
    planned, router = planned_router(verified), chosen_router(verified)
    names = router.policies(is_disaggregated=is_disaggregated(verified))
    policies = (planned.policy, planned.decode_policy or planned.policy)
    missing = next((policy for policy in policies if policy not in names), None)
    if missing is not None:
        raise UnknownTargetError(
            f"router: {router.name} {router.release} has no {missing.value}; it has"
            f" {', '.join(policy.value for policy in names)}"
        )
    return names[policies[0]], names[policies[1]]


def _disaggregated(verified: VerifiedServing, gateway: Gateway) -> tuple[str, ...]:
    kv_transfer = transfer(verified)
    named = (f"--kv-connector {kv_transfer.connector}",) if kv_transfer is not None else ()
    return (gateway.disaggregated, *(named if gateway.names_connector else ()))


def _gateway(verified: VerifiedServing, gateway: Gateway, *, disaggregated: bool) -> str:
    words = [gateway.program]
    before = ""
    if disaggregated:
        listens = f' "$(( ${{url##*:}} + {BOOTSTRAP_OFFSET} ))"'
        bootstrap = listens if _asks_bootstrap(verified, gateway) else ""
        before = (
            "SPREAD=()\n"
            f'for url in "${{PREFILL[@]}}"; do SPREAD+=(--prefill "$url"{bootstrap}); done\n'
            'for url in "${DECODE[@]}"; do SPREAD+=(--decode "$url"); done\n'
        )
        words += [*_disaggregated(verified, gateway), '"${SPREAD[@]}"']
    else:
        words.append('--worker-urls "${WORKER[@]}"')
    words += [*_policy(verified), '--host "$ROUTER_HOST" --port "$ROUTER_PORT"', '"$@"']
    return before + "exec " + " \\\n  ".join(words) + "\n"


def _asks_bootstrap(verified: VerifiedServing, gateway: Gateway) -> bool:
    kv_transfer, connectors = transfer(verified), gateway.bootstrap_connectors
    if connectors is None:
        return True
    return kv_transfer is not None and kv_transfer.connector in connectors


def _nginx(verified: VerifiedServing, *, by_service: bool) -> str:
    planned = planned_router(verified)
    weights = []
    for shape in group_shapes(verified):
        places = shape.group.max_batch * shape.group.attention_dp
        weight = places if planned.policy is RouterPolicy.WEIGHTED_LEAST_REQUESTS else 1
        # A Service's name resolves to all its pods, each a server of that weight.
        weights += [weight] * (1 if by_service else shape.group.count)
    directive, _ = _policy_names(verified)
    text = _nginx_text(directive, by_service=by_service)
    return f"WEIGHTS=({' '.join(map(str, weights))})\n{_DNS if by_service else ''}{text}"


def _own_script(verified: VerifiedServing, router: RouterCapabilities) -> str:
    if "@PREFILL@" not in router.script:
        return router.script  # It has one policy.
    first, last = _policy_names(verified)
    return router.script.replace("@PREFILL@", first).replace("@DECODE@", last)


_DNS: Final = """\
DNS="$(awk '/^nameserver/ {print $2; exit}' /etc/resolv.conf)"
if [[ "$DNS" == *:* ]]; then DNS="[$DNS]"; fi
# nginx does not apply the DNS search list.
DOMAIN="$(awk '/^search/ {for (i = 2; i <= NF; i++) if ($i ~ /^svc[.]/) {print $i; exit}}' \\
  /etc/resolv.conf)"
for index in "${!WORKER[@]}"; do
  WORKER[index]="${WORKER[index]%:*}.$NAMESPACE.${DOMAIN:-svc.cluster.local}:${WORKER[index]##*:}"
done
"""
_BY_NAME: Final = {
    "@RESOLVER@": " resolver '\"$DNS\"' valid=10s;",
    "@ZONE@": " zone workers 256k;",
    "@RESOLVE@": " resolve",
}
"""Directives with which nginx re-resolves a name (open source since 1.27.3)."""

_NGINX: Final = """\
CONFIG="$(mktemp)"
{
  # Two connections per active request; prompts may be long.
  echo 'worker_rlimit_nofile 65536; events { worker_connections 32768; }'
  echo 'http { client_max_body_size 0;@RESOLVER@ upstream workers {@ZONE@@POLICY@'
  for index in "${!WORKER[@]}"; do
    printf '  server %s weight=%s@RESOLVE@;\\n' "${WORKER[index]#http://}" "${WEIGHTS[index]}"
  done
  echo '} server {'
  printf '  listen %s:%s;\\n' "$ROUTER_HOST" "$ROUTER_PORT"
  echo '  location / { proxy_pass http://workers; proxy_http_version 1.1;'
  echo '    proxy_buffering off; proxy_read_timeout 3600s; } } }'
} > "$CONFIG"
exec nginx -c "$CONFIG" -g 'daemon off;'
"""
_ADDRESS: Final = (
    f'ROUTER_HOST="${{ROUTER_HOST:-0.0.0.0}}"\nROUTER_PORT="${{ROUTER_PORT:-{ROUTER_PORT}}}"\n'
)


def _nginx_text(directive: str, *, by_service: bool) -> str:
    text = _NGINX.replace("@POLICY@", f" {directive};" if directive else "")
    for mark, words in _BY_NAME.items():
        text = text.replace(mark, words if by_service else "")
    return text


FRONT_NGINX: Final = _ADDRESS + _nginx_text("", by_service=False)
"""nginx in front of islands, by weight only: each island balances its own requests."""
