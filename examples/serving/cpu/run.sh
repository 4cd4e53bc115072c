#!/usr/bin/env bash
# Measures this machine and the steps of vLLM on it, plans a deployment of a small MoE with random
# weights, starts the candidates with the real vLLM on the processor, sends them the planned
# traffic, corrects the predictions, writes a page and plans again with what was learnt. About 15
# minutes beside the two environments that it makes (2.6 GB for vLLM); run it as often as you like.
# Writes quickstart-out/serving in the checkout.
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

step "$VLLM_VENV/bin/python" "$HERE/make_model.py" "$CHECKOUT/examples/models/small-moe/config.json" "$OUT/model"
# The plan's scripts take vllm from this environment.
export PATH="$VLLM_VENV/bin:$PATH" MODEL="$OUT/model" ROUTER_HOST=127.0.0.1
# Random prompts of a tokenizer of bytes repeat; planned is traffic without common prefixes.
START='bash {launch}/local.sh --host 127.0.0.1 --load-format dummy --enforce-eager --no-enable-prefix-caching'
step env OMP_NUM_THREADS=1 moetune profile -o "$OUT/profile" --for "$SPEC" \
  --suite kernels,links,engine --budget 60s --ranks 2 --command "$START"
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
step moetune verify "$OUT/plan" --launcher command --trials "${TRIALS:-3}" --runs "${RUNS:-1}" \
  --command "$START" --bench "bash {launch}/bench_vllm.sh --result-filename {result} --seed {seed}
    --num-warmups {warmups} --num-prompts ${REQUESTS:-48} --disable-tqdm"
step moetune report "$OUT/plan" -o "$OUT/plan.html"
# What the trials said of vLLM on this machine is kept: its folder stands for the profile.
step moetune plan "$SPEC" -o "$OUT/plan-again" --profile "$OUT/plan"
