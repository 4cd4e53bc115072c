#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on four nodes, both sides on the same devices.
set -xeuo pipefail
NNODES=${NNODES:-4}
max_prompt=1024
max_response=$((1024 * 3))
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt + max_response))
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
)
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=128 data.max_prompt_length=$max_prompt \
    data.max_response_length=$max_response data.train_files="$HOME/train.parquet" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    "${ACTOR[@]}" trainer.nnodes=$NNODES trainer.n_gpus_per_node=8 "$@"
