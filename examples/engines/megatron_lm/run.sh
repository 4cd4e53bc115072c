#!/usr/bin/env bash
# Measures this machine, plans a small MoE training run for Megatron-LM, launches its candidates with
# the real engine on two processes of the CPU, corrects the predictions and writes a page. About 5
# minutes beside the two environments that it makes; run it as often as you like. Writes
# quickstart-out/megatron-lm in the checkout.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=examples/setup.sh
source "$HERE/../../setup.sh"
# shellcheck source=examples/engines/megatron_lm/setup.sh
source "$HERE/setup.sh"
setup_environment run
setup_megatron

SPEC="$HERE/spec.yaml"
OUT="$CHECKOUT/quickstart-out/megatron-lm"
export OMP_NUM_THREADS=1

step() {
  echo
  echo "== $*"
  "$@"
}

# The checkout's own options: text that is made up, and what no plan decides.
OWN="--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --lr 1e-4 --eval-iters 0 --eval-interval 1000000"
OWN="$OWN --log-interval 1"
step moetune profile -o "$OUT/profile" --for "$SPEC" --budget 90s --ranks 2
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
# run.sh of the plan takes torchrun and the program from this environment.
step env PATH="$MEGATRON_VENV/bin:$PATH" MEGATRON_LM="$HERE" \
  moetune verify "$OUT/plan" --launcher command --metrics megatron --trials "${TRIALS:-5}" --steps 8 \
  --command "bash {launch}/run.sh $OWN --train-iters {steps}"
step moetune report "$OUT/plan" -o "$OUT/plan.html"
# What the trials said of Megatron-LM on this machine is kept: its folder stands for the profile.
step moetune plan "$SPEC" -o "$OUT/plan-again" --profile "$OUT/plan"
