#!/usr/bin/env bash
# Measures this machine, plans a small MoE training run for torchtitan, launches its candidates with
# the real engine on two processes of the CPU, corrects the predictions and writes a page. About 8
# minutes beside the two environments that it makes; run it as often as you like. Writes
# quickstart-out/torchtitan in the checkout.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=examples/setup.sh
source "$HERE/../../setup.sh"
# shellcheck source=examples/engines/torchtitan/setup.sh
source "$HERE/setup.sh"
setup_environment run
setup_torchtitan

SPEC="$HERE/spec.yaml"
OUT="$CHECKOUT/quickstart-out/torchtitan"
PROGRAMS="$TORCHTITAN_VENV/bin"
export OMP_NUM_THREADS=1
mkdir -p "$OUT"

step() {
  echo
  echo "== $*"
  "$@"
}

# torchrun and torchtitan write logs where they are started.
cd "$OUT"
step env GLOO_SOCKET_IFNAME=lo PYTHONPATH="$HERE" ROUTING="$OUT/routing.json" \
  "$PROGRAMS/torchrun" --nproc-per-node 1 --rdzv-backend static --master-addr 127.0.0.1 \
  --master-port $((20000 + RANDOM % 12000)) -m record_routing \
  --module tiny_moe --config tiny_moe_on_cpu --training.steps 8
step moetune profile -o "$OUT/profile" --for "$SPEC" --budget 120s --ranks 2
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
# run.sh of the plan takes torchrun, the module that it starts and the model from these variables.
step env PATH="$PROGRAMS:$PATH" PYTHONPATH="$HERE" TRAIN_FILE=train_on_cpu MODULE=tiny_moe \
  CONFIG=tiny_moe moetune verify "$OUT/plan" --launcher command --metrics torchtitan \
  --trials "${TRIALS:-5}" --steps 8 --command "bash {launch}/run.sh --training.steps {steps} --dump_folder {launch}/outputs"
step moetune report "$OUT/plan" -o "$OUT/plan.html"
# What the trials said of torchtitan on this machine is kept: its folder stands for the profile.
step moetune plan "$SPEC" -o "$OUT/plan-again" --profile "$OUT/plan"
