#!/usr/bin/env bash
# The worked plans: for each public recipe its price, and what moetune chooses instead on the same
# machines. Writes estimate.txt and plan.txt beside each spec: bash examples/worked/run.sh [FOLDER...]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT

for spec in ${@:-*/}; do
  name="${spec%/}"
  echo "== $name"
  if [[ -f "$name/public.sh" ]]; then
    # A recipe that does not fit is a result too (exit code 1).
    moetune estimate "$name/spec.yaml" --launch "$name/public.sh" > "$scratch/estimate" || [[ $? == 1 ]]
    mv -- "$scratch/estimate" "$name/estimate.txt"
    grep -E '^(step time|DOES NOT FIT|fits)' "$name/estimate.txt"
  fi
  moetune plan "$name/spec.yaml" -o "$scratch/$name" > "$scratch/plan"
  sed "s#$scratch/##g" "$scratch/plan" > "$name/plan.txt"
  grep -E '^(step time|certificate)' "$name/plan.txt"
done
