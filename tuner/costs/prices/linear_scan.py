"""FLOPs and bytes of linear attention in chunks, from its widths.

    H  heads    K  key heads    N  key width    P  value width    Q  tokens of a chunk

Sources: Mamba-2, arXiv 2405.21060, section 6; Gated DeltaNet, arXiv 2412.06464, section 3.3. The
bytes count what the kernels of a scan pass on to each other through memory (mamba_ssm,
ops/triton/ssd_combined.py; flash-linear-attention, fla/ops/gated_delta_rule).
"""

from tuner.config.columns import Numbers


def scan_flop(
    *,
    heads: Numbers,
    key_heads: Numbers,
    key_dim: Numbers,
    value_dim: Numbers,
    chunk: Numbers,
    is_delta: Numbers,
) -> Numbers:
    """FLOPs per token of the forward pass, as the GEMMs of a chunk execute them.

    Mamba-2: scores once per key head; per head scores x values, 2 Q P, and the states of chunks and
    their read-out, 4 N P. Delta rules, per head: scores of keys and of queries, 4 Q N, the inverse
    of a triangle, Q Q / 3, its products with keys and values, 2 Q (N + P), scores x values, 2 Q P,
    and three products with the state, 6 N P.
    """
    state = key_dim * value_dim
    mamba2 = 2.0 * key_heads * chunk * key_dim + heads * (2.0 * chunk * value_dim + 4.0 * state)
    solved = chunk * chunk / 3.0 + 2.0 * chunk * (key_dim + value_dim)
    delta = heads * (4.0 * chunk * key_dim + solved + 2.0 * chunk * value_dim + 6.0 * state)
    return is_delta * delta + (1.0 - is_delta) * mamba2


def scan_bytes(
    *,
    heads: Numbers,
    key_heads: Numbers,
    key_dim: Numbers,
    value_dim: Numbers,
    chunk: Numbers,
    is_delta: Numbers,
) -> Numbers:
    """Bytes per token of the forward pass between the kernels of a scan.

    States of chunks are written, passed on and read in fp32 (16 N P / Q per head), scores written
    and read (8 Q per key head, per head under a delta rule), queries, keys and values read by two
    kernels and outputs written in bf16; delta rules move all of them in two passes more. Those of
    delta rules are not measured, and KDA's decays per channel not counted.
    """
    states = 16.0 * heads * key_dim * value_dim / chunk
    scores = 8.0 * chunk * (is_delta * heads + (1.0 - is_delta) * key_heads)
    values = 2.0 * heads * value_dim
    keys = 2.0 * key_dim * (is_delta * heads + (1.0 - is_delta) * key_heads)
    passes = 2.0 + 2.0 * is_delta
    return states + scores + passes * (values + 2.0 * keys) + values
