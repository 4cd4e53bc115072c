# Makes .venv in the checkout hold what moetune needs. Sourced by examples/quickstart.sh and
# tests/run.sh, which call: setup_environment run|dev
#
# Needs Python 3.11 or newer with pip, and nothing else. Downloads only what is missing, so a second
# run works offline. Where the Python at hand has torch already (a CUDA build, say), that one is used.

CHECKOUT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$CHECKOUT/.venv"

setup_environment() {
  local kind="$1"
  unset PYTHONHOME PYTHONPATH
  # Settings of the user's pip that cannot work inside a virtual environment.
  export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
  runs "$VENV/bin/python" || make_venv
  export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"

  install_required "$kind"
  [[ "$kind" != dev ]] || install_engines
}

install_required() {
  local kind="$1" extras lacking
  lacking="$(lacking_packages "$kind")"
  [[ -z "$lacking" ]] && return
  echo "setting up .venv: $lacking"
  extras="$([[ "$kind" == dev ]] && echo "dev,torch" || echo "torch,report")"
  if [[ " $lacking " == *" torch "* ]]; then
    pip_install --constraint "$CHECKOUT/tests/constraints.txt" --editable "$CHECKOUT[$extras]"
  else
    # The torch that is here may be another release than the constraint names; it stays.
    pip_install --editable "$CHECKOUT[$extras]"
  fi
  lacking="$(lacking_packages "$kind")"
  [[ -z "$lacking" ]] || give_up "still missing after pip install: $lacking"
}

give_up() {
  echo "setup: $1" >&2
  exit 3
}

runs() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints the interpreter to build on: that of the system when a virtual environment is active.
base_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11; do
    if runs "$name"; then
      "$name" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
      return
    fi
  done
  give_up "no Python 3.11 or newer was found; install one, or name it: PYTHON=/path/to/python"
}

make_venv() {
  local base site=()
  base="$(base_python)" || exit
  if "$base" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    site=(--system-site-packages)
  fi
  echo "making .venv with $base ${site[*]-}"
  "$base" -m venv --clear ${site[@]+"${site[@]}"} "$VENV" >/dev/null 2>&1 && return
  # Debian splits ensurepip off; a pip outside can stand in for the one that venv could not bring.
  "$base" -m venv --clear --without-pip ${site[@]+"${site[@]}"} "$VENV" ||
    give_up "$base -m venv failed; install its venv module (Debian: apt-get install python3-venv)"
  "$base" -m pip --python "$VENV/bin/python" install --quiet pip ||
    give_up "$base has no pip that can install into .venv; install pip"
}

pip_install() {
  "$VENV/bin/python" -m pip install --quiet "$@" ||
    give_up "pip install failed; the network is needed once. Run it again, it goes on from there."
}

# Adds the engines whose own parsers some tests ask, as far as they can be had: without one of them
# its tests are skipped, and nothing here fails. Each comes with what its parser imports, no more.
install_engines() {
  local engine left_out=()
  for engine in $(lacking_engines); do
    echo "adding $engine, for the tests of its launch files"
    install_engine "$engine" >/dev/null 2>&1 || left_out+=("$engine")
  done
  [[ ${#left_out[@]} == 0 ]] || echo "left out, so their tests are skipped: ${left_out[*]}"
}

install_engine() {
  local name="${1%%[<>=]*}"
  case "$name" in
    megatron-core) try_pip "$1" ;;
    torchtitan) try_pip "$1" tyro docstring_parser typeguard torchdata spmd_types==0.2.3 ;;
    deepspeed)
      try_pip setuptools wheel einops hjson msgpack py-cpuinfo &&
        DS_BUILD_OPS=0 try_pip --no-build-isolation "$1"
      ;;
    *) return 1 ;;
  esac || return 1
  bounded 120 "$VENV/bin/python" -P -c "import $(engine_module "$name")" && return
  # A package that cannot be imported would fail the tests instead of skipping them.
  "$VENV/bin/python" -m pip uninstall --quiet --yes "$name"
  return 1
}

engine_module() {
  case "$1" in
    megatron-core) echo megatron.core.transformer ;;
    torchtitan) echo torchtitan.config ;;
    *) echo "$1.runtime.config" ;;
  esac
}

try_pip() {
  bounded 180 "$VENV/bin/python" -m pip install --quiet --no-deps --retries 1 --timeout 15 "$@"
}

# Runs a command for at most so many seconds, where the system can tell it.
bounded() {
  local seconds="$1"
  shift
  if type -P timeout >/dev/null; then timeout "$seconds" "$@"; else "$@"; fi
}

# Prints the engines of pyproject.toml that are not installed, as requirements.
lacking_engines() {
  "$VENV/bin/python" -P - "$CHECKOUT" <<'PYTHON' || true
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

text = (Path(sys.argv[1]) / "pyproject.toml").read_text(encoding="utf-8")
for line in tomllib.loads(text)["project"]["optional-dependencies"]["engines"]:
    try:
        version(re.match(r"[\w.-]+", line)[0])
    except PackageNotFoundError:
        print(line)
PYTHON
}

# Prints the requirements of pyproject.toml that .venv does not meet, and "moetune" when it is not
# installed from this checkout.
lacking_packages() {
  "$VENV/bin/python" -P - "$CHECKOUT" "$1" <<'PYTHON'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

checkout, kind = Path(sys.argv[1]), sys.argv[2]
project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *extras["torch"], *extras["report"]]
if kind == "dev":
    wanted += extras["dev"]


def numbers(text):
    return [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]]


def met(line):
    name = re.match(r"[\w.-]+", line)[0]
    lowest = re.search(r">=\s*([0-9.]+)", line)
    try:
        return numbers(version(name)) >= numbers(lowest[1] if lowest else "")
    except PackageNotFoundError:
        return False


lacking = [re.match(r"[\w.-]+", line)[0] for line in wanted if not met(line)]
found = find_spec("tuner")
if found is None or Path(found.origin).resolve() != checkout / "tuner" / "__init__.py":
    lacking.append("moetune")
print(*lacking)
PYTHON
}
