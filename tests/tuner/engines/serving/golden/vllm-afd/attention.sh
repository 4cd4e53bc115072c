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
# Usage: MODEL=... [PORT=...] ./attention.sh [more flags of the engine]
# Each needs an instance of expert.sh: set AFD_HOST to the first machine of that instance, and AFD_PORT unless its PORT is 400 above this one's.
# Start both together, in either order: ranks time out if the others have not loaded their weights two minutes later.
# Instances to start: 2. Instances on one machine need PORTs 200 apart and devices of their own (CUDA_VISIBLE_DEVICES).
set -euo pipefail
FILES="${FILES:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"
: "${MODEL:?set MODEL to the path or name of the weights}"
PORT="${PORT:-30000}"
HOST_IP="${HOST_IP:-$(hostname -i)}"
HOST_IP="${HOST_IP%% *}"
export VLLM_USE_V2_MODEL_RUNNER=0
export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST_IP"
export VLLM_NIXL_SIDE_CHANNEL_PORT="$((PORT + 20))"
: "${AFD_HOST:?set AFD_HOST to the first machine of its FFN server}"
AFD_PORT="${AFD_PORT:-$((PORT + 430))}"
exec vllm serve "$MODEL" \
  --host 0.0.0.0 --port "$PORT" \
  --tensor-parallel-size 1 \
  --data-parallel-size 4 \
  --enable-expert-parallel \
  --all2all-backend allgather_reducescatter \
  --additional-config '{"afd": {"role": "attention", "connector": "P2pNcclAFDConnector", "host": "'"$AFD_HOST"'", "port": "'"$AFD_PORT"'", "num_attention_ranks": 4, "num_ffn_ranks": 2}}' \
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \
  --max-model-len 8192 \
  --max-num-seqs 64 \
  --max-num-batched-tokens 1024 \
  --max-cudagraph-capture-size 64 \
  --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' \
  "$@"
