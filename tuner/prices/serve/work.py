"""Operations and bytes of what a serving step runs, for its price by the datasheet.

Letters: Q query points.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tuner.prices.linear_scan import scan_bytes, scan_flop
from tuner.prices.ops import Op
from tuner.prices.serve.activated_experts import most_loaded_activated
from tuner.prices.serve.curves import Floats

Work = tuple[Floats, Floats]
"""Floating-point operations, and bytes from and to memory."""

BYTES: Final[Mapping[str, float]] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "nvfp4": 0.5625,
    "int4_wo": 0.5625,
    "mxfp4": 0.53125,
}
"""Bytes of one weight by format. nvfp4: half a byte and an fp8 scale per 16 (Pretraining LLMs with
NVFP4, arXiv:2509.25149); int4_wo: half a byte and a bf16 scale per 32 (compressed-tensors),
`Formats.int4_bytes` where a checkpoint groups otherwise; mxfp4: half a byte and a shared exponent
per 32 (OCP Microscaling Formats 1.0)."""

STATE_BYTES: Final = 4.0
"""Bytes of an element of a state, fp32 by most engines' defaults (vLLM 0.33.0,
model_executor/models/config.py, which takes `mamba_ssm_cache_dtype` or `mamba_ssm_dtype` of a
config.json for Nemotron-H and Qwen3.5, float32 in all published ones, and
layers/mamba/mamba_utils.py, `kda_state_dtype`; SGLang 0.5.23, configs/mamba_utils.py,
`mamba2_state_dtype`). `StateRule.element_bytes` knows the others."""
CONV_STATE_BYTES: Final = 2.0
"""Bytes of an element of a convolution's last inputs, in the model's bf16 (the same places)."""
INDEX_KEY_BYTES: Final = 1.0 + 4.0 / 128.0
"""Bytes of an element of an indexer's key, whatever the cache's type: fp8 and an fp32 scale per 128
(vLLM 0.33.0, models/deepseek_v32/attention.py; SGLang 0.5.23, mem_cache/index_key_cache.py)."""

ENTRY_ELEMENTS: Final = 512
ENTRY_BYTES: Final = 584.0
"""Bytes of a token of the window, or an entry, of 448 + 64 elements of shared keys, whatever the
cache's type unless a launch asks for bf16: the former in fp8 with seven scales and a byte of
padding, the latter in bf16 (vLLM 0.33.0, models/deepseek_v4/attention.py,
`_resolve_dsv4_kv_cache_dtype`; SGLang 0.5.23, mem_cache/deepseek_v4_memory_pool.py, and
arg_groups/overrides.py, `auto` is fp8_e4m3)."""


def entry_bytes(elements: int) -> float:
    """Return the bytes of a cached token or entry of shared keys; other widths count as fp8."""
    return ENTRY_BYTES if elements == ENTRY_ELEMENTS else float(elements)


def work(op: Op) -> Work:
    """Count an operation's work on one device."""
    axes = {name: np.asarray(size, dtype=np.float64) for name, size in op.axes.items()}
    return _WORK[op.operation](op, axes)


def experts_work(op: Op, *, reached_Q: Floats, passes: float = 1.0) -> Work:
    """Count the routed experts of one rank that reads so many distinct ones.

    Args:
        op: the experts.
        reached_Q: distinct experts.
        passes: times that each element of a copy is written and read, in bf16; 2 where copies are
            gathered, computed and summed in kernels of their own.
    """
    axes = op.axes
    copies_Q = np.asarray(axes["tokens"]) * axes["top_k"] / axes["expert"]
    ffn = axes["ffn"] / axes["tensor"]
    weights = axes.get("matrices", 3.0) * axes["hidden"] * axes["ffn"] / axes["tensor"]
    activations_Q = passes * 4.0 * copies_Q * (axes["hidden"] + ffn)
    return 2.0 * weights * copies_Q, activations_Q + BYTES[op.dtype] * weights * reached_Q


def even_activated(op: Op) -> Floats:
    """Distinct experts that a rank reads on average under uniform routing.

    Model:   E / R (1 - (1 - k / E)^m)
    Source:  Janus (arXiv:2512.13525)
    """
    axes = op.axes
    unread_share = 1.0 - axes["top_k"] / axes["experts"]
    unread_Q = unread_share ** np.maximum(axes["tokens"], 1.0)
    return np.asarray(axes["experts"] / axes["expert"] * (1.0 - unread_Q))


UNEQUAL_HIDDEN: Final = frozenset({"nvfp4"})
"""Formats whose published launches show no such wait: SGLang takes 8.5 ms a token of DeepSeek-R1
in nvfp4 on 8 B200 with EP 8, 9.5 without, but 11.9 and 8.8 in fp8 (InferenceX, to 8 requests)."""


def most_activated(op: Op) -> Floats:
    """Distinct experts that the rank with most of them reads, for which the others wait."""
    axes, ranks = op.axes, round(float(op.axes["expert"]))
    if ranks == 1 or op.dtype in UNEQUAL_HIDDEN:
        return even_activated(op)
    return most_loaded_activated(
        slots=max(round(float(axes["experts"])) // ranks, 1),
        experts=round(float(axes["experts"])),
        top_k=float(axes["top_k"]),
        tokens_Q=np.maximum(axes["tokens"], 1.0),
        devices=ranks,
    )


Axes = Mapping[str, Floats]


def _gemm(op: Op, axes: Axes) -> Work:
    """Rows are bf16."""
    m_Q, n, k = axes["m"], axes["n"], axes["k"]
    return 2.0 * m_Q * n * k, BYTES[op.dtype] * n * k + 2.0 * m_Q * (n + k)


def _decode_attention(op: Op, axes: Axes) -> Work:
    n_Q, past_Q, head_dim = axes["batch"], axes["past"], axes["head_dim"]
    seen_Q = np.minimum(past_Q, axes["window"]) if axes["window"] > 0.0 else past_Q
    flop_Q = 4.0 * n_Q * seen_Q * axes["heads"] * head_dim
    return flop_Q, n_Q * seen_Q * 2.0 * axes["kv_heads"] * head_dim * _kv_bytes(op)


def _attention(_: Op, axes: Axes) -> Work:
    tokens_Q, width = axes["batch"] * axes["sequence"], axes["heads"] * axes["head_dim"]
    moved_Q = 4.0 * tokens_Q * (axes["heads"] + axes["kv_heads"]) * axes["head_dim"]
    return 2.0 * tokens_Q * axes["sequence"] * width, moved_Q


def _latent_decode(op: Op, axes: Axes) -> Work:
    read_Q = axes["batch"] * axes["past"] * axes["kv_elements"]
    return 4.0 * read_Q * axes["heads"], read_Q * _kv_bytes(op)


def _latent_product(_: Op, axes: Axes) -> Work:
    return 2.0 * axes["tokens"] * axes["elements"], 2.0 * axes["elements"] + 0.0 * axes["tokens"]


def _latent_attention(_: Op, axes: Axes) -> Work:
    tokens_Q = axes["batch"] * axes["sequence"]
    widths_Q = tokens_Q * axes["heads"] * (axes["head_dim"] + axes["value_dim"])
    return axes["sequence"] * widths_Q, 4.0 * widths_Q


def _pairs(_: Op, axes: Axes) -> Work:
    return 2.0 * axes["pairs"] * axes["elements"], axes["bytes"] + 0.0 * axes["pairs"]


def _index_scores(_: Op, axes: Axes) -> Work:
    width = axes["head_dim"]
    read_Q = axes["batch"] * axes["past"] * INDEX_KEY_BYTES * width
    return 2.0 * axes["pairs"] * axes["heads"] * width, read_Q + 0.0 * axes["pairs"]


def _linear_update(_: Op, axes: Axes) -> Work:
    """Count decay, write and read-out of a state, which is read and written once."""
    elements_Q = axes["batch"] * axes["heads"] * axes["key_dim"] * axes["value_dim"]
    return 7.0 * elements_Q, 2.0 * axes["state_bytes"] * elements_Q


def _linear_scan(_: Op, axes: Axes) -> Work:
    widths = {name: size for name, size in axes.items() if name not in ("batch", "sequence")}
    tokens_Q = axes["batch"] * axes["sequence"]
    return (
        np.asarray(tokens_Q * scan_flop(**widths)),
        np.asarray(tokens_Q * scan_bytes(**widths)),
    )


def _kv_bytes(op: Op) -> float:
    return 1.0 if "kv_fp8" in op.kind else 2.0


_WORK: Final[Mapping[str, Callable[[Op, Axes], Work]]] = {
    "gemm": _gemm,
    "moe": lambda op, _: experts_work(op, reached_Q=even_activated(op)),
    "memory_bound": lambda _, axes: (0.0 * axes["bytes"], axes["bytes"]),
    "decode_attention": _decode_attention,
    "attention": _attention,
    "latent_decode": _latent_decode,
    "latent_product": _latent_product,
    "latent_attention": _latent_attention,
    "index_scores": _index_scores,
    "sparse_core": _pairs,
    "linear_update": _linear_update,
    "linear_scan": _linear_scan,
}
