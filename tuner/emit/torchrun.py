"""The part that every emitted script shares: bash that starts torchrun on one node of the job.

Ranks follow node numbers (torchrun's static rendezvous), because the innermost groups of a decision
are meant to stay inside a node. A script refuses to start on another number of devices than the
decision's.
"""

from tuner.launch.shape import LaunchShape

ENVIRONMENT_NOTE = (
    "Start it once on every node. From the environment, each with a default:",
    "  NNODES, NPROC_PER_NODE   how the devices are spread over nodes",
    "  NODE_RANK                this node's number, from 0 (Slurm's SLURM_NODEID is understood)",
    "  MASTER_ADDR, MASTER_PORT the first node, and a free port there; several nodes need the name",
)


def preamble(shape: LaunchShape) -> str:
    """Return bash that fills the array LAUNCHER with torchrun and its rendezvous."""
    return f"""\
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"

NNODES="${{NNODES:-{shape.nodes}}}"
NPROC_PER_NODE="${{NPROC_PER_NODE:-{shape.devices_per_node}}}"
NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:-0}}}}"
export OMP_NUM_THREADS=1

case "$NNODES:$NPROC_PER_NODE" in
  *[!0-9:]* | :* | *:)
    echo "NNODES '$NNODES' and NPROC_PER_NODE '$NPROC_PER_NODE' must be numbers" >&2
    exit 2 ;;
esac
if (( 10#$NNODES * 10#$NPROC_PER_NODE != {shape.num_devices} )); then
  echo "NNODES $NNODES x NPROC_PER_NODE $NPROC_PER_NODE is not {shape.num_devices}," \\
    "the devices that this plan is for" >&2
  exit 2
fi

LAUNCHER=(torchrun "--nnodes=$NNODES" "--nproc-per-node=$NPROC_PER_NODE")
if (( 10#$NNODES > 1 )); then
  LAUNCHER+=(
    "--node-rank=$NODE_RANK"
    "--rdzv-backend=static"
    "--master-addr=${{MASTER_ADDR:?is needed with several nodes: the name of the first one}}"
    "--master-port=${{MASTER_PORT:-29500}}"
  )
else
  LAUNCHER+=(--standalone)
fi
"""
