"""FLOPs and bytes of linear attention in chunks, from its widths.

    H  heads    K  key heads    N  key width    P  value width    Q  tokens of a chunk

Sources: Mamba-2, arXiv 2405.21060, section 6; Gated DeltaNet, arXiv 2412.06464, section 3.3. The
bytes count what the kernels of a scan pass on to each other through memory (mamba_ssm,
ops/triton/ssd_combined.py; flash-linear-attention 0.6, fla/ops/gated_delta_rule, fla/ops/kda and
fla/ops/common).
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
    decays_channels: Numbers,
) -> Numbers:
    """FLOPs per token of the forward pass, as the GEMMs of a chunk execute them.

    Mamba-2: scores once per key head; per head scores x values, 2 Q P, and the states of chunks and
    their read-out, 4 N P. Delta rules, per head: scores of keys and of queries, 4 Q N, the inverse
    of a triangle, Q Q / 3, its products with keys and values, 2 Q (N + P), scores x values, 2 Q P,
    and three products with the state, 6 N P. A decay of every channel (KDA) scales the operands of
    these GEMMs and adds none: `decays_channels` changes bytes alone (`scan_bytes`).
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
    decays_channels: Numbers,
) -> Numbers:
    """Bytes per token of the forward pass between the kernels of a scan.

    Mamba-2: states of chunks are written, passed on and read in fp32 (16 N P / Q per head), scores
    written and read (8 Q per key head), queries, keys and values read by two kernels and outputs
    written in bf16.

    Delta rules, per head in bf16 unless said: queries and keys are normalised (8 N); keys read by
    four kernels, queries by one, products of keys written and read (14 N); values, corrected twice
    on their way to outputs (12 P); scores and their inverse cleared, written and read once (6 Q);
    states written and read once (4 N P / Q). KDA: decays of every channel are read, added up in
    fp32 and read by four kernels (22 N); scores are computed by two kernels that read queries and
    keys, and decayed keys are written and read (20 N instead of 14 N); a second matrix of scores,
    and its diagonal blocks in fp32 (6 Q).

    On an H200 with 32,768 tokens `DatasheetPrices` gives Mamba-2 1.02 of the measured time, the
    gated delta rule 1.01; KDA, whose measurement computed decays by four more kernels of PyTorch
    (30 N forward, 26 N backward, added here), 0.87 forward and 0.77 backward. Not counted: KDA's
    blocks on the diagonal, one exponential per pair of tokens and channel outside the matrix units.
    """
    states = 16.0 * heads * key_dim * value_dim / chunk
    values, keys = 2.0 * heads * value_dim, 2.0 * key_heads * key_dim
    mamba2 = states + 8.0 * chunk * key_heads + 2.0 * (values + 2.0 * keys) + values
    delta = 22.0 * key_dim + 12.0 * value_dim + 6.0 * chunk
    delta = delta + decays_channels * (28.0 * key_dim + 6.0 * chunk)
    delta = heads * (delta + 4.0 * key_dim * value_dim / chunk)
    return is_delta * delta + (1.0 - is_delta) * mamba2
