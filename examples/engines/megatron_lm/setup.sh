# Makes .venv-megatron in the checkout hold megatron-core and, as Megatron-LM in it, the repository
# whose pretrain_gpt.py is started; about 1.7 GB. Sourced by run.sh and by a test, which call:
# setup_megatron
#
# Needs what examples/setup.sh needs, which is sourced before, and git; MEGATRON_LM may name a
# checkout of core_v0.19.0 that is here already. A second run downloads nothing.

MEGATRON_VENV="$CHECKOUT/.venv-megatron"
MEGATRON_FOLDER="$CHECKOUT/examples/engines/megatron_lm"

setup_megatron() {
  local python="$MEGATRON_VENV/bin/python" pip=("$MEGATRON_VENV/bin/python" -m pip install --quiet)
  if [[ ! -e "$MEGATRON_VENV/megatron-core-0.19.0" ]]; then
    echo "making .venv-megatron"
    "$(base_python)" -m venv --clear "$MEGATRON_VENV" || give_up "no environment could be made"
    "${pip[@]}" --constraint "$CHECKOUT/tests/constraints.txt" -r "$MEGATRON_FOLDER/requirements.txt" ||
      give_up "pip install failed; the network is needed once"
    # It asks for Python 3.12; pretrain_gpt.py here brings what Python 3.11 lacks.
    "${pip[@]}" --no-deps --ignore-requires-python megatron-core==0.19.0 ||
      give_up "megatron-core could not be installed"
    touch "$MEGATRON_VENV/megatron-core-0.19.0"
  fi
  [[ -e "$MEGATRON_VENV/Megatron-LM/pretrain_gpt.py" ]] && return
  if [[ -n "${MEGATRON_LM:-}" ]]; then
    [[ -e "$MEGATRON_LM/pretrain_gpt.py" ]] || give_up "$MEGATRON_LM is no checkout of Megatron-LM"
    ln -sfn "$(cd -- "$MEGATRON_LM" && pwd -P)" "$MEGATRON_VENV/Megatron-LM"
  else
    GIT_TERMINAL_PROMPT=0 bounded 300 git clone --quiet --depth 1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM \
      "$MEGATRON_VENV/Megatron-LM" || give_up "no checkout of Megatron-LM; MEGATRON_LM may name one"
  fi
}
