"""Training configurations as columns of the analytic formulas.

Every field is a number or an array with one entry per configuration, combined by numpy's
broadcasting. Yes/no fields are 0.0 and 1.0.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = float | npt.NDArray[np.float64]
"""A number, or one per column."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategies:
    """Execution of a step; world = TP * CP * DP * PP = ETP * EP * EDP * PP."""

    sequence: Numbers
    """Tokens of one sequence."""
    micro_batch: Numbers
    """Sequences of one micro-batch on one data-parallel replica."""
    num_microbatches: Numbers
    """Micro-batches of a step on one pipeline."""
    document: Numbers = 0.0
    """Tokens of the document that a token of a packed row is in, mean, at which causal attention
    computes as many pairs; 0: a sequence is one document."""
    attended: Numbers = 0.0
    """Keys that a query of a packed row attends to, mean over tokens and attention layers; 0: a
    sequence is one document."""
    tensor: Numbers = 1.0
    context: Numbers = 1.0
    pipeline: Numbers = 1.0
    virtual_pipeline: Numbers = 1.0
    data: Numbers = 1.0
    expert: Numbers = 1.0
    expert_tensor: Numbers = 1.0
    sequence_parallel: Numbers = 1.0
    zero_stage: Numbers = 1.0
    """0 replicates the optimizer state, 1 shards it, 2 gradients too, 3 parameters too (FSDP)."""
    shard_ranks: Numbers = 0.0
    """HSDP: ranks that state is sharded over; 0: all of them."""
    element_bytes: Numbers = 2.0
    """Bytes of one number of an activation."""
    dispatch_bytes: Numbers = 0.0
    """Bytes of one number of an activation that dispatch sends to the experts, and of its gradient;
    0: `element_bytes`."""
    logit_bytes: Numbers = 0.0
    """Bytes of a logit at the head's backward pass; 0: as the software's memory constants say."""
    linear_bytes: Numbers = 0.0
    """Bytes of one number of an input that a linear layer keeps for its weight gradient: 1 where
    GEMMs run in fp8; 0: `element_bytes`."""
    gradient_bytes: Numbers = 4.0
    """Bytes of the main gradient of a parameter."""
    weight_bytes: Numbers = 2.0
    """Bytes of a parameter as the layers read it, low-precision copies included."""
    master_bytes: Numbers = 0.0
    """Bytes of the parameter that the optimizer updates; 0: as the software has it."""
    moments_bytes: Numbers = 0.0
    """Bytes of Adam's two moments of a parameter; 0: as the software has them."""
    updates_weights: Numbers = 0.0
    """1 where the optimizer updates the very parameters that layers read: fp32 ones."""
    reference_bytes: Numbers = 0.0
    """Bytes of a parameter of a frozen model of the same shape beside the trained one; 0: none."""
    reference_forwards: Numbers = 0.0
    """Forward passes without gradients beside a micro-batch's own."""
    recompute_full: Numbers = 0.0
    """Share of every stage's layers that are fully recomputed."""
    recompute_by_op: Numbers = 0.0
    """Torchtitan's selective checkpointing by operation: attention and every second GEMM of each
    layer are kept, the rest is recomputed."""
    buffered_ratio: Numbers = 0.0
    """Share of all copies that a rank could receive, which its buffers hold; 0: those that come."""
    opaque_gemm_ratio: Numbers = 0.0
    """Share of the layers whose GEMMs are operations that this does not know."""
    recompute_core_attention: Numbers = 0.0
    recompute_mlp: Numbers = 0.0
    """1 where dense feed-forward networks are recomputed."""
    recompute_moe: Numbers = 0.0
    """1 where dispatch, experts and combine are recomputed."""
    recompute_moe_act: Numbers = 0.0
    """1 where the activation function inside the experts is recomputed."""
    recompute_layernorm: Numbers = 0.0
    recompute_mla_up_proj: Numbers = 0.0
    recompute_shared_experts: Numbers = 0.0
    chunks: Numbers = 1.0
    """MemFine: pieces of a MoE layer's tokens that are recomputed one by one."""
    has_flash_attention: Numbers = 1.0
    dropout: Numbers = 0.0
    """Masks are kept (GPT-3 style training)."""
    a2a_overlap: Numbers = 0.0
    """Dispatch and combine of one micro-batch run beside another's work."""
    is_deepep: Numbers = 0.0
    """Dispatcher DeepEP: sends each token once per node rather than once per expert."""
    is_hybridep: Numbers = 0.0
    """Dispatcher HybridEP, the same over a rack-wide scale-up domain."""
    overlap_gradients: Numbers = 1.0
    """Data-parallel gradient reduction overlaps the backward pass."""
    bucket_parameters: Numbers = 0.0
    """Parameters of one gradient bucket where the reduction overlaps the backward pass; 0: the
    engine's default."""
    overlap_parameters: Numbers = 1.0
    """The sharded optimizer's parameter all-gather overlaps the forward pass."""
    overlap_tensor: Numbers = 0.0
    """Collectives of tensor parallelism overlap its GEMMs (userbuffers)."""
    partial_graph: Numbers = 0.0
    """CUDA graphs of parts of a layer."""
    full_graph: Numbers = 0.0
    """One CUDA graph of a whole step."""
    fused_grouped_mlp: Numbers = 0.0
    """One kernel for the experts' grouped GEMMs and activation."""
    embedding_loss_as_layers: Numbers = 0.0
    """Embedding and loss count as layers when stages are balanced."""
    zero_bubble: Numbers = 0.0
    """Weight gradients are computed separately and fill the bubble."""
    optimizer_offload: Numbers = 0.0
    """Share of the optimizer state that lives in host memory."""
    activation_offload: Numbers = 0.0
    """Share of the saved activations that lives in host memory."""
    parameter_offload: Numbers = 0.0
    """Share of ZeRO 3's shards of parameters, and of their gradients, that lives in host memory."""
    expert_imbalance: Numbers = 1.0
    """Token copies on the most-loaded expert rank over the mean, averaged over layers and
    passes."""
    expert_imbalance_p99: Numbers = 1.0
    """P99 of `expert_imbalance` over passes, on the layer where it is largest; sizes buffers."""
    sequential_experts: Numbers = 0.0
    """1 where local experts run one after the other rather than as grouped GEMMs."""
    adapter_rank: Numbers = 0.0
    """Rank of low-rank adapters beside frozen weights; 0: all weights are trained."""
    adapter_bytes: Numbers = 2.0
    """Bytes of an adapter's parameter; those of PEFT are fp32."""
    fused_qkv_adapters: Numbers = 0.0
    """Queries, keys and values share one adapter (Megatron's linear_qkv, torchtitan's wqkv)."""
    fused_gate_adapters: Numbers = 0.0
    """Gate and up share one adapter (Megatron's linear_fc1)."""
    adapts_q: Numbers = 0.0
    """1 where the projection of queries, for MLA their up-projection, has an adapter."""
    adapts_k: Numbers = 0.0
    """1 where the projection of keys, for MLA the up-projection of keys and values, is adapted."""
    adapts_v: Numbers = 0.0
    adapts_o: Numbers = 0.0
    adapts_q_down: Numbers = 0.0
    """MLA: 1 where the down-projection of queries has an adapter."""
    adapts_kv_down: Numbers = 0.0
    """MLA: 1 where the down-projection of keys and values has an adapter."""
    linear_adapters: Numbers = 0.0
    """Adapters of a linear-attention layer that read the hidden state."""
    linear_adapter_outputs: Numbers = 0.0
    """Outputs of the matrices of `linear_adapters` together."""
    linear_rank_adapters: Numbers = 0.0
    """Adapters of a linear-attention layer that read a low rank (KDA's decay and gate)."""
    linear_rank_adapter_outputs: Numbers = 0.0
    """Outputs of the matrices of `linear_rank_adapters` together."""
    adapts_linear_out: Numbers = 0.0
    adapts_gate: Numbers = 0.0
    """1 where gate_proj of dense and shared networks has an adapter."""
    adapts_up: Numbers = 0.0
    adapts_down: Numbers = 0.0
    adapts_experts: Numbers = 0.0
    frozen_bytes: Numbers = 0.0
    """Bytes of a frozen parameter in linear layers, routed experts excepted; 0: `weight_bytes`."""
    unquantised_bytes: Numbers = 0.0
    """Bytes of any other frozen parameter; 0: `weight_bytes`."""
    frozen_master_bytes: Numbers = 0.0
    """Bytes of the original of a frozen parameter, sharded as a master, from which the one that
    layers read is cast (torchtitan's `training.dtype`); 0: there is none."""
    eager_modules: Numbers = 0.0
    """Transformers' modules in eager mode: what they launch and what autograd keeps
    (tuner/costs/train/eager_activations.py, eager_blocks.py)."""
    autocast: Numbers = 0.0
    """1 where the forward pass of eager modules runs under bf16 autocast."""

    @property
    def is_full(self) -> Numbers:
        """1 where all weights are trained, 0 where only adapters are."""
        return np.where(np.greater(self.adapter_rank, 0.0), 0.0, 1.0)

    @property
    def world(self) -> Numbers:
        """Devices in all."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def stage_ranks(self) -> Numbers:
        """Devices that share the layers of one stage."""
        return self.tensor * self.context * self.data

    @property
    def expert_data(self) -> Numbers:
        """Devices of a stage that hold the same part of the same experts."""
        return self.stage_ranks / (self.expert * self.expert_tensor)

    @property
    def tokens(self) -> Numbers:
        """Tokens of one micro-batch on the ranks of one tensor-parallel group together."""
        return self.micro_batch * self.sequence / self.context
