#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 24 devices, mode attention_expert.
# EXPERIMENTAL: AFD needs exactly vllm-project/afd-plugin at commit 1de1a990bf0dd638fae31705a683c74707092a29 with vllm 0.30.0; install both first.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# attention: 2 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, no experts; 64 requests and 1,024 tokens per rank at most.
# expert: 2 x 2 devices of h100, each on a machine; experts EP 2 on TP 1 x DP 2 ranks; 64 requests and 1,024 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
# No published run supports the bands of attention_expert: they are widened.
#
# Usage: set PREFILL_URLS and DECODE_URLS to addresses such as http://host:30000, separated by spaces, one per instance in the order above, and run ./router.sh [more flags of the router]
# DECODE_URLS are those of attention servers; FFN servers take no requests.
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
check 2 DECODE
SPREAD=()
for url in "${PREFILL[@]}"; do SPREAD+=(--prefill "$url"); done
for url in "${DECODE[@]}"; do SPREAD+=(--decode "$url"); done
exec vllm-router \
  --vllm-pd-disaggregation \
  --kv-connector nixl \
  "${SPREAD[@]}" \
  --policy round_robin \
  --host "$ROUTER_HOST" --port "$ROUTER_PORT" \
  "$@"
