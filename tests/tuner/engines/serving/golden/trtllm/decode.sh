#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8,192 tokens per rank at most.
# decode: 1 x 16 devices of h100, each on 2 machines; attention TP 1 x DP 16, experts TP 1 x EP 16, PP 1, all-to-all deepep_low_latency; 64 requests and 8,192 tokens per rank at most.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: MODEL=... [PORT=...] ./decode.sh [more flags of the engine]
# Instances to start: 1. Instances on one machine need PORTs 200 apart and devices of their own (CUDA_VISIBLE_DEVICES).
# Each is an MPI job: srun --mpi=pmix --nodes=2 --ntasks=16 --ntasks-per-node=8 ./decode.sh
set -euo pipefail
FILES="${FILES:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"
: "${MODEL:?set MODEL to the path or name of the weights}"
PORT="${PORT:-30000}"
HOST_IP="${HOST_IP:-$(hostname -i)}"
HOST_IP="${HOST_IP%% *}"
NNODES="${NNODES:-2}"
case "$NNODES" in 1 | 2) ;; *)
  echo "NNODES $NNODES is neither 1 nor 2, the machines of one instance" >&2
  exit 2 ;;
esac
export TRTLLM_FORCE_COMM_METHOD=DEEPEPLOWLATENCY
export TRTLLM_CAN_USE_DEEP_EP=1
export TRTLLM_DEEP_EP_TOKEN_LIMIT=64
exec $([[ "$NNODES" == 1 ]] || echo trtllm-llmapi-launch) \
  trtllm-serve serve "$MODEL" \
  --host 0.0.0.0 --port "$PORT" \
  --backend pytorch \
  --config "$FILES/decode.yaml" \
  "$@"
