#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model mixtral-8x7b.
# 8 devices, mode disaggregated.
# prefill: 1 x 4 devices of c, each on a machine; attention TP 4 x DP 1, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# decode: 1 x 4 devices of c, each on a machine; attention TP 2 x DP 2, experts TP 1 x EP 4, PP 1, all-to-all allgather; 64 requests and 8,192 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: MODEL=... [PORT=...] ./prefill.sh [more flags of the engine]
# Container: quay.io/ascend/vllm-ascend:v0.23.0 (vllm 0.23.0 with vllm-ascend 0.23.0).
# Instances to start: 1. Instances on one machine need PORTs 200 apart and devices of their own (ASCEND_RT_VISIBLE_DEVICES).
set -euo pipefail
FILES="${FILES:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"
: "${MODEL:?set MODEL to the path or name of the weights}"
PORT="${PORT:-30000}"
HOST_IP="${HOST_IP:-$(hostname -i)}"
HOST_IP="${HOST_IP%% *}"
KV_PORT="$(($PORT+20))"
exec vllm serve "$MODEL" \
  --host 0.0.0.0 --port "$PORT" \
  --tensor-parallel-size 4 \
  --enable-expert-parallel \
  --max-model-len 8192 \
  --max-num-seqs 64 \
  --max-num-batched-tokens 8192 \
  --kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "'"$KV_PORT"'", "kv_connector_extra_config": {"prefill": {"dp_size": 1, "tp_size": 4}, "decode": {"dp_size": 2, "tp_size": 2}}}' \
  "$@"
