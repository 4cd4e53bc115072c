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
TOKENIZER="$MODEL"
if [[ -d "$MODEL" ]]; then
  # Processes of AIPerf find tokenizers in the cache of repositories only.
  HF_HUB_CACHE="$(mktemp -d)"
  export HF_HUB_CACHE HF_HUB_OFFLINE=1
  CACHED="$HF_HUB_CACHE/models--local--model"
  mkdir -p -- "$CACHED/snapshots" "$CACHED/refs"
  ln -s -- "$(cd -- "$MODEL" && pwd)" "$CACHED/snapshots/0"
  printf 0 > "$CACHED/refs/main"
  TOKENIZER=local/model
fi
exec aiperf profile \
  --model "$MODEL" --tokenizer "$TOKENIZER" --url "$BASE_URL" \
  --endpoint-type completions --streaming --extra-inputs ignore_eos:true \
  --use-server-token-count \
  --synthetic-input-tokens-mean 4000 \
  --synthetic-input-tokens-stddev 0 \
  --output-tokens-mean 1000 \
  --output-tokens-stddev 0 \
  --concurrency 256 \
  --goodput 'time_to_first_token:2000 inter_token_latency:50' \
  --request-count 2560 \
  --num-dataset-entries 2616 \
  "$@"
