"""Megatron-LM's flags that an estimate depends on, with deprecated and removed ones.

Read from `megatron/training/arguments.py` and the config classes of core_v0.16.1 to core_v0.19.0
of github.com/NVIDIA/Megatron-LM; flags of classes are their fields with `-` for `_`.
"""

from collections.abc import Mapping
from typing import Final

from tuner.engines.megatron_lm import primus, unpriced

SPELLED: Final[Mapping[str, str]] = {
    "tensor": "tensor-model-parallel-size",
    "context": "context-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "expert": "expert-model-parallel-size",
    "expert_tensor": "expert-tensor-parallel-size",
    "virtual_pipeline": "num-virtual-stages-per-pipeline-rank",
    "layers_per_virtual_stage": "num-layers-per-virtual-pipeline-stage",
    "interleave_group": "microbatch-group-size-per-virtual-pipeline-stage",
    "layout": "pipeline-model-parallel-layout",
    "letters": "hybrid-layer-pattern",
    "first_stage_layers": "decoder-first-pipeline-num-layers",
    "last_stage_layers": "decoder-last-pipeline-num-layers",
    "sequence": "seq-length",
    "micro_batch": "micro-batch-size",
    "global_batch": "global-batch-size",
    "sequence_parallel": "sequence-parallel",
    "recompute": "recompute-granularity",
    "recompute_modules": "recompute-modules",
    "recompute_method": "recompute-method",
    "recompute_layers": "recompute-num-layers",
    "chunks": "mlp-chunks-for-training",
    "dispatcher": "moe-token-dispatcher-type",
    "a2a_overlap": "overlap-moe-expert-parallel-comm",
    "shared_expert_overlap": "moe-shared-expert-overlap",
    "overlap_grad_reduce": "overlap-grad-reduce",
    "ddp_bucket_size": "ddp-bucket-size",
    "overlap_param_gather": "overlap-param-gather",
    "overlap_tensor": "tp-comm-overlap",
    "cuda_graph": "cuda-graph-impl",
    "zero_stage": "use-distributed-optimizer",
    "mtp_layers": "mtp-num-layers",
    "retain_interval": "save-retain-interval",
}
"""Flag of each field of `LaunchSettings`."""

ON_OFF: Final = (
    *("overlap_grad_reduce", "overlap_param_gather", "overlap_tensor"),
    *("a2a_overlap", "shared_expert_overlap"),
)
"""Fields that are switches, off unless the flag is given."""

SIZES: Final[Mapping[str, str]] = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "num_heads": "num-attention-heads",
    "head_dim": "kv-channels",
    "vocab_size": "vocab-size",
    "expert_ffn_size": "moe-ffn-hidden-size",
    "shared_ffn_size": "moe-shared-expert-intermediate-size",
    "num_experts": "num-experts",
    "top_k": "moe-router-topk",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_nope_head_dim": "qk-head-dim",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
    "latent_size": "moe-latent-size",
    "mamba_heads": "mamba-num-heads",
    "mamba_groups": "mamba-num-groups",
    "mamba_head_dim": "mamba-head-dim",
    "mamba_state_dim": "mamba-state-dim",
    "delta_key_heads": "linear-num-key-heads",
    "delta_value_heads": "linear-num-value-heads",
    "delta_key_head_dim": "linear-key-head-dim",
    "delta_value_head_dim": "linear-value-head-dim",
    "indexer_heads": "dsa-indexer-n-heads",
    "indexer_head_dim": "dsa-indexer-head-dim",
    "indexer_top_k": "dsa-indexer-topk",
}
"""Flag of each size of tuner/estimate/stated_model.py that a flag states as a plain number."""

OTHERS: Final = (
    unpriced.FLAGS
    | primus.FLAGS
    | frozenset(
        {
            "ffn-hidden-size",
            "group-query-attention",
            "num-query-groups",
            "multi-latent-attention",
            "moe-layer-freq",
            "experimental-attention-variant",
            "linear-attention-freq",
            "attention-output-gate",
            "ddp-num-buckets",
            "swiglu",
            "untie-embeddings-and-output-weights",
            "account-for-embedding-in-pipeline-split",
            "account-for-loss-in-pipeline-split",
            "async-save",
            "inprocess-restart",
            "save-interval",
            "most-recent-k",
            "non-persistent-ckpt-type",
            "non-persistent-save-interval",
            "replication",
            "replication-factor",
            "replication-jump",
            "use-persistent-ckpt-worker",
            "bf16",
            "fp16",
            "fp8-format",
            "fp8-recipe",
            "fp4-format",
            "fp4-recipe",
            "grad-reduce-in-bf16",
            "main-grads-dtype",
            "accumulate-allreduce-grads-in-fp32",
            "use-precision-aware-optimizer",
            "no-store-param-remainders",
            "exp-avg-dtype",
            "exp-avg-sq-dtype",
            "main-params-dtype",
            "moe-expert-capacity-factor",
            "moe-pad-expert-input-to-capacity",
            "use-megatron-fsdp",
            "use-torch-fsdp2",
            "data-parallel-sharding-strategy",
            "torch-fsdp2-no-reshard-after-forward",
            "num-distributed-optimizer-instances",
            "moe-flex-dispatcher-backend",
            "recompute-activations",
            "cuda-graph-modules",
            "cuda-graph-scope",
            "attention-backend",
            "use-flash-attn",
            "transformer-impl",
            "hidden-dropout",
            "attention-dropout",
            "optimizer-cpu-offload",
            "optimizer-offload-fraction",
            "cpu-offloading-num-layers",
            "fine-grained-activation-offloading",
            "offload-modules",
            "use-tp-pp-dp-mapping",
            "moe-grouped-gemm",
            "moe-enable-deepep",
            "moe-layer-recompute",
            "enable-cuda-graph",
            "external-cuda-graph",
            "use-custom-fsdp",
        }
    )
)

SWITCHES: Final = unpriced.SWITCHES | frozenset(
    {
        "async-save",
        "inprocess-restart",
        "replication",
        "use-persistent-ckpt-worker",
        "sequence-parallel",
        "overlap-moe-expert-parallel-comm",
        "moe-shared-expert-overlap",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "tp-comm-overlap",
        "use-distributed-optimizer",
        "group-query-attention",
        "multi-latent-attention",
        "attention-output-gate",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
        "bf16",
        "fp16",
        "grad-reduce-in-bf16",
        "accumulate-allreduce-grads-in-fp32",
        "use-precision-aware-optimizer",
        "no-store-param-remainders",
        "moe-pad-expert-input-to-capacity",
        "use-megatron-fsdp",
        "use-torch-fsdp2",
        "torch-fsdp2-no-reshard-after-forward",
        "recompute-activations",
        "use-flash-attn",
        "optimizer-cpu-offload",
        "fine-grained-activation-offloading",
        "use-tp-pp-dp-mapping",
        "moe-grouped-gemm",
        "moe-enable-deepep",
        "moe-layer-recompute",
        "enable-cuda-graph",
        "external-cuda-graph",
        "use-custom-fsdp",
    }
)
"""Understood flags without a value."""

OFF_FLAGS: Final[Mapping[str, str]] = {
    **{name.replace("_", "-"): flag for name, flag in unpriced.OFF.items()},
    "grad-reduce-in-fp32": "grad-reduce-in-bf16",
}
"""Fields that are on by default: the flag that turns each off."""

RECIPE: Final[Mapping[str, tuple[str, ...]]] = {
    "bf16": (),
    "hidden-dropout": ("0.0",),
    "attention-dropout": ("0.0",),
    "use-distributed-optimizer": (),
    "overlap-grad-reduce": (),
    "overlap-param-gather": (),
    "moe-token-dispatcher-type": ("alltoall",),
    "moe-grouped-gemm": (),
}
"""Flags that recipes of Megatron-Bridge set and that are off in the engine (v0.6.0:
recipes/common.py, and the providers of models with experts)."""

DEPRECATED: Final[Mapping[str, str]] = {
    "moe-enable-deepep": "--moe-flex-dispatcher-backend deepep",
    "moe-deepep-num-sms": "--moe-flex-dispatcher-num-sms",
    "moe-hybridep-num-sms": "--moe-flex-dispatcher-num-sms",
    "moe-layer-recompute": "--recompute-granularity selective --recompute-modules moe",
    "enable-cuda-graph": "--cuda-graph-impl local",
    "external-cuda-graph": "--cuda-graph-impl transformer_engine",
    "cuda-graph-scope": "--cuda-graph-modules",
    "use-custom-fsdp": "--use-megatron-fsdp",
    "hybrid-override-pattern": "--hybrid-layer-pattern",
    "no-weight-decay-cond-type": "--apply-wd-to-qk-layernorm",
    "linear-attention-type": "--experimental-attention-variant",
    "sparse-attention-type": "--experimental-attention-variant",
    "use-mcore-models": "nothing: it is the only kind of model left",
    "use-dist-ckpt": "nothing: it has no effect",
    "dist-ckpt-format": "nothing: it has no effect",
    "ckpt-fully-parallel-save": "nothing: it has no effect",
    "disable-msc": "nothing: it has no effect",
    "no-position-embedding": "--position-embedding-type",
    "use-rotary-position-embeddings": "--position-embedding-type rope",
}
"""Still read by the engine: what to say instead."""

SHORTHANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "--recompute-activations": ("--recompute-granularity", "--recompute-modules"),
    "--moe-layer-recompute": ("--recompute-granularity", "--recompute-modules"),
    "--moe-enable-deepep": ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"),
    "--enable-cuda-graph": ("--cuda-graph-impl",),
    "--external-cuda-graph": ("--cuda-graph-impl",),
    "--use-custom-fsdp": ("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
    "--use-torch-fsdp2": ("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
}
"""Shorthand flags: the flags that they set."""

SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's strategy by what it shards, as stages of ZeRO."""

REMOVED: Final[Mapping[str, str]] = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-activations",
}
"""The engine stops at these: what to say instead."""

ALIASES: Final[Mapping[str, str]] = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "num-moe-experts": "num-experts",
    "bucket-size": "ddp-bucket-size",
    "encoder-seq-length": "seq-length",
    "hybrid-override-pattern": "hybrid-layer-pattern",
    "sequence-length": "seq-length",
    "persistent-save-interval": "save-interval",
    "linear-attention-type": "experimental-attention-variant",
    "sparse-attention-type": "experimental-attention-variant",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
}
"""Names that config files and other builds use for the same settings: those of attention are the
dev branch's of 2025 (core_dev_r0.15.0)."""

CONFUSABLE: Final = frozenset(
    {"decoder-seq-length", "fp4-param-gather", "mtp-hybrid-override-pattern"}
)
"""Flags of the engine that resemble an understood one, and are no misspellings."""

KNOWN: Final = frozenset(
    (*SPELLED.values(), *SIZES.values(), *OTHERS, *ALIASES, *DEPRECATED, *REMOVED)
) - frozenset({"fp8", "fp4"})
"""Every flag that this reader handles."""

UNDERSTOOD: Final = frozenset((*SPELLED.values(), *SIZES.values(), *OTHERS))
"""Flags that the price depends on, or that are compared with the model."""
