# DeepSeek-V3 on 1,024 devices: interleaved pipeline with every stage placed, MTP, DeepEP.
torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py \
  --tensor-model-parallel-size 2 --sequence-parallel \
  --pipeline-model-parallel-size 8 \
  --pipeline-model-parallel-layout "Et*3|(tt|)*29,m|L" \
  --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 8192 --seq-length 4096 \
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 \
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
  --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 \
  --moe-shared-expert-intermediate-size 2048 --moe-layer-freq '([0]*3+[1]*58)' \
  --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep \
  --mtp-num-layers 1 --recompute-granularity selective \
  --recompute-modules mla_up_proj mlp moe layernorm \
  --hidden-dropout 0 --attention-dropout 0 --swiglu --untie-embeddings-and-output-weights \
  --bf16 --fp8-format e4m3 --fp8-recipe blockwise
