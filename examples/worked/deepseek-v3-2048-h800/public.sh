# What the technical report ran, in Megatron-LM's words: PP 16, EP 64 over 8 nodes, no TP, ZeRO-1,
# fp8 with block scales. Megatron has no DualPipe; two model chunks per rank with overlapped
# dispatch are the nearest that it launches. One multi-token-prediction layer, as trained.
torchrun --nnodes 256 --nproc-per-node 8 pretrain_gpt.py \
  --tensor-model-parallel-size 1 \
  --pipeline-model-parallel-size 16 \
  --pipeline-model-parallel-layout "Et*2|(tt|)*29t|mL" \
  --microbatch-group-size-per-virtual-pipeline-stage 20 \
  --context-parallel-size 1 \
  --expert-model-parallel-size 64 \
  --expert-tensor-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 15360 \
  --seq-length 4096 --max-position-embeddings 163840 \
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 \
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
  --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 \
  --moe-shared-expert-intermediate-size 2048 --moe-layer-freq "([0]*3+[1]*58)" \
  --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep \
  --overlap-moe-expert-parallel-comm --delay-wgrad-compute \
  --mtp-num-layers 1 --hidden-dropout 0 --attention-dropout 0 \
  --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe_act \
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --bf16 --fp8-format e4m3 --fp8-recipe blockwise
