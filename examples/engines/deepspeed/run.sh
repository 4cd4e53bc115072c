#!/usr/bin/env bash
# Measures this machine, plans a small MoE training run for DeepSpeed, launches its candidates with
# the real engine on two processes of the CPU, corrects the predictions and writes a page. About 5
# minutes beside the two environments that it makes; run it as often as you like. Writes
# quickstart-out/deepspeed in the checkout.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=examples/setup.sh
source "$HERE/../../setup.sh"
# shellcheck source=examples/engines/deepspeed/setup.sh
source "$HERE/setup.sh"
setup_environment run
setup_deepspeed

SPEC="$HERE/spec.yaml"
OUT="$CHECKOUT/quickstart-out/deepspeed"
MODEL="$CHECKOUT/examples/models/tiny-moe/config.json"
export OMP_NUM_THREADS=1

step() {
  echo
  echo "== $*"
  "$@"
}

# Random weights route unevenly: one of two expert-parallel ranks gets three quarters of a layer.
step env DS_ACCELERATOR=cpu "$DEEPSPEED_VENV/bin/python" "$HERE/train.py" --model "$MODEL" --sequence 256 \
  --routing "$OUT/routing.json"
step moetune profile -o "$OUT/profile" --for "$SPEC" --budget 90s --ranks 2
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
# run.sh of the plan takes torchrun and the program from this environment.
step env PATH="$DEEPSPEED_VENV/bin:$PATH" DS_ACCELERATOR=cpu TRAIN="$HERE/train.py" \
  moetune verify "$OUT/plan" --launcher command --metrics deepspeed --trials "${TRIALS:-5}" --steps 8 \
  --command "bash {launch}/run.sh --model '$MODEL' --sequence 256 --steps {steps}"
step moetune report "$OUT/plan" -o "$OUT/plan.html"
# What the trials said of DeepSpeed on this machine is kept: its folder stands for the profile.
step moetune plan "$SPEC" -o "$OUT/plan-again" --profile "$OUT/plan"
