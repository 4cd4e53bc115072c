# Makes .venv-torchtitan in the checkout hold torchtitan with torch 2.13.0 for a CPU; about 1.5 GB,
# of which torch is 0.9. Sourced by run.sh and by a test, which call: setup_torchtitan
#
# Needs what examples/setup.sh needs, which is sourced before. A second run downloads nothing.

TORCHTITAN_VENV="$CHECKOUT/.venv-torchtitan"

setup_torchtitan() {
  local python="$TORCHTITAN_VENV/bin/python"
  "$python" -P -c 'import torchtitan.config, datasets, tokenizers' >/dev/null 2>&1 && return
  echo "making .venv-torchtitan"
  "$(base_python)" -m venv --clear "$TORCHTITAN_VENV" || give_up "no environment could be made"
  "$python" -m pip install --quiet --constraint "$CHECKOUT/tests/constraints.txt" \
    torch torchtitan==0.3.0 || give_up "pip install failed; the network is needed once"
  "$python" -P -c 'import torchtitan.config' >/dev/null || give_up "torchtitan cannot be imported"
}
