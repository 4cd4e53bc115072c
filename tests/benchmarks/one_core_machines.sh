#!/usr/bin/env bash
# Starts a disaggregated launch of vLLM on two emulated machines of one core each, and its router:
#
#     bash tests/benchmarks/one_core_machines.sh FILES [flags of the engine]
#
# FILES is launch/vllm of a plan of one prefill and one decode instance. A machine is a cpuset of one
# core, and a /sys/devices/system/node that lists that core alone: what a container with a core of
# its own has, and where vLLM's connector reads which core may transfer. The network is loopback.
# Needs root and the cpuset controller (version 1) under CPUSETS; ends with its last process.
set -euo pipefail
FILES="$1"
shift
: "${MODEL:?set MODEL to the path or name of the weights}"
LOGS="${LOGS:-$PWD/logs}"
CPUSETS="${CPUSETS:-/sys/fs/cgroup/cpuset}"
mkdir -p -- "$LOGS"
trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

FLAGS=("$@")

machine() {
  # Arguments: core, command. Becomes the command on the machine of that core.
  local core="$1" group="$CPUSETS/moetune-core-$1"
  shift
  mkdir -p -- "$group"
  cat -- "$CPUSETS/cpuset.mems" > "$group/cpuset.mems"
  echo "$core" > "$group/cpuset.cpus"
  echo "$BASHPID" > "$group/tasks"
  exec unshare --mount bash -c '
    node=/sys/devices/system/node
    mount -t tmpfs none /mnt
    mkdir -p "/mnt/node0/cpu$0"
    cp -- "$node"/{online,possible} /mnt
    cp -- "$node"/node0/{cpumap,cpulist,distance,meminfo} /mnt/node0
    mount --move /mnt "$node"
    exec "$@"' "$core" "$@"
}

start() {
  # Arguments: role, port, core.
  VLLM_CPU_OMP_THREADS_BIND="$3" PORT="$2" HOST_IP=127.0.0.1 \
    machine "$3" bash "$FILES/$1.sh" ${FLAGS[@]+"${FLAGS[@]}"} > "$LOGS/$1-$2.log" 2>&1 &
}
start prefill 30000 0
start decode 30200 1
PREFILL_URLS=http://127.0.0.1:30000 DECODE_URLS=http://127.0.0.1:30200 \
  bash "$FILES/router.sh" > "$LOGS/router.log" 2>&1 &
wait -n
