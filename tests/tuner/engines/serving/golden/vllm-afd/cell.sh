#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 24 devices, mode attention_expert.
# EXPERIMENTAL: AFD needs exactly vllm-project/afd-plugin at commit 1de1a990bf0dd638fae31705a683c74707092a29 with vllm 0.30.0; install both first.
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
