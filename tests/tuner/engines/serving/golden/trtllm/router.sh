#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# decode: 1 x 16 devices of h100, each on 2 machines; attention TP 1 x DP 16, experts TP 1 x EP 16, PP 1, all-to-all deepep_low_latency; 64 requests and 8,192 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: set PREFILL_URLS and DECODE_URLS to addresses such as http://host:30000, separated by spaces, one per instance in the order above, and run ./router.sh [more flags of the router]
set -euo pipefail
ROUTER_HOST="${ROUTER_HOST:-0.0.0.0}"
ROUTER_PORT="${ROUTER_PORT:-8000}"
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
read -r -d "" -a PREFILL <<< "${PREFILL_URLS:?set it to the addresses, such as http://host:30000}" || true
check 3 PREFILL
read -r -d "" -a DECODE <<< "${DECODE_URLS:?set it to the addresses, such as http://host:30000}" || true
check 1 DECODE
CONFIG="$(mktemp --suffix=.yaml)"
{
  printf 'hostname: "%s"\nport: %s\nbackend: pytorch\n' "$ROUTER_HOST" "$ROUTER_PORT"
  printf 'context_servers:\n  router: {type: round_robin}\n'
  printf '  num_instances: %s\n  urls:\n' "${#PREFILL[@]}"
  printf '    - "%s"\n' "${PREFILL[@]#http://}"
  printf 'generation_servers:\n  router: {type: round_robin}\n'
  printf '  num_instances: %s\n  urls:\n' "${#DECODE[@]}"
  printf '    - "%s"\n' "${DECODE[@]#http://}"
} > "$CONFIG"
# Both limits are seconds: until the instances are ready, and of one request.
exec trtllm-serve disaggregated -c "$CONFIG" -t 3600 -r 3600 "$@"
