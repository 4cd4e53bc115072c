"""Parameters, FLOPs, KV cache and state bytes of a model, by component, in closed form.

    h hidden size      n query heads     g key/value heads   d head width     V vocabulary
    f FFN width        E experts         k experts per token S sequence length
    l latent width of the experts        n_i, d_i heads and head width of an indexer
    s residual streams (hyper-connections)
    z experts without weights, to which a share z / (E + z) of a token's k copies goes

Parameters are those that `transformers` builds for the config: every weight and bias; the LM head
counts in addition to the embedding unless tied. Not included: buffers (the score-correction bias of
DeepSeek-V3 and GLM-4.5), multi-token-prediction layers, and rows that no forward pass reads
(transformers 5.17 to 5.24 give LongCat-Flash's experts without weights gate and up projections).

FLOPs are those of matmuls only: an [m, k] x [k, n] matmul is 2 m k n operations; norms, rotary
embeddings, softmax, biases and element-wise operations (the weighted means of compressors, the
Sinkhorn iterations of hyper-connections) are memory-bound and left out. Attention is
counted as causal: unmasked pairs only. Linear attention counts its recurrence, decays included,
without its short convolution.

Not covered: what a kernel executes (masked blocks, padding, recomputation).
"""

from collections import Counter
from collections.abc import Callable

from profilers.records import Record
from profilers.steps.config import LayerKind
from tuner.spec.linear_attention import linear_parameters, linear_weights, recurrence_flop
from tuner.spec.model import Attention, Layer, Mixer, ModelSpec, Moe, QkNorm
from tuner.spec.sparse_attention import (
    Compressor,
    compressor_parameters,
    compressor_weights,
    indexer_weights,
    mean_entries,
)


class ForwardFlop(Record):
    """FLOPs of one token's forward pass, whole model, by component."""

    attention_projections: float
    attention_core: float
    """Q K^T and P V, averaged over the positions of a sequence; the scores of an indexer."""
    linear_scan: float
    """Updates and read-outs of linear attention's states."""
    dense_ffn: float
    router: float
    routed_experts: float
    """The k experts that the token goes to; of those without weights none."""
    shared_experts: float
    head: float
    hyper_connections: float = 0.0
    """Projections of hyper-connections, and the mixing of residual streams."""

    @property
    def total(self) -> float:
        """Sum of all components."""
        return (
            self.attention_projections
            + self.attention_core
            + self.linear_scan
            + self.dense_ffn
            + self.router
            + self.routed_experts
            + self.shared_experts
            + self.head
            + self.hyper_connections
        )


def embedding_parameters(model: ModelSpec) -> int:
    """Count V h."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """Count V h, or 0 when the head is tied to the embedding."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size


def attention_parameters(model: ModelSpec) -> int:
    """Count one attention block: projections, biases, query/key norms, sinks.

    GQA:  h n d + 2 h g d + n d h, and h n d for an output gate; biases likewise and h; norms
          2 d per head or n d + g d full; sinks n.
    MLA:  queries h n d, or h r + r + r n d through rank r; keys and values h (c + p) + c
          + c n (d_nope + d_v) through rank c with rotary width p; output n d_v h;
          biases r + (c + p) and h; an indexer of n_i heads of d_i: r n_i d_i + h (d_i + n_i), and
          2 d_i of its layer norm.
    Shared KV:  queries h r + r + r n d; the key, which is the value, h d + d; output in G groups
          of rank o: n d o + G o h.
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
        queries = a.num_heads * (2 if a.has_output_gate else 1)
        return hidden * (queries + 2 * a.num_kv_heads) * a.head_dim + output
    if a.kind == "shared_kv":
        rank, queries = a.q_lora_rank or 0, a.num_heads * a.head_dim
        grouped = queries * a.output_rank + a.output_groups * a.output_rank * hidden
        return rank * (hidden + queries) + hidden * a.head_dim + grouped
    queries_in = hidden if a.q_lora_rank is None else a.q_lora_rank
    compression = 0 if a.q_lora_rank is None else hidden * a.q_lora_rank
    queries = compression + queries_in * a.num_heads * a.head_dim
    keys_values = hidden * (a.kv_lora_rank + a.qk_rope_head_dim)
    expansion = a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    indexer = indexer_weights(a.indexer, query_rank=a.q_lora_rank or 0, hidden=hidden)
    return queries + keys_values + expansion + output + indexer


def _qkv_bias(attention: Attention) -> int:
    if not attention.qkv_bias:
        return 0
    if attention.kind == "gqa":
        queries = attention.num_heads * (2 if attention.has_output_gate else 1)
        return (queries + 2 * attention.num_kv_heads) * attention.head_dim
    return (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim


def _attention_norms(attention: Attention) -> int:
    if attention.kind == "mla":
        indexer = 0 if attention.indexer is None else 2 * attention.indexer.head_dim
        return (attention.q_lora_rank or 0) + attention.kv_lora_rank + indexer
    if attention.kind == "shared_kv":
        return (attention.q_lora_rank or 0) + attention.head_dim
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
    """Count one router: h (E + z), and E + z with a bias; the score-correction bias is a buffer."""
    moe = _moe(model)
    return model.hidden_size * moe.router_outputs + (moe.router_outputs if moe.router_bias else 0)


def one_expert_parameters(model: ModelSpec) -> int:
    """Count one routed expert: 3 h f gated, else 2 h f, plus biases; h is a latent width if any."""
    moe = _moe(model)
    return _ffn(
        model,
        width=moe.expert_ffn_size,
        gated=model.ffn_is_gated,
        has_bias=moe.expert_bias,
        inputs=model.expert_hidden,
    )


def latent_parameters(model: ModelSpec) -> int:
    """Count the projections into and out of the experts' latent width: 2 h l."""
    return 2 * model.hidden_size * _moe(model).latent_size


def shared_expert_parameters(model: ModelSpec) -> int:
    """Count the shared experts of one layer: a network of their total width, plus h for a gate."""
    moe = _moe(model)
    gate = model.hidden_size if moe.shared_expert_gate else 0
    if not moe.shared_ffn_size:
        return gate
    ffn = _ffn(model, width=moe.shared_ffn_size, gated=model.ffn_is_gated, has_bias=model.ffn_bias)
    return ffn + gate


def layer_norm_parameters(model: ModelSpec) -> int:
    """Count the two norms of a layer with mixer and network, 2 h; others belong to attention."""
    return 2 * model.hidden_size


def final_norm_parameters(model: ModelSpec) -> int:
    """Count the norm after the last layer, h."""
    return model.hidden_size


def connection_weights(model: ModelSpec) -> int:
    """Count the matrix of a hyper-connection, (2 + s) s x s h; 0 with a plain residual.

    From all streams it computes a weight of each for the input, one for the output, and the s x s
    matrix that mixes them (class DeepseekV4HyperConnection of transformers 5.24).
    """
    streams = model.residual_streams
    return 0 if streams == 1 else (2 + streams) * streams * streams * model.hidden_size


def connection_parameters(model: ModelSpec) -> int:
    """Count a hyper-connection: its matrix, as many biases as outputs, 3 scales."""
    streams = model.residual_streams
    return 0 if streams == 1 else connection_weights(model) + (2 + streams) * streams + 3


def stream_head_parameters(model: ModelSpec) -> int:
    """Count what joins the streams before the final norm: s x s h, s biases, a scale."""
    streams = model.residual_streams
    return 0 if streams == 1 else streams * streams * model.hidden_size + streams + 1


def mixer_parameters(
    model: ModelSpec,
    mixer: Mixer,
    compressor: Compressor | None = None,
    *,
    shares_index: bool = False,
) -> int:
    """Count a token mixer, the norm before it and its hyper-connection."""
    if mixer is Mixer.NONE:
        return 0
    around = model.hidden_size + connection_parameters(model)
    if mixer is Mixer.ATTENTION or model.linear is None:
        extra = compressor_parameters(compressor, **_compressor_sizes(model))
        if shares_index:
            extra -= _indexer_parameters(model)
        return attention_parameters(model) + extra + around
    return linear_parameters(model.linear, hidden=model.hidden_size) + around


def network_parameters(model: ModelSpec, kind: LayerKind) -> int:
    """Count the network of a layer, all its experts included, and what is around it likewise."""
    if kind is LayerKind.NONE:
        return 0
    around = model.hidden_size + connection_parameters(model)
    if kind is LayerKind.DENSE:
        return ffn_parameters(model) + around
    experts = _moe(model).num_experts * one_expert_parameters(model)
    shared = shared_expert_parameters(model) + latent_parameters(model)
    return router_parameters(model) + experts + shared + around


def layer_parameters(model: ModelSpec, layer: int) -> int:
    """Count one whole layer, the first being 0."""
    return _one_layer(model, model.each_layer[layer])


def num_parameters(model: ModelSpec) -> int:
    """Count the model as `transformers` builds it, without multi-token prediction."""
    layers = sum(
        count * _one_layer(model, layer) for layer, count in Counter(model.each_layer).items()
    )
    rest = embedding_parameters(model) + head_parameters(model) + final_norm_parameters(model)
    return layers + rest + stream_head_parameters(model)


def active_parameters(model: ModelSpec) -> int:
    """Count active parameters: all but those of the experts that a token is not routed to.

    The embedding counts in full, as in model cards. With experts without weights it is the mean
    over tokens.
    """
    if model.moe is None:
        return num_parameters(model)
    idle = model.moe.num_experts - model.moe.computed_top_k
    return num_parameters(model) - round(model.num_moe_layers * idle * one_expert_parameters(model))


def attended_tokens(*, sequence_length: float, window: int | None) -> float:
    """Average over positions of the tokens that a query attends to, itself included.

    Without window (S + 1) / 2; with window W < S: (W (W + 1) / 2 + (S - W) W) / S.
    """
    if window is None or window >= sequence_length:
        return (sequence_length + 1) / 2
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length


def attention_core_flop_per_token(
    model: ModelSpec,
    *,
    sequence_length: float,
    windowed: bool = False,
    compressor: Compressor | None = None,
    shares_index: bool = False,
) -> float:
    """FLOPs of Q K^T and P V in one layer: 2 n (d + d_v) x attended tokens.

    MLA is counted in its expanded form, as in training. An indexer adds 2 n_i d_i for every earlier
    token. Entries of a compressor count as tokens, beside those of the window.
    """
    attention = model.attention
    window = attention.sliding_window if windowed else None
    scores = 0.0
    if windowed and attention.window_is_chunk and window is not None:
        sequence_length, window = min(sequence_length, window), None
    if attention.indexer is not None:
        indexer = attention.indexer
        pairs = attended_tokens(sequence_length=sequence_length, window=None)
        scores = 0.0 if shares_index else 2 * indexer.num_heads * indexer.head_dim * pairs
        window = indexer.top_k
    tokens = attended_tokens(sequence_length=sequence_length, window=window)
    if compressor is not None:
        tokens += compressor.mean_kept(sequence_length)
        if compressor.indexer is not None:
            indexer, every = compressor.indexer, float("inf")
            pairs = mean_entries(sequence_length, ratio=compressor.ratio, limit=every)
            scores = 2 * indexer.num_heads * indexer.head_dim * pairs
    width = attention.head_dim + attention.value_head_dim
    return 2 * attention.num_heads * width * tokens + scores


def forward_flop_per_token(model: ModelSpec, *, sequence_length: float) -> ForwardFlop:
    """FLOPs of one token's forward pass, by component; see the module for what counts."""
    moe, hidden, attention = model.moe, model.hidden_size, model.attention
    dense_layers = model.layers.count(LayerKind.DENSE)
    matrices = 3 if model.ffn_is_gated else 2
    core, projections, scan = 0.0, model.num_attention_layers * attention_weights(model), 0.0
    for layer, count in Counter(model.each_layer).items():
        if layer.mixer is Mixer.ATTENTION:
            projections += count * compressor_weights(layer.compressor, **_compressor_sizes(model))
            core += count * attention_core_flop_per_token(
                model,
                sequence_length=sequence_length,
                windowed=layer.is_windowed,
                compressor=layer.compressor,
                shares_index=layer.shares_index,
            )
            projections -= (
                count
                * layer.shares_index
                * indexer_weights(
                    attention.indexer, query_rank=attention.q_lora_rank or 0, hidden=hidden
                )
            )
    if model.linear is not None:
        projections += model.num_linear_layers * linear_weights(model.linear, hidden=hidden)
        scan = model.num_linear_layers * recurrence_flop(model.linear)

    def in_moe_layers(weights: Callable[[Moe], float]) -> float:
        return 0.0 if moe is None else 2.0 * model.num_moe_layers * weights(moe)

    return ForwardFlop(
        attention_projections=2.0 * projections,
        attention_core=core,
        linear_scan=scan,
        dense_ffn=2.0 * dense_layers * matrices * hidden * model.dense_ffn_size,
        router=in_moe_layers(lambda m: hidden * m.router_outputs),
        routed_experts=in_moe_layers(
            lambda m: (
                m.computed_top_k * matrices * model.expert_hidden * m.expert_ffn_size
                + 2 * hidden * m.latent_size
            )
        ),
        shared_experts=in_moe_layers(
            lambda m: (
                matrices * hidden * m.shared_ffn_size + (hidden if m.shared_expert_gate else 0)
            )
        ),
        head=2.0 * hidden * model.vocab_size,
        hyper_connections=_connections_flop(model),
    )


def _connections_flop(model: ModelSpec) -> float:
    """Count the projections and mixing of all hyper-connections, and what joins the streams.

    Mixing is s h multiply-adds into the input, as many of the output, and s s h of the streams.
    """
    streams, hidden = model.residual_streams, model.hidden_size
    if streams == 1:
        return 0.0
    connections = sum(mixer is not Mixer.NONE for mixer in model.mixer_by_layer)
    connections += sum(kind is not LayerKind.NONE for kind in model.layers)
    mixing = (2 * streams + streams**2) * hidden
    joined = streams * streams * hidden + streams * hidden
    return 2.0 * (connections * (connection_weights(model) + mixing) + joined)


def training_flop_per_token(
    model: ModelSpec, *, sequence_length: float, mtp_layers: int = 0
) -> float:
    """FLOPs of forward and backward pass of one token: three times the forward pass.

    The backward pass has two matmuls for each one forward. These are model FLOPs: recomputation and
    masked attention do not count, the LM head and the k routed experts do. Megatron's figure
    differs by counting S / 2 attended tokens; the 6 N rule leaves out core attention and counts the
    embedding.

    Args:
        model: without multi-token prediction.
        sequence_length: in tokens.
        mtp_layers: multi-token-prediction layers that are trained. Each has attention and the
            last layer's network, joins two hidden states, and has the head applied once more.
    """
    extended = with_mtp(model, mtp_layers)
    hidden = model.hidden_size
    joined = mtp_layers * 6.0 * (2.0 * hidden * hidden + hidden * model.vocab_size)
    return 3.0 * forward_flop_per_token(extended, sequence_length=sequence_length).total + joined


def with_mtp(model: ModelSpec, mtp_layers: int) -> ModelSpec:
    """Append multi-token-prediction layers: attention and the last layer's network.

    They have no compressor (the last of the published `compress_ratios` of DeepSeek-V4 is 0), and
    an indexer of their own (vLLM 0.32.0, models/deepseek_v2.py, `is_mtp_layer`).
    """
    if not mtp_layers:
        return model
    return model.model_copy(
        update={
            "num_layers": model.num_layers + mtp_layers,
            "layers": model.layers + (model.layers[-1],) * mtp_layers,
            "mixers": model.mixers and model.mixers + (Mixer.ATTENTION,) * mtp_layers,
            "windowed": model.windowed
            + (model.windowed[-1] and model.mixer_by_layer[-1] is Mixer.ATTENTION,) * mtp_layers,
            "compress_ratios": model.compress_ratios and model.compress_ratios + (0,) * mtp_layers,
            "shared_indexers": model.shared_indexers
            and model.shared_indexers + (False,) * mtp_layers,
        }
    )


def _indexer_parameters(model: ModelSpec) -> int:
    """Count an indexer over tokens: its matrices, and the weights and biases of its key's norm."""
    indexer = model.attention.indexer
    rank = model.attention.q_lora_rank or 0
    norm = 0 if indexer is None else 2 * indexer.head_dim
    return norm + indexer_weights(indexer, query_rank=rank, hidden=model.hidden_size)


def kv_bytes_per_token(model: ModelSpec, *, bytes_per_element: float) -> float:
    """Bytes that one token adds to the KV cache of the whole model.

    GQA: 2 g d per layer. MLA: the latent and the rotary key, c + p per layer, and d_i of an
    indexer. Sliding-window layers count in full, although an engine may evict tokens outside the
    window; layers with linear attention add nothing. Shared KV: d + d_i per entry of a compressor;
    windows of a fixed number of tokens are left out.
    """
    attention = model.attention
    if attention.kind == "shared_kv":
        return bytes_per_element * sum(
            (attention.head_dim + (compressor.indexer.head_dim if compressor.indexer else 0))
            / compressor.ratio
            for compressor in model.compressor_by_layer
            if compressor is not None
        )
    if attention.kind == "mla":
        elements = attention.kv_lora_rank + attention.qk_rope_head_dim
        if attention.indexer is not None:
            keys = model.num_indexers * attention.indexer.head_dim
            return (model.num_attention_layers * elements + keys) * bytes_per_element
    else:
        elements = 2 * attention.num_kv_heads * attention.head_dim
    return model.num_attention_layers * elements * bytes_per_element


def state_bytes_per_sequence(
    model: ModelSpec, *, state_bytes: float = 4.0, conv_bytes: float = 2.0
) -> float:
    """Bytes that the layers keep for one sequence, whatever its length.

    Per layer of linear attention H N P elements of the states, fp32 by the engines' defaults, and
    the last inputs of the convolution; of compressors the open entries, likewise in fp32.
    """
    total = 0.0
    if model.linear is not None:
        linear = model.linear
        layer = linear.state_elements * state_bytes + linear.conv_state_elements * conv_bytes
        total += model.num_linear_layers * layer
    return total + state_bytes * sum(
        compressor.state_elements(model.attention.head_dim)
        for compressor in model.compressor_by_layer
        if compressor is not None
    )


def _one_layer(model: ModelSpec, layer: Layer) -> int:
    mixer = mixer_parameters(model, layer.mixer, layer.compressor, shares_index=layer.shares_index)
    return mixer + network_parameters(model, layer.network)


def _compressor_sizes(model: ModelSpec) -> dict[str, int]:
    attention = model.attention
    return {
        "head_dim": attention.head_dim,
        "query_rank": attention.q_lora_rank or 0,
        "hidden": model.hidden_size,
    }


def _ffn(
    model: ModelSpec, *, width: int, gated: bool, has_bias: bool, inputs: int | None = None
) -> int:
    outer = inputs or model.hidden_size
    inner = 2 if gated else 1
    weights = (inner + 1) * outer * width
    return weights + (inner * width + outer if has_bias else 0)


def _moe(model: ModelSpec) -> Moe:
    if model.moe is None:
        raise ValueError(f"{model.name} has no experts")
    return model.moe
