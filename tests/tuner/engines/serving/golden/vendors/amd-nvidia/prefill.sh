#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model mixtral-8x7b.
# 8 devices, mode disaggregated.
# prefill: 1 x 4 devices of b, each on a machine; attention TP 4 x DP 1, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# decode: 1 x 4 devices of a, each on a machine; attention TP 2 x DP 2, experts TP 1 x EP 4, PP 1, all-to-all allgather; 64 requests and 8,192 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: MODEL=... [PORT=...] ./prefill.sh [more flags of the engine]
# Container: vllm/vllm-openai-rocm:v0.33.0 (vllm 0.33.0); its NIXL is ROCm's build (RIXL): check that the container has it.
# KV caches pass through host memory to devices of another vendor. Both sides need the same MODEL, release and attention backend, which the connector compares.
# Instances to start: 1. Instances on one machine need PORTs 200 apart and devices of their own (HIP_VISIBLE_DEVICES).
set -euo pipefail
FILES="${FILES:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"
: "${MODEL:?set MODEL to the path or name of the weights}"
PORT="${PORT:-30000}"
HOST_IP="${HOST_IP:-$(hostname -i)}"
HOST_IP="${HOST_IP%% *}"
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST_IP"
export VLLM_NIXL_SIDE_CHANNEL_PORT="$((PORT + 20))"
exec vllm serve "$MODEL" \
  --host 0.0.0.0 --port "$PORT" \
  --tensor-parallel-size 4 \
  --enable-expert-parallel \
  --max-model-len 8192 \
  --max-num-seqs 64 \
  --max-num-batched-tokens 8192 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}' \
  --attention-backend TRITON_ATTN \
  "$@"
