#!/bin/bash
# A Mixtral run on eight servers, written as training teams write their scripts.
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8

export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
TP=1; PP=4
EP=$((GPUS_PER_NODE))

LAUNCHER=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES   # all of them
)
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights
    --hidden-dropout 0.0 --attention-dropout 0.0
)
MOE=(--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm
     --moe-token-dispatcher-type alltoall)
PARALLEL="--tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP \
    --expert-model-parallel-size 8 --expert-tensor-parallel-size=1"
PARALLEL+=" --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
if [ -n "$WANDB_API_KEY" ]; then
    MODEL+=(--wandb-project "mixtral")
fi

torchrun "${LAUNCHER[@]}" pretrain_gpt.py ${MODEL[@]} "${MOE[@]}" $PARALLEL \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --bf16 \
    --lr 1e-4 --tokenizer-model 'my tokenizer' "$@" 2>&1 | tee log.txt
