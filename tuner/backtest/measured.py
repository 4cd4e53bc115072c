"""Converts a source's throughput into seconds of one optimizer step.

In this order: `step_time_s`; tokens per second and device; TFLOP/s per device; MFU. The last two
need the model's FLOP as the source counts them, by default Megatron-LM's convention: 6 per
parameter of every matrix that a token meets (top-k experts only), attention over the full square,

    FLOP per token = 3 * [2 * matrices + 2 * s * heads * (d_qk + d_v) * layers + 2 * hidden * vocab]

(Narayanan et al. 2021, arXiv:2104.04473, appendix); `is_causal` halves the attention's term.
MFU is of the device's bf16 peak, which is what its sources do whatever they compute in.
"""

from tuner.backtest.rows import Row
from tuner.config.shapes import ModelShape
from tuner.devices.datasheet import Datasheet


def measured_step_s(
    row: Row,
    *,
    shape: ModelShape,
    sequence: float,
    tokens_per_device: float,
    device: Datasheet,
    is_causal: bool,
) -> float:
    """Return the seconds of one step; `tokens_per_device` those of the global batch.

    Raises:
        ValueError: nothing was printed that gives a time.
    """
    if "step_time_s" in row.numbers:
        return row.numbers["step_time_s"]
    if "tokens_per_sec_per_gpu" in row.numbers:
        return tokens_per_device / row.numbers["tokens_per_sec_per_gpu"]
    flop = tokens_per_device * flop_per_token(shape, sequence=sequence, is_causal=is_causal)
    if "tflops_per_gpu" in row.numbers:
        return flop / (row.numbers["tflops_per_gpu"] * 1e12)
    if "mfu" in row.numbers:
        return flop / (row.numbers["mfu"] / 100.0 * device.flop_per_s["bf16"])
    raise ValueError("neither step_time_s, tokens_per_sec_per_gpu, tflops_per_gpu nor mfu is given")


def flop_per_token(shape: ModelShape, *, sequence: float, is_causal: bool) -> float:
    """Return the model's FLOP of forward and backward pass per token."""
    s, heads = float(sequence), float(shape.heads)
    hidden = float(shape.hidden)
    layers = float(shape.dense_layers + shape.moe_layers + shape.mtp_layers)
    matrices = 3.0 if shape.is_gated else 2.0
    dense = matrices * hidden * float(shape.dense_ffn)
    routed = matrices * hidden * float(shape.top_k * shape.moe_ffn + shape.shared_ffn)
    routed += hidden * float(shape.experts)
    of_moe = float(shape.moe_layers + shape.mtp_layers) if shape.experts else 0.0
    forward = 2.0 * (
        layers * _attention_weights(shape)
        + (layers - of_moe) * dense
        + of_moe * routed
        + (1.0 + float(shape.mtp_layers)) * hidden * float(shape.vocab)
    )
    width = heads * float(shape.head_dim + shape.value_dim)
    forward += layers * 2.0 * s * width * (0.5 if is_causal else 1.0)
    return 3.0 * forward


def _attention_weights(shape: ModelShape) -> float:
    hidden, heads = float(shape.hidden), float(shape.heads)
    keys, values = float(shape.head_dim), float(shape.value_dim)
    if not shape.is_mla:
        kv_heads = float(shape.kv_heads)
        return hidden * (heads * keys + kv_heads * (keys + values) + heads * values)
    rope, latent, low = (
        float(shape.rope_dim),
        float(shape.kv_lora_rank),
        float(shape.q_lora_rank),
    )
    queries = hidden * low + low * heads * keys if low else hidden * heads * keys
    up = latent * heads * (keys - rope + values)
    return queries + hidden * (latent + rope) + up + heads * values * hidden
