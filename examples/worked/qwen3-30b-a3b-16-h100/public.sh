# The published Megatron-Bridge recipe for 16 H100 (performance summary, container 26.02.01):
# PP 2 with 12 model chunks, EP 8, micro-batch 1, DeepEP with overlapped dispatch; here in bf16.
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \
  --tensor-model-parallel-size 1 \
  --pipeline-model-parallel-size 2 \
  --num-layers-per-virtual-pipeline-stage 2 \
  --context-parallel-size 1 \
  --expert-model-parallel-size 8 \
  --expert-tensor-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 1024 \
  --seq-length 4096 --max-position-embeddings 40960 \
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm \
  --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 \
  --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep \
  --overlap-moe-expert-parallel-comm \
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --hidden-dropout 0 --attention-dropout 0 --bf16
