#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model deepseek-v3.
# 28 devices, mode disaggregated.
# prefill: 3 x 4 devices of h100, each on a machine; attention TP 1 x DP 4, experts TP 1 x EP 4, PP 1, all-to-all none; 64 requests and 8192 tokens per rank at most.
# decode: 1 x 16 devices of h100, each on 2 machines; attention TP 1 x DP 16, experts TP 1 x EP 16, PP 1, all-to-all deepep_low_latency; 64 requests and 8192 tokens per rank at most.
# Expected TTFT: mean 500 ms (between 400 ms and 700 ms), P50 400 ms, P90 900 ms, P99 1.50 s.
# Expected TPOT: mean 20.0 ms (between 18.0 ms and 23.0 ms), P50 20.0 ms, P90 30.0 ms, P99 40.0 ms.
# Expected: 14 requests/s, 14000 output tokens/s, goodput 0.5 requests/s per device.
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
