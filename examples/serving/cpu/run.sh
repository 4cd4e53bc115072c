#!/usr/bin/env bash
# Measures this machine, plans a deployment of a tiny MoE with random weights, starts it with the
# real vLLM on the processor, sends it the planned traffic, corrects the predictions and writes a
# page. About 8 minutes beside the two environments that it makes (2.5 GB for vLLM); run it as
# often as you like. Writes quickstart-out/serving in the checkout.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=examples/setup.sh
source "$HERE/../../setup.sh"
# shellcheck source=examples/serving/cpu/setup.sh
source "$HERE/setup.sh"
setup_environment run
setup_vllm

SPEC="$HERE/spec.yaml"
OUT="$CHECKOUT/quickstart-out/serving"
mkdir -p -- "$OUT"
# Nothing is downloaded: the model is a configuration and a tokenizer of bytes.
export HF_HUB_OFFLINE=1

step() {
  echo
  echo "== $*"
  "$@"
}

step "$VLLM_VENV/bin/python" "$HERE/make_model.py" "$CHECKOUT/examples/models/tiny-moe/config.json" "$OUT/model"
step env OMP_NUM_THREADS=1 moetune profile -o "$OUT/profile" --for "$SPEC" --suite kernels,links \
  --budget 120s --ranks 2
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
# The plan's scripts take vllm from this environment.
step env PATH="$VLLM_VENV/bin:$PATH" MODEL="$OUT/model" \
  moetune verify "$OUT/plan" --launcher command --trials 1 --runs "${RUNS:-1}" \
  --command 'bash {launch}/local.sh --host 127.0.0.1 --load-format dummy --enforce-eager' \
  --url http://127.0.0.1:30000
step moetune report "$OUT/plan" -o "$OUT/plan.html" --no-what-if
