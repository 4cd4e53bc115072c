#!/usr/bin/env bash
# Measures this machine, plans a small MoE training run on it, verifies the plan by launching its
# candidates, explains it and draws a report. Works on a bare machine with Python 3.11 and pip; run
# it as often as you like. Writes quickstart-out in the checkout.
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$CHECKOUT"
setup_environment run

SPEC=examples/quickstart/spec.yaml
OUT=quickstart-out
export OMP_NUM_THREADS=1

# Two ranks on a processor, so that there is a link to measure; otherwise one per accelerator. A copy
# of the spec says how many there are, or fp32 where PyTorch emulates bf16, tens of times slower.
RANKS=(--ranks 2)
CHANGES=()
GPUS="$(python -P -c 'import torch; print(torch.cuda.device_count() * torch.cuda.is_available())')"
if (( GPUS > 0 )); then
  RANKS=()
  CHANGES=(-e "s|devices_per_node: 2 .*|devices_per_node: $GPUS|")
elif python -P -c 'import sys, torch; sys.exit(torch.ops.mkldnn._is_mkldnn_bf16_supported())'; then
  echo "this processor has no bf16 instructions that PyTorch uses: planning in fp32"
  CHANGES=(-e 's|precision: bf16|precision: fp32|' -e 's|emit: .*|emit: [reference]|')
fi
if (( ${#CHANGES[@]} > 0 )); then
  mkdir -p "$OUT"
  sed "${CHANGES[@]}" \
    -e 's|model: ../models/|model: ../examples/models/|' \
    -e 's|path: ../routing/|path: ../examples/routing/|' \
    -e 's|profile: .*|profile: profile|' "$SPEC" > "$OUT/spec.yaml"
  SPEC="$OUT/spec.yaml"
fi

step() {
  echo
  echo "== $*"
  "$@"
}

step moetune doctor
step moetune profile -o "$OUT/profile" --for "$SPEC" --budget 90s ${RANKS[@]+"${RANKS[@]}"}
step moetune plan "$SPEC" -o "$OUT/plan" --profile "$OUT/profile"
step moetune verify "$OUT/plan" --trials 8
step moetune explain "$OUT/plan"
step moetune report "$OUT/plan" -o "$OUT/report.html"

echo
echo "profile:      $OUT/profile"
echo "plan:         $OUT/plan/plan.json"
echo "trials:       $OUT/plan/verified.json"
echo "launch files: $OUT/plan/launch/"
echo "report:       $OUT/report.html"
