#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
#
# Started by job.sbatch, once per task.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# Arguments: group, instance ("task": one per task), instances of the groups before it,
# machines of an instance.
GROUP="$1" INDEX="$2" FIRST="$3"
export NNODES="$4" NODE_RANK=0
shift 4
TAKES_REQUESTS=yes
if [[ "$INDEX" == task ]]; then
  INDEX="$SLURM_PROCID"
else
  NODE_RANK="$SLURM_NODEID"
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"
  export MASTER_ADDR
  if (( SLURM_PROCID > 0 )); then TAKES_REQUESTS=no; fi
fi
export PORT="$(( 30000 + (FIRST + INDEX) % 150 * 200 ))"
if [[ "$TAKES_REQUESTS" == yes ]]; then
  printf 'http://%s:%s\n' "${SLURMD_NODENAME:-$(hostname)}" "$PORT" > "$RUN/$GROUP.$INDEX.url"
fi
exec bash "$HERE/../sglang/$GROUP.sh" "$@"
