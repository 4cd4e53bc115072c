#!/usr/bin/env bash
# Written by moetune 0.1.0 for the model mixtral-8x7b.
# Verified by launching the reference training step; trials: 1; this configuration took 2.10 s a step.
# Expected: 2.00 s a step (90 % band: 1.80 s to 2.20 s), 4,096 tokens/s per device.
# Expected peak memory by pipeline rank, the highest of its devices: 0-1: 15.0 GiB.
# 16 devices: TP 1, PP 2, VPP 1, CP 1, DP 8, EP 8, ETP 1, EDP 1, ZeRO 1, micro-batch 1.
# By stage: 0-1: layers 16, recompute selective, chunks of each MoE layer 1.
# With recomputation of moe.
# assumed: balanced routing, though no auxiliary loss is written here (moe_aux_loss_coeff is 0.0 unless given); state goal.moe_aux_loss_coeff to have it written (it changes the loss)
#
# Not set here, because no plan depends on it: model, data, optimizer, learning rate. Add them
# after run.sh:  bash run.sh --model ... --dataset ... --num_train_epochs ... --lr ...
# An apex that is installed, or its absence, decides gradient_accumulation_fusion.
#
# Start it once on every node. From the environment:
#   NNODES, NPROC_PER_NODE   how the devices are spread over nodes; by default as planned
#   NODE_RANK                this node's number; by default its line in hosts.txt, or
#                            SLURM_NODEID; needed on several nodes without either
#   MASTER_ADDR, MASTER_PORT the first node, and a free port there; several nodes need the name
#   CHECKPOINTS              a folder that all nodes share: saved to, and resumed from
set -euo pipefail
FILES="$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"

NNODES="${NNODES:-2}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}"
export OMP_NUM_THREADS=1

case "$NNODES:$NPROC_PER_NODE" in
  *[!0-9:]* | :* | *:)
    echo "NNODES '$NNODES' and NPROC_PER_NODE '$NPROC_PER_NODE' must be numbers" >&2
    exit 2 ;;
esac
if (( 10#$NNODES * 10#$NPROC_PER_NODE != 16 )); then
  echo "NNODES $NNODES x NPROC_PER_NODE $NPROC_PER_NODE is not 16," \
    "the devices that this plan is for" >&2
  exit 2
fi

[[ ! -w . ]] || export PET_LOG_DIR="${PET_LOG_DIR:-$PWD/torchrun}"
LAUNCHER=(torchrun "--nnodes=$NNODES" "--nproc-per-node=$NPROC_PER_NODE")
if (( 10#$NNODES > 1 )); then
  # The store listens on every address of the first node, and whoever reaches MASTER_PORT there can
  # write to it without authentication: keep the network between the nodes private.
  LAUNCHER+=(
    "--node-rank=${NODE_RANK:?is needed with several nodes: the number of this one, from 0}"
    "--rdzv-backend=static"
    "--master-addr=${MASTER_ADDR:?is needed with several nodes: the name of the first one}"
    "--master-port=${MASTER_PORT:-29500}"
  )
else
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
fi
# Megatron-LM's overlap of communication and computation relies on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
mapfile -t ARGUMENTS < <(grep -v '^#' "$FILES/swift_args.txt" | tr ' ' '\n')

exec "${LAUNCHER[@]}" -m swift.cli._megatron.sft "${ARGUMENTS[@]}" \
  ${CHECKPOINTS:+--output_dir "$CHECKPOINTS"} "$@"
