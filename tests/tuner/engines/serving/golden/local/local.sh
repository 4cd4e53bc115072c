#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# decode: 1 x 16 devices of h100, each on 2 machines; attention TP 1 x DP 16, experts TP 1 x EP 16, PP 1, all-to-all deepep_low_latency; 64 requests and 8,192 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: MODEL=... ./local.sh [flags of every engine, such as --load-format dummy]
# Logs are written to the folder LOGS, by default ./logs.
# Requests go to http://127.0.0.1:8000.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
: "${MODEL:?set MODEL to the path or name of the weights}"
export MODEL
ENGINE="$HERE/../sglang"
LOGS="${LOGS:-$PWD/logs}"
mkdir -p -- "$LOGS"

if [[ -z "${AVAILABLE:-}" ]]; then
  AVAILABLE="$({ nvidia-smi --list-gpus | wc -l; } 2> /dev/null || true)"
  if (( ${AVAILABLE:-0} == 0 )); then
    echo "no devices were counted (nvidia-smi --list-gpus | wc -l); AVAILABLE says how many there are" >&2
    AVAILABLE=28
  fi
fi
if (( AVAILABLE < 28 )); then
  echo "this machine has $AVAILABLE devices, the plan is for 28" >&2
  exit 2
fi

trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

FLAGS=("$@")

start() {
  # Arguments: group, port, devices.
  CUDA_VISIBLE_DEVICES="$3" PORT="$2" NNODES=1 HOST_IP=127.0.0.1 \
    bash "$ENGINE/$1.sh" ${FLAGS[@]+"${FLAGS[@]}"} > "$LOGS/$1-$2.log" 2>&1 &
}
start prefill 30000 0,1,2,3
start prefill 30200 4,5,6,7
start prefill 30400 8,9,10,11
start decode 30600 12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27
PREFILL_URLS="http://127.0.0.1:30000 http://127.0.0.1:30200 http://127.0.0.1:30400" DECODE_URLS="http://127.0.0.1:30600" bash "$ENGINE/router.sh" > "$LOGS/router.log" 2>&1 &
wait -n
