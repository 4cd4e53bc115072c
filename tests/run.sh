#!/usr/bin/env bash
# Formatting, lint, types, import contracts, accuracy floors, stored scenarios, tests:
# bash tests/run.sh [--slow] [pytest arguments]
# Sets up .venv first where that is needed. Stops at the first failure with its exit code.
# Files of tests run side by side, but for those that are slow or share an accelerator (-n0: none do).
# Limits of time grow with the machine's load; MOETUNE_TEST_PATIENCE multiplies them (tests/patience.py).
set -euo pipefail
# shellcheck source=examples/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../examples/setup.sh"
cd -- "$CHECKOUT"

SLOW=""
ARGUMENTS=()
for argument in "$@"; do
  if [[ "$argument" == --slow ]]; then
    SLOW=1
  else
    ARGUMENTS+=("$argument")
  fi
done

setup_environment dev
export OMP_NUM_THREADS=1
# The tests start hundreds of processes: without compiled files each would compile what it imports.
unset PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

step() {
  local name="$1" code=0 start=$SECONDS
  shift
  echo "== $name"
  "$@" || code=$?
  echo "== $name: $([[ $code == 0 ]] && echo ok || echo "failed ($code)"), $((SECONDS - start)) s"
  [[ $code == 0 ]] || exit "$code"
}

# What this machine or this call leaves out, and what may run side by side.
LEFT_OUT=()
# More processes than two cores have: many tests wait for processes that they started.
SIDE_BY_SIDE=(--numprocesses 4 --dist loadfile)
if [[ -n "$SLOW" ]]; then SIDE_BY_SIDE=(); else LEFT_OUT+=("not slow"); fi
if python -P -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  SIDE_BY_SIDE=()
else
  LEFT_OUT+=("not gpu")
fi
MARKS=""
for mark in ${LEFT_OUT[@]+"${LEFT_OUT[@]}"}; do
  MARKS="${MARKS:+$MARKS and }$mark"
done

# Types take a minute of one core: what follows runs beside them.
TYPES_FOUND="$(mktemp)"
mypy >"$TYPES_FOUND" 2>&1 &
TYPES=$!
trap 'kill "$TYPES" 2>/dev/null || true; rm -f "$TYPES_FOUND"' EXIT
types() {
  local code=0
  wait "$TYPES" || code=$?
  cat "$TYPES_FOUND"
  return "$code"
}

# Collecting compiles the tests once, which each process of the last step would do.
collected() {
  local code=0 output
  output="$(pytest --collect-only -q ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})" || code=$?
  [[ $code == 0 ]] || grep -v :: <<<"$output"
  return "$code"
}

step "ruff format" ruff format --check --quiet .
step "ruff check" ruff check --quiet .
step "lint-imports" lint-imports
step "collected tests" collected
step "accuracy floors" pytest -q tests/tuner/test_stored_runs.py
step "moetune check" moetune check examples/checks
step "mypy" types
step "pytest" pytest -q -m "$MARKS" ${SIDE_BY_SIDE[@]+"${SIDE_BY_SIDE[@]}"} ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
