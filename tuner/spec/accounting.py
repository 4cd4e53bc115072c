"""Parameters, FLOPs and KV cache bytes of a model, by component, in closed form.

    h hidden size      n query heads     g key/value heads   d head width     V vocabulary
    f FFN width        E experts         k experts per token S sequence length

Parameters are those that `transformers` builds for the config: every weight and bias; the LM head
counts in addition to the embedding unless tied. Not included: buffers (the score-correction bias of
DeepSeek-V3 and GLM-4.5) and multi-token-prediction layers.

FLOPs are those of matmuls only: an [m, k] x [k, n] matmul is 2 m k n operations; norms, rotary
embeddings, softmax, biases and element-wise operations are memory-bound and left out. Attention is
counted as causal: unmasked pairs only.

Not covered: what a kernel executes (masked blocks, padding, recomputation).
"""

from collections.abc import Callable

from profilers.records import Record
from profilers.steps.config import LayerKind
from tuner.spec.model import Attention, ModelSpec, Moe, QkNorm


class ForwardFlop(Record):
    """FLOPs of one token's forward pass, whole model, by component."""

    attention_projections: float
    attention_core: float
    """Q K^T and P V, averaged over the positions of a sequence."""
    dense_ffn: float
    router: float
    routed_experts: float
    """The k experts that the token goes to."""
    shared_experts: float
    head: float

    @property
    def total(self) -> float:
        """Sum of all components."""
        return (
            self.attention_projections
            + self.attention_core
            + self.dense_ffn
            + self.router
            + self.routed_experts
            + self.shared_experts
            + self.head
        )


def embedding_parameters(model: ModelSpec) -> int:
    """Count V h."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """Count V h, or 0 when the head is tied to the embedding."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size


def attention_parameters(model: ModelSpec) -> int:
    """Count one attention block: projections, biases, query/key norms, sinks.

    GQA:  h n d + 2 h g d + n d h; biases n d + 2 g d and h; norms 2 d per head or n d + g d full;
          sinks n.
    MLA:  queries h n d, or h r + r + r n d through rank r; keys and values h (c + p) + c
          + c n (d_nope + d_v) through rank c with rotary width p; output n d_v h;
          biases r + (c + p) and h.
    """
    attention, hidden = model.attention, model.hidden_size
    biases = _qkv_bias(attention) + (hidden if attention.output_bias else 0)
    norms = _attention_norms(attention)
    sinks = attention.num_heads if attention.has_sinks else 0
    return attention_weights(model) + biases + norms + sinks


def attention_weights(model: ModelSpec) -> int:
    """Count the matrices of one attention block, without biases, norms and sinks."""
    a, hidden = model.attention, model.hidden_size
    output = a.num_heads * a.value_head_dim * hidden
    if a.kind == "gqa":
        return hidden * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim + output
    queries_in = hidden if a.q_lora_rank is None else a.q_lora_rank
    compression = 0 if a.q_lora_rank is None else hidden * a.q_lora_rank
    queries = compression + queries_in * a.num_heads * a.head_dim
    keys_values = hidden * (a.kv_lora_rank + a.qk_rope_head_dim)
    expansion = a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    return queries + keys_values + expansion + output


def _qkv_bias(attention: Attention) -> int:
    if not attention.qkv_bias:
        return 0
    if attention.kind == "gqa":
        return (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim


def _attention_norms(attention: Attention) -> int:
    if attention.kind == "mla":
        return (attention.q_lora_rank or 0) + attention.kv_lora_rank
    if attention.qk_norm is QkNorm.HEAD:
        return 2 * attention.head_dim
    if attention.qk_norm is QkNorm.FULL:
        return (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    return 0


def ffn_parameters(model: ModelSpec) -> int:
    """Count the feed-forward network of a dense layer: 3 h f gated, else 2 h f, plus biases."""
    return _ffn(
        model, width=model.dense_ffn_size, gated=model.ffn_is_gated, has_bias=model.ffn_bias
    )


def router_parameters(model: ModelSpec) -> int:
    """Count one router: h E, plus E with a bias; the score-correction bias is a buffer."""
    moe = _moe(model)
    return model.hidden_size * moe.num_experts + (moe.num_experts if moe.router_bias else 0)


def one_expert_parameters(model: ModelSpec) -> int:
    """Count one routed expert: 3 h f, plus biases 2 f + h."""
    moe = _moe(model)
    return _ffn(model, width=moe.expert_ffn_size, gated=True, has_bias=moe.expert_bias)


def shared_expert_parameters(model: ModelSpec) -> int:
    """Count the shared experts of one layer: 3 h f over their total width, plus h for a gate."""
    moe = _moe(model)
    gate = model.hidden_size if moe.shared_expert_gate else 0
    if not moe.shared_ffn_size:
        return gate
    ffn = _ffn(model, width=moe.shared_ffn_size, gated=True, has_bias=model.ffn_bias)
    return ffn + gate


def layer_norm_parameters(model: ModelSpec) -> int:
    """Count the two norms of one layer, 2 h; those inside attention belong to attention."""
    return 2 * model.hidden_size


def final_norm_parameters(model: ModelSpec) -> int:
    """Count the norm after the last layer, h."""
    return model.hidden_size


def layer_parameters(model: ModelSpec, kind: LayerKind) -> int:
    """Count one whole layer of a kind, all its experts included."""
    shared = attention_parameters(model) + layer_norm_parameters(model)
    if kind is LayerKind.DENSE:
        return shared + ffn_parameters(model)
    experts = _moe(model).num_experts * one_expert_parameters(model)
    return shared + router_parameters(model) + experts + shared_expert_parameters(model)


def num_parameters(model: ModelSpec) -> int:
    """Count the model as `transformers` builds it, without multi-token prediction."""
    layers = sum(layer_parameters(model, kind) for kind in model.layers)
    other = embedding_parameters(model) + head_parameters(model) + final_norm_parameters(model)
    return layers + other


def active_parameters(model: ModelSpec) -> int:
    """Count active parameters: all but those of the experts that a token is not routed to.

    The embedding counts in full, as in model cards.
    """
    if model.moe is None:
        return num_parameters(model)
    idle = model.moe.num_experts - model.moe.top_k
    return num_parameters(model) - model.num_moe_layers * idle * one_expert_parameters(model)


def attended_tokens(*, sequence_length: int, window: int | None) -> float:
    """Average over positions of the tokens that a query attends to, itself included.

    Without window (S + 1) / 2; with window W < S: (W (W + 1) / 2 + (S - W) W) / S.
    """
    if window is None or window >= sequence_length:
        return (sequence_length + 1) / 2
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length


def attention_core_flop_per_token(
    model: ModelSpec, *, sequence_length: int, windowed: bool = False
) -> float:
    """FLOPs of Q K^T and P V in one layer: 2 n (d + d_v) x attended tokens.

    MLA is counted in its expanded form, as in training.
    """
    attention = model.attention
    window = attention.sliding_window if windowed else None
    tokens = attended_tokens(sequence_length=sequence_length, window=window)
    return 2 * attention.num_heads * (attention.head_dim + attention.value_head_dim) * tokens


def forward_flop_per_token(model: ModelSpec, *, sequence_length: int) -> ForwardFlop:
    """FLOPs of one token's forward pass, by component; see the module for what counts."""
    moe, hidden = model.moe, model.hidden_size
    dense_layers = model.num_layers - model.num_moe_layers
    dense_matrices = 3 if model.ffn_is_gated else 2
    core = sum(
        attention_core_flop_per_token(model, sequence_length=sequence_length, windowed=windowed)
        for windowed in model.windowed
    )

    def in_moe_layers(weights: Callable[[Moe], int]) -> float:
        return 0.0 if moe is None else 2.0 * model.num_moe_layers * weights(moe)

    return ForwardFlop(
        attention_projections=2.0 * model.num_layers * attention_weights(model),
        attention_core=core,
        dense_ffn=2.0 * dense_layers * dense_matrices * hidden * model.dense_ffn_size,
        router=in_moe_layers(lambda m: hidden * m.num_experts),
        routed_experts=in_moe_layers(lambda m: m.top_k * 3 * hidden * m.expert_ffn_size),
        shared_experts=in_moe_layers(
            lambda m: 3 * hidden * m.shared_ffn_size + (hidden if m.shared_expert_gate else 0)
        ),
        head=2.0 * hidden * model.vocab_size,
    )


def training_flop_per_token(
    model: ModelSpec, *, sequence_length: int, mtp_layers: int = 0
) -> float:
    """FLOPs of forward and backward pass of one token: three times the forward pass.

    The backward pass has two matmuls for each one forward. These are model FLOPs: recomputation and
    masked attention do not count, the LM head and the k routed experts do. Megatron's figure
    differs by counting S / 2 attended tokens; the 6 N rule leaves out core attention and counts the
    embedding.

    Args:
        model: without multi-token prediction.
        sequence_length: in tokens.
        mtp_layers: multi-token-prediction layers that are trained. Each is like the last layer,
            joins two hidden states, and has the head applied once more.
    """
    extended = with_mtp(model, mtp_layers)
    hidden = model.hidden_size
    joined = mtp_layers * 6.0 * (2.0 * hidden * hidden + hidden * model.vocab_size)
    return 3.0 * forward_flop_per_token(extended, sequence_length=sequence_length).total + joined


def with_mtp(model: ModelSpec, mtp_layers: int) -> ModelSpec:
    """Append multi-token-prediction layers, which are like the last layer."""
    if not mtp_layers:
        return model
    return model.model_copy(
        update={
            "num_layers": model.num_layers + mtp_layers,
            "layers": model.layers + (model.layers[-1],) * mtp_layers,
            "windowed": model.windowed + (model.windowed[-1],) * mtp_layers,
        }
    )


def kv_bytes_per_token(model: ModelSpec, *, bytes_per_element: float) -> float:
    """Bytes that one token adds to the KV cache of the whole model.

    GQA: 2 g d per layer. MLA: the latent and the rotary key, c + p per layer. Sliding-window layers
    count in full, although an engine may evict tokens outside the window.
    """
    attention = model.attention
    if attention.kind == "mla":
        elements = attention.kv_lora_rank + attention.qk_rope_head_dim
    else:
        elements = 2 * attention.num_kv_heads * attention.head_dim
    return model.num_layers * elements * bytes_per_element


def _ffn(model: ModelSpec, *, width: int, gated: bool, has_bias: bool) -> int:
    inner = 2 if gated else 1
    weights = (inner + 1) * model.hidden_size * width
    return weights + (inner * width + model.hidden_size if has_bias else 0)


def _moe(model: ModelSpec) -> Moe:
    if model.moe is None:
        raise ValueError(f"{model.name} has no experts")
    return model.moe
