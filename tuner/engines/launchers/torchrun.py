"""The part that all emitted scripts share: bash that starts torchrun on one node of the job.

Ranks follow node numbers (torchrun's static rendezvous), because the innermost groups of a decision
must stay inside a node. A script refuses to start on another number of devices than the decision
has. Where the order of nodes matters, a node's number is its line in `hosts.txt`.

One node: gloo and NCCL are restricted to loopback. The rendezvous store (TCPStore) still listens on
every address, whichever rendezvous, address or local address torchrun is given
(tests/tuner/engines/test_torchrun.py); the static rendezvous at least does not unpickle what it
receives, as that of `--standalone` does.

A script does not change the current folder, so that relative arguments work and outputs land there,
torchrun's own (the errors of each rank) in `torchrun/`.
"""

from typing import Final

from tuner.engines.files import OWN_FOLDER, comment
from tuner.engines.launchers.hosts import HOSTS_NAME, notes
from tuner.engines.launchers.shape import LaunchShape

ENVIRONMENT_NOTE = (
    "Start it once on every node. From the environment:",
    "  NNODES, NPROC_PER_NODE   how the devices are spread over nodes; by default as planned",
    "  NODE_RANK                this node's number; by default its line in hosts.txt, or",
    "                           SLURM_NODEID; needed on several nodes without either",
    "  MASTER_ADDR, MASTER_PORT the first node, and a free port there; several nodes need the name",
)


ONE_NODE: Final = """\
  # gloo and NCCL stay on loopback, whatever a login script exports. torchrun's store does not:
  # it listens on every address of this node without authentication, and no option changes that;
  # keep other users away from the port.
  export GLOO_SOCKET_IFNAME=lo
  export NCCL_SOCKET_IFNAME="=lo"
  LAUNCHER+=(
    "--node-rank=0"
    "--rdzv-backend=static"
    "--master-addr=127.0.0.1"
    "--master-port=${MASTER_PORT:-$((20000 + RANDOM % 12000))}"
  )
"""
"""Bash by which torchrun starts the ranks of one node; ports are below the ephemeral range."""


def preamble(shape: LaunchShape, *, one_node: str = ONE_NODE, several_nodes: str = "") -> str:
    """Return bash that fills the array LAUNCHER with torchrun and its rendezvous.

    Args:
        shape: nodes and devices on each.
        one_node: bash that completes LAUNCHER, or replaces it, where all ranks are on one node.
        several_nodes: bash that completes it further where they are not.
    """
    return f"""\
set -euo pipefail
{OWN_FOLDER}
NNODES="${{NNODES:-{shape.nodes}}}"
NPROC_PER_NODE="${{NPROC_PER_NODE:-{shape.devices_per_node}}}"
{_node_rank(shape)}export OMP_NUM_THREADS=1

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
{_rank_by_line(shape)}
[[ ! -w . ]] || export PET_LOG_DIR="${{PET_LOG_DIR:-$PWD/torchrun}}"
LAUNCHER=(torchrun "--nnodes=$NNODES" "--nproc-per-node=$NPROC_PER_NODE")
if (( 10#$NNODES > 1 )); then
  # The store listens on every address of the first node, and whoever reaches MASTER_PORT there can
  # write to it without authentication: keep the network between the nodes private.
  LAUNCHER+=(
    "--node-rank=${{NODE_RANK:?is needed with several nodes: the number of this one, from 0}}"
    "--rdzv-backend=static"
    "--master-addr=${{MASTER_ADDR:?is needed with several nodes: the name of the first one}}"
    "--master-port=${{MASTER_PORT:-29500}}"
  )
{several_nodes}else
{one_node}fi
"""


def _node_rank(shape: LaunchShape) -> str:
    if shape.hosts:
        return ""
    return 'NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}"\n'


def _rank_by_line(shape: LaunchShape) -> str:
    """Return bash that looks this node up in the list of hosts.

    Slurm numbers the nodes of a step in its own order (SLURM_NODEID) and ignores the hostfile, so
    its number is not used.
    """
    if not shape.hosts:
        return ""
    return f"""
{comment(notes(shape))}HOSTFILE="${{HOSTFILE:-$FILES/{HOSTS_NAME}}}"
if [[ ! -r "$HOSTFILE" ]]; then
  echo "$HOSTFILE cannot be read: it names the nodes in the order of ranks, one per line" >&2
  exit 2
fi
mapfile -t HOSTS < "$HOSTFILE"
if (( ${{#HOSTS[@]}} != 10#$NNODES )); then
  echo "$HOSTFILE names ${{#HOSTS[@]}} nodes, NNODES is $NNODES" >&2
  exit 2
fi
NODE_RANK="${{NODE_RANK:-}}"
HERE="${{SLURMD_NODENAME:-$(hostname)}}"
for index in "${{!HOSTS[@]}}"; do
  HOST="${{HOSTS[index]}}"
  if [[ "$HOST" == "$HERE" || "$HOST" == "${{HERE%%.*}}" || "${{HOST%%.*}}" == "$HERE" ]]; then
    NODE_RANK="${{NODE_RANK:-$index}}"
  fi
done
if [[ -z "$NODE_RANK" ]]; then
  echo "$HERE is not in $HOSTFILE: start on the nodes that it names, or set NODE_RANK" >&2
  exit 2
fi
MASTER_ADDR="${{MASTER_ADDR:-${{HOSTS[0]}}}}"
"""
