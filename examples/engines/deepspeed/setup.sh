# Makes .venv-deepspeed in the checkout hold DeepSpeed and what train.py imports; about 1.2 GB, of
# which torch is 0.9. Sourced by run.sh and by a test, which call: setup_deepspeed
#
# Needs what examples/setup.sh needs, which is sourced before. A second run downloads nothing.

DEEPSPEED_VENV="$CHECKOUT/.venv-deepspeed"
DEEPSPEED_FOLDER="$CHECKOUT/examples/engines/deepspeed"

setup_deepspeed() {
  local python="$DEEPSPEED_VENV/bin/python" pip=("$DEEPSPEED_VENV/bin/python" -m pip install --quiet)
  DS_ACCELERATOR=cpu "$python" -P -c 'import deepspeed, peft, transformers' >/dev/null 2>&1 && return
  echo "making .venv-deepspeed"
  "$(base_python)" -m venv --clear "$DEEPSPEED_VENV" || give_up "no environment could be made"
  "${pip[@]}" --constraint "$CHECKOUT/tests/constraints.txt" -r "$DEEPSPEED_FOLDER/requirements.txt" ||
    give_up "pip install failed; the network is needed once"
  # Its kernels are compiled where they are first used; nothing is compiled here.
  DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation --no-deps deepspeed==0.19.8 ||
    give_up "DeepSpeed could not be installed"
  DS_ACCELERATOR=cpu "$python" -P -c 'import deepspeed, peft, transformers' >/dev/null ||
    give_up "DeepSpeed cannot be imported"
}
