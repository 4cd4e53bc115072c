"""The process in front of the instances, which sends each request where the plan counts on it.

    sglang   sglang_router (SGLang Model Gateway)       both modes
    vllm     vllm-router, a fork of it                  both modes
    trtllm   trtllm-serve disaggregated                 prefill and decode
             nginx, least connections                   aggregated
    any      nginx, least connections over places       aggregated, instances of several kinds
    vllm     vllm-ascend's example proxy                prefill and decode on Ascend

The gateways of SGLang and vLLM send each instance of a role an equal share, so instances of several
kinds stand behind nginx, whose `least_conn` divides requests under way by a server's weight: the
requests that the instance may run at once. Prefill and decode of several kinds have no such router:
there the less busy of two is taken (`power_of_two`), and the file says so.

Sources: docs.sglang.io (SGLang Model Gateway), the option parsers of sglang-router 0.3.2 and
vllm-router 0.1.17, TensorRT-LLM's examples/disaggregated, vllm-ascend releases/v0.23.0
examples/disaggregated_prefill_v1 (in its container under /vllm-workspace). One aggregated instance
needs no router.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from tuner.emit.serving.command import BOOTSTRAP_OFFSET
from tuner.emit.serving.shape import (
    GroupShape,
    are_unlike,
    group_shapes,
    is_apart,
    transfer,
    url_list,
)
from tuner.serve_plan import VerifiedServing

ROUTER_PORT: Final = 8000

_PROGRAM: Final = {"sglang": "python -m sglang_router.launch_router", "vllm": "vllm-router"}
_DISAGGREGATED: Final = {"sglang": "--pd-disaggregation", "vllm": "--vllm-pd-disaggregation"}


def by_ascend_proxy(verified: VerifiedServing) -> bool:
    """Say whether vllm-ascend's own proxy pairs prefill and decode."""
    handover = transfer(verified)
    is_ascend = handover is not None and handover.connector == "ascend"
    return is_ascend and verified.plan.goal.engine.name == "vllm"


def needs_router(verified: VerifiedServing) -> bool:
    """Say whether requests must be spread."""
    return sum(group.count for group in verified.decision.instances) > 1


def router_bash(verified: VerifiedServing, *, counts: Mapping[str, int] | None = None) -> str:
    """Return bash that becomes the router of the instances whose addresses it is given.

    Args:
        verified: the deployment.
        counts: addresses of each list, where one may stand for several instances.
    """
    engine = verified.plan.goal.engine.name
    lists = _lists(verified) if counts is None else counts
    read = "".join(
        f'read -r -d "" -a {name} <<< "${{{name}_URLS:?set it to the addresses, such as'
        f' http://host:30000}}" || true\n'
        f"check {count} {name}\n"
        for name, count in lists.items()
    )
    if engine == "trtllm" and is_apart(verified):
        body = _TRTLLM_DISAGGREGATED
    elif by_ascend_proxy(verified):
        body = _ASCEND_PROXY
    elif by_nginx(verified):
        body = _nginx(group_shapes(verified), by_service=counts is not None)
    else:
        body = _gateway(verified, engine=engine, disaggregated="PREFILL" in lists)
    return f"{_PORT}{_CHECK}{read}{body}"


def by_nginx(verified: VerifiedServing) -> bool:
    """Say whether nginx stands before the instances."""
    is_theirs = verified.plan.goal.engine.name in _PROGRAM
    return not is_apart(verified) and (are_unlike(verified) or not is_theirs)


def discovering_words(verified: VerifiedServing, *, app: str, port: int) -> tuple[str, ...]:
    """Return the words of a router that finds the pods of the instances by their labels."""
    engine = verified.plan.goal.engine.name
    common = (
        _PROGRAM[engine],
        f"--host 0.0.0.0 --port {ROUTER_PORT}",
        f"--policy {_policy(verified)}",
        f"--service-discovery --service-discovery-port {port}",
        '--service-discovery-namespace "$NAMESPACE"',
    )
    if not is_apart(verified):
        return (*common, f"--selector app={app} role=aggregated")
    return (
        *common,
        *_disaggregated(verified, engine=engine),
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
    found: dict[str, int] = {}
    for shape in group_shapes(verified):
        name = url_list(shape.group.role)
        if name is not None:
            found[name] = found.get(name, 0) + shape.group.count
    return found


def _policy(verified: VerifiedServing) -> str:
    if are_unlike(verified):
        return "power_of_two"
    return "cache_aware" if verified.plan.goal.traffic.prefix_hit else "round_robin"


def _disaggregated(verified: VerifiedServing, *, engine: str) -> tuple[str, ...]:
    handover = transfer(verified)
    names_connector = engine == "vllm" and handover is not None
    return (
        _DISAGGREGATED[engine],
        *((f"--kv-connector {handover.connector}",) if handover and names_connector else ()),
    )


def _gateway(verified: VerifiedServing, *, engine: str, disaggregated: bool) -> str:
    words = [_PROGRAM[engine]]
    before = ""
    if disaggregated:
        listens = f' "$(( ${{url##*:}} + {BOOTSTRAP_OFFSET} ))"'
        bootstrap = listens if _asks_bootstrap(verified, engine) else ""
        before = (
            "SPREAD=()\n"
            f'for url in "${{PREFILL[@]}}"; do SPREAD+=(--prefill "$url"{bootstrap}); done\n'
            'for url in "${DECODE[@]}"; do SPREAD+=(--decode "$url"); done\n'
        )
        words += [*_disaggregated(verified, engine=engine), '"${SPREAD[@]}"']
    else:
        words.append('--worker-urls "${WORKER[@]}"')
    words += [f"--policy {_policy(verified)}", '--host 0.0.0.0 --port "$ROUTER_PORT"', '"$@"']
    return before + "exec " + " \\\n  ".join(words) + "\n"


def _asks_bootstrap(verified: VerifiedServing, engine: str) -> bool:
    handover = transfer(verified)
    return engine == "sglang" or (handover is not None and handover.connector == "mooncake")


def _nginx(shapes: Iterable[GroupShape], *, by_service: bool) -> str:
    weights = []
    for shape in shapes:
        places, count = shape.group.max_batch * shape.group.attention_dp, shape.group.count
        weights += [places * count] if by_service else [places] * count
    return f"WEIGHTS=({' '.join(map(str, weights))})\n{_NGINX}"


_TRTLLM_DISAGGREGATED: Final = """\
CONFIG="$(mktemp --suffix=.yaml)"
{
  printf 'hostname: 0.0.0.0\\nport: %s\\nbackend: pytorch\\n' "$ROUTER_PORT"
  printf 'context_servers:\\n  num_instances: %s\\n  urls:\\n' "${#PREFILL[@]}"
  printf '    - "%s"\\n' "${PREFILL[@]#http://}"
  printf 'generation_servers:\\n  num_instances: %s\\n  urls:\\n' "${#DECODE[@]}"
  printf '    - "%s"\\n' "${DECODE[@]#http://}"
} > "$CONFIG"
# Both limits are seconds: until the instances answer, and of one request.
exec trtllm-serve disaggregated -c "$CONFIG" -t 3600 -r 3600 "$@"
"""

_ASCEND_PROXY: Final = """\
PROXY="${PROXY:-/vllm-workspace/vllm-ascend/examples/disaggregated_prefill_v1/\
load_balance_proxy_server_example.py}"
hosts() { local url; for url in "$@"; do url="${url#http://}"; printf '%s ' "${url%%:*}"; done; }
ports() { local url; for url in "$@"; do printf '%s ' "${url##*:}"; done; }
# Words without quotes: one host or port each.
exec python "$PROXY" --host 0.0.0.0 --port "$ROUTER_PORT" \\
  --prefiller-hosts $(hosts "${PREFILL[@]}") --prefiller-ports $(ports "${PREFILL[@]}") \\
  --decoder-hosts $(hosts "${DECODE[@]}") --decoder-ports $(ports "${DECODE[@]}") "$@"
"""

_NGINX_CONFIG: Final = """\
CONFIG="$(mktemp)"
{{
  # Two connections a request under way; prompts may be long.
  echo 'worker_rlimit_nofile 65536; events {{ worker_connections 32768; }}'
  echo 'http {{ client_max_body_size 0; upstream workers {{{method}'
  for index in "${{!WORKER[@]}}"; do
    printf '  server %s weight=%s;\\n' "${{WORKER[index]#http://}}" "${{WEIGHTS[index]}}"
  done
  echo '}} server {{'
  printf '  listen %s;\\n' "$ROUTER_PORT"
  echo '  location / {{ proxy_pass http://workers; proxy_http_version 1.1;'
  echo '    proxy_buffering off; proxy_read_timeout 3600s; }} }} }}'
}} > "$CONFIG"
exec nginx -c "$CONFIG" -g 'daemon off;'
"""
_NGINX: Final = _NGINX_CONFIG.format(method=" least_conn;")
_PORT: Final = f'ROUTER_PORT="${{ROUTER_PORT:-{ROUTER_PORT}}}"\n'
FRONT_NGINX: Final = _PORT + _NGINX_CONFIG.format(method="")
"""By weights alone: each island spreads its requests itself."""
