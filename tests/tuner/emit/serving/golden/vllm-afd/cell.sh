#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 24 devices, mode attention_expert.
# EXPERIMENTAL: AFD needs exactly vllm-project/afd-plugin at commit 1de1a990bf0dd638fae31705a683c74707092a29 with vllm 0.30.0; install both first.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8192 tokens per rank at most.
# attention: 2 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, no experts; 64 requests and 1024 tokens per rank at most.
# expert: 2 x 2 devices of h100, each on a machine; experts EP 2 on TP 1 x DP 2 ranks; 64 requests and 1024 tokens per rank at most.
# Expected TTFT: mean 500 ms (between 400 ms and 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (between 18.0 ms and 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14000 output tokens/s, goodput 0.5 requests/s per device.
# No published run supports the bands of attention_expert: they are a guess.
#
# Usage: CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 MODEL=... [PORT=...] ./cell.sh
# Starts attention.sh on the first 4 of the devices and expert.sh on the other 2, and stops both when one stops.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
PORT="${PORT:-30000}"
IFS=, read -r -a DEVICES <<< "${CUDA_VISIBLE_DEVICES:?set it to 6 devices}"
if (( ${#DEVICES[@]} != 6 )); then
  echo "CUDA_VISIBLE_DEVICES has ${#DEVICES[@]} devices, the AFD unit takes 6" >&2
  exit 2
fi
export AFD_HOST=127.0.0.1 AFD_PORT="$((PORT + 400 + 30))" NNODES=1
trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

devices() {
  local IFS=,
  echo "$*"
}
CUDA_VISIBLE_DEVICES="$(devices "${DEVICES[@]:4}")" PORT="$((PORT + 400))" \
  bash "$HERE/expert.sh" &
CUDA_VISIBLE_DEVICES="$(devices "${DEVICES[@]:0:4}")" PORT="$PORT" \
  bash "$HERE/attention.sh" "$@" &
wait -n
