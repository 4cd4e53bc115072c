#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
# Expected TTFT: mean 500 ms (80 % band: 400 ms to 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (80 % band: 18.0 ms to 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14,000 output tokens/s, goodput 0.5 requests/s per device.
#
# Usage: MODEL=... [BASE_URL=http://host:port] ./bench_aiperf.sh or bench_vllm.sh
set -euo pipefail
: "${MODEL:?set MODEL as the instances have it}"
BASE_URL="${BASE_URL:-http://127.0.0.1:8000}"
exec vllm bench serve \
  --backend openai --base-url "$BASE_URL" --model "$MODEL" \
  --dataset-name random --random-input-len 4000 \
  --random-output-len 1000 \
  --random-range-ratio '{"input": 0.0, "output": 0.0}' \
  --max-concurrency 256 --request-rate inf \
  --num-prompts 2560 \
  --ignore-eos --percentile-metrics ttft,tpot --metric-percentiles 50,90,99 \
  --goodput ttft:2000 tpot:50 \
  --save-result "$@"
