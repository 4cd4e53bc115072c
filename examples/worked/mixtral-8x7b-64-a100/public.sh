# The example of Megatron-LM's MoE guide for Mixtral 8x7B on 32 devices, on twice the devices and
# batch: PP 4, EP 8, micro-batch 1, and the dispatcher that the guide recommends with experts.
torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py \
  --tensor-model-parallel-size 1 \
  --pipeline-model-parallel-size 4 \
  --num-layers-per-virtual-pipeline-stage 8 \
  --expert-model-parallel-size 8 \
  --expert-tensor-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 256 \
  --seq-length 4096 --max-position-embeddings 32768 \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 \
  --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall \
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --hidden-dropout 0 --attention-dropout 0 --bf16
