"""Linear attention of one new token for each of some sequences: states are decayed and written.

With q, k and v of the token as in profilers/kernels/linear_scan.py, a decay exp(-r) of a head (of a
key's channel for KDA) and a head's state S of N x P:

    Mamba-2       S = exp(-r) S + k v^T                              output S^T q
    delta rules   S = exp(-r) S;  S = S + k beta (v - S^T k)^T       output S^T q

States are fp32, as engines hold them by default, lie beyond the last-level cache, as the other
layers' states evict them, and are written in place. On CUDA the kernels of mamba_ssm and
flash-linear-attention run where they are installed (the latter write a copy of the states, as many
bytes); elsewhere PyTorch's products do.

Sources: as of the scans; mamba_ssm, ops/triton/selective_state_update.py; flash-linear-attention,
ops/gated_delta_rule/fused_recurrent.py and ops/kda/fused_recurrent.py.
Not covered: the update of the short convolution's last inputs (memory-bound).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from profilers.devices import last_cache_bytes
from profilers.kernels.autograd import Prepared, in_turns, random
from profilers.kernels.linear_scan import (
    CUDA_SHAPES,
    DECAY_SHIFT,
    KDA,
    LIBRARIES,
    MAMBA2,
    activated,
    inputs,
    runs_library,
)
from profilers.records import Case

CUDA_SEQUENCES: Final = (1, 8, 64, 256)


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """The default grid: kinds whose kernels are installed, on CUDA alone."""
    if device.type != "cuda":
        return ()
    names = ("heads", "key_heads", "key_dim", "value_dim")
    return tuple(
        Case(
            operation="linear_update",
            kind=kind,
            dtype="bf16",
            axes={"batch": batch, **dict(zip(names, shape[:-1], strict=True))},
        )
        for kind, shapes in CUDA_SHAPES.items()
        if "bf16" in dtypes and find_spec(LIBRARIES[kind]) is not None
        for shape in shapes
        for batch in CUDA_SEQUENCES
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build one token's queries, keys, values and decays, and states."""
    axes = case.axes
    widths = (axes["key_dim"], axes["value_dim"])
    if case.kind == MAMBA2 and runs_library(case.kind, device):
        widths = widths[::-1]
    states = (axes["batch"], axes["heads"], *widths)

    def operands() -> tuple[Tensor, ...]:
        state = random(*states, dtype=torch.float32, device=device, grad=False)
        return state, *inputs(case, device, sequence=1, grad=False)

    turns = in_turns(operands, cold_bytes=last_cache_bytes(device))
    kernel = _kernel(case, device)
    return Prepared(forward=lambda: kernel(*next(turns)), backward=None)


def update(
    kind: str,
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    writes: Tensor | None = None,
) -> Tensor:
    """Decay and write states in place, and read them, by PyTorch's products.

    Args:
        kind: mamba2, gated_delta or kda.
        state: [B, H, N, P] in fp32.
        queries: of one token, as the other operands: those of `scan` with S = 1.
        keys: the same.
        values: [B, 1, H, P].
        decays: [B, 1, H], or [B, 1, H, N] for KDA.
        writes: [B, 1, H]; None for Mamba-2.

    Returns:
        [B, 1, H, P], in the type of the values.
    """
    q, k, v, rates, strengths = activated(kind, queries, keys, values, decays, writes)
    # [B, H, 1, N or P] of the one token.
    q, k, v = (operand.transpose(1, 2).float() for operand in (q, k, v))
    state.mul_((-rates).exp().squeeze(1).unsqueeze(-1))
    if strengths is not None:
        v = strengths.transpose(1, 2).unsqueeze(-1) * (v - k @ state)
    state.addcmul_(k.transpose(-1, -2), v)
    return (q @ state).transpose(1, 2).to(values.dtype)


def _kernel(case: Case, device: torch.device) -> Callable[..., Tensor]:
    kind = case.kind
    if not runs_library(kind, device):
        return lambda *operands: update(kind, *operands)
    if kind == MAMBA2:
        return _mamba2(case, device)
    return _kda if kind == KDA else _gated_delta


def _mamba2(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """Return the kernel with one step and rate for all channels of a head, passed as strides."""
    library: Any = import_module("mamba_ssm.ops.triton.selective_state_update")
    heads, key_dim, value_dim = (case.axes[axis] for axis in ("heads", "key_dim", "value_dim"))
    rates = -torch.ones(heads, 1, 1, device=device).expand(heads, value_dim, key_dim)
    shift = torch.full((heads, 1), -DECAY_SHIFT, device=device).expand(heads, value_dim)

    def run(state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, steps: Tensor) -> Tensor:
        output: Tensor = library.selective_state_update(
            state,
            values[:, 0],
            steps[:, 0].unsqueeze(-1).expand(-1, -1, value_dim),
            rates,
            keys[:, 0],
            queries[:, 0],
            dt_bias=shift,
            dt_softplus=True,
        )
        return output

    return run


def _gated_delta(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, writes: Tensor
) -> Tensor:
    library: Any = import_module("fla.ops.gated_delta_rule")
    return _recurrent(
        library.fused_recurrent_gated_delta_rule, state, queries, keys, values, decays, writes
    )


def _kda(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, writes: Tensor
) -> Tensor:
    library: Any = import_module("fla.ops.kda")
    return _recurrent(library.fused_recurrent_kda, state, queries, keys, values, decays, writes)


def _recurrent(
    kernel: Callable[..., Any],
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    writes: Tensor,
) -> Tensor:
    output: Tensor = kernel(
        queries,
        keys,
        values,
        g=-torch.nn.functional.softplus(decays.float() - DECAY_SHIFT),
        beta=writes.sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )[0]
    return output
