"""Linear attention in chunks: Mamba-2, the gated delta rule and Kimi delta attention.

A head keeps a state S of N x P elements. Of a chunk of Q tokens, with a the logarithms of the
decays added up inside it:

    Mamba-2       scores C B^T x exp(a_i - a_j), which weigh the values x; a chunk's state B^T x at
                  its end; states are passed on, and read by C exp(a)
    delta rules   the same scores of q and k; values are first corrected by what the state holds
                  under their keys: V' = T V - T K S with T = (1 + strict lower part of
                  beta k k^T exp(a_i - a_j))^-1 beta

Queries and keys of the delta rules are normalised first. On CUDA the kernels of mamba_ssm and
flash-linear-attention run where they are installed; elsewhere the chunks run as PyTorch's products,
which is what transformers falls back to. The decay of the gated delta rule is one number per head,
that of KDA one per channel of a key.

Sources: Mamba-2, arXiv 2405.21060, section 6; Gated DeltaNet, arXiv 2412.06464, section 3.3; Kimi
Linear, arXiv 2510.26692, section 3.
Decoding one token: profilers/kernels/linear_update.py. Not covered: the short convolution and gated
norms around it (memory-bound).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from profilers.devices import DTYPES
from profilers.kernels.autograd import Prepared, random, through_autograd
from profilers.records import Case

MAMBA2: Final = "mamba2"
GATED_DELTA: Final = "gated_delta"
KDA: Final = "kda"
LIBRARIES: Final = {MAMBA2: "mamba_ssm", GATED_DELTA: "fla", KDA: "fla"}
"""Libraries whose kernels run on CUDA, by kind."""
CUDA_SHAPES: Final = {
    MAMBA2: ((64, 8, 128, 64, 128), (128, 8, 128, 64, 128)),
    GATED_DELTA: ((32, 16, 128, 128, 64),),
    KDA: ((32, 32, 128, 128, 64),),
}
"""Heads, key heads, widths of keys and values, tokens of a chunk: Nemotron-3, Qwen3-Next, Kimi
Linear."""
DECAY_SHIFT: Final = 4.0
"""Random decays are taken off this: a token forgets some 2 %, as trained models do."""
CUDA_SEQUENCES: Final = ((1, 2048), (1, 8192), (4, 8192))


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """The default grid: kinds whose kernels are installed, on CUDA alone."""
    if device.type != "cuda":
        return ()
    names = ("heads", "key_heads", "key_dim", "value_dim", "chunk")
    return tuple(
        Case(
            operation="linear_scan",
            kind=kind,
            dtype="bf16",
            direction="forward",
            axes={
                "batch": batch,
                "sequence": sequence,
                **dict(zip(names, shape, strict=True)),
            },
        )
        for kind, shapes in CUDA_SHAPES.items()
        if "bf16" in dtypes and find_spec(LIBRARIES[kind]) is not None
        for shape in shapes
        for batch, sequence in CUDA_SEQUENCES
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build queries, keys, values and decays."""
    return through_autograd(
        _kernel(case, device),
        operands=lambda: inputs(case, device, sequence=case.axes["sequence"], grad=True),
        device=device,
    )


def inputs(case: Case, device: torch.device, *, sequence: int, grad: bool) -> tuple[Tensor, ...]:
    """Draw queries, keys, values, decays and, for a delta rule, writes of so many tokens each."""
    axes = case.axes
    tokens, heads = (axes["batch"], sequence), axes["heads"]
    is_mamba = case.kind == MAMBA2
    # Kernels of the delta rules take keys of every head.
    keys = (*tokens, axes["key_heads"] if is_mamba else heads, axes["key_dim"])
    decays = (*tokens, heads, axes["key_dim"]) if case.kind == KDA else (*tokens, heads)
    shapes = [keys, keys, (*tokens, heads, axes["value_dim"]), decays]
    if not is_mamba:
        shapes.append((*tokens, heads))
    dtype = DTYPES[case.dtype]
    return tuple(random(*shape, dtype=dtype, device=device, grad=grad) for shape in shapes)


def runs_library(kind: str, device: torch.device) -> bool:
    """Return whether a library's kernels run, rather than PyTorch's GEMMs."""
    return device.type == "cuda" and find_spec(LIBRARIES[kind]) is not None


def _kernel(case: Case, device: torch.device) -> Callable[..., Tensor]:
    kind, chunk = case.kind, case.axes["chunk"]
    if not runs_library(kind, device):
        return lambda *operands: scan(kind, *operands, chunk=chunk)
    if kind == MAMBA2:
        library: Any = import_module("mamba_ssm.ops.triton.ssd_combined")

        def mamba2(queries: Tensor, keys: Tensor, values: Tensor, steps: Tensor) -> Tensor:
            rates = -torch.ones(values.shape[2], device=device)
            output: Tensor = library.mamba_chunk_scan_combined(
                values,
                steps - DECAY_SHIFT,
                rates,
                keys,
                queries,
                chunk_size=chunk,
                dt_softplus=True,
            )
            return output

        return mamba2
    return _kda(case, device) if kind == KDA else _gated_delta


def _gated_delta(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, writes: Tensor
) -> Tensor:
    library: Any = import_module("fla.ops.gated_delta_rule")
    output: Tensor = library.chunk_gated_delta_rule(
        queries,
        keys,
        values,
        g=-torch.nn.functional.softplus(decays.float() - DECAY_SHIFT),
        beta=writes.sigmoid(),
        use_qk_l2norm_in_kernel=True,
    )[0]
    return output


def _kda(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """Return the KDA kernel, which computes the decays itself, as the library's layer does."""
    library: Any = import_module("fla.ops.kda")
    heads = case.axes["heads"]
    rates = torch.zeros(heads, device=device)
    shift = torch.full((heads * case.axes["key_dim"],), -DECAY_SHIFT, device=device)

    def run(
        queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, writes: Tensor
    ) -> Tensor:
        output: Tensor = library.chunk_kda(
            queries,
            keys,
            values,
            g=decays,
            beta=writes.sigmoid(),
            A_log=rates,
            dt_bias=shift,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return output

    return run


def scan(
    kind: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    writes: Tensor | None = None,
    *,
    chunk: int,
) -> Tensor:
    """Run linear attention in chunks, by PyTorch's products.

    Args:
        kind: mamba2, gated_delta or kda.
        queries: [B, S, K, N]; K key heads divide the heads.
        keys: the same.
        values: [B, S, H, P].
        decays: [B, S, H], or [B, S, H, N] for KDA; the state decays by exp(-softplus(x - 4)).
        writes: [B, S, H], whose sigmoid is how far a delta rule corrects; Mamba-2 has none and
            scales values by the softplus instead.
        chunk: tokens of a chunk; the last one may be shorter.

    Returns:
        [B, S, H, P], in the type of the values.
    """
    q, k, v, rates, strengths = activated(kind, queries, keys, values, decays, writes)
    batch, length, heads, width = v.shape
    state = v.new_zeros(batch, heads, k.shape[-1], width, dtype=torch.float32)
    outputs = []
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        operands = (operand[:, part].transpose(1, 2).float() for operand in (q, k, v, -rates))
        part_strengths = None if strengths is None else strengths[:, part].transpose(1, 2)
        output, state = _chunk(*operands, writes=part_strengths, state=state)
        outputs.append(output.transpose(1, 2).to(values.dtype))
    return torch.cat(outputs, dim=1)


def activated(
    kind: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    writes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v, rates of decay and strengths of writes of every head, from `scan`'s operands.

    Rates are [B, S, H, 1], or [B, S, H, N] for KDA; strengths [B, S, H].
    """
    repeats = values.shape[2] // queries.shape[2]
    q, k = (operand.repeat_interleave(repeats, dim=2) for operand in (queries, keys))
    steps = torch.nn.functional.softplus(decays.float() - DECAY_SHIFT)
    rates = steps if kind == KDA else steps.unsqueeze(-1)
    if writes is None:
        return q, k, values * steps.unsqueeze(-1).to(values.dtype), rates, None
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.nn.functional.normalize(q, dim=-1) * q.shape[-1] ** -0.5
    return q, k, values, rates, writes.float().sigmoid()


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, *, writes: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of every head: [B, H, Q, ...]; returns its output and the state after it."""
    summed = log_decays.cumsum(dim=2)
    # Keys decay from their token to the chunk's first one: scores then have exp(a_i - a_j).
    grown, shrunk = k * (-summed).exp(), q * summed.exp()
    if writes is not None:
        decayed = k * summed.exp()
        below = (decayed @ grown.transpose(-1, -2)).tril(-1) * writes.unsqueeze(-1)
        corrected = writes.unsqueeze(-1) * (v - decayed @ state)
        ones = torch.eye(below.shape[-1], device=v.device)
        v = torch.linalg.solve_triangular(ones + below, corrected, upper=False, unitriangular=True)
    output = shrunk @ state + (shrunk @ grown.transpose(-1, -2)).tril() @ v
    last = summed[:, :, -1:]
    kept = state * last.exp().transpose(-1, -2)
    return output, kept + (k * (last - summed).exp()).transpose(-1, -2) @ v
