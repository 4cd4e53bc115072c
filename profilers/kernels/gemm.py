"""Dense GEMM y[m, n] = x[m, k] w[n, k]^T, as a linear layer without bias runs it.

Kind `frozen` has no gradient of w; it is measured at sizes that a spec asks for only.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from profilers.devices import DTYPES
from profilers.kernels.autograd import Prepared, random, through_autograd
from profilers.records import Case

FROZEN = "frozen"

CPU_ROWS = (64, 512, 2048)
CPU_WIDTHS = ((64, 64), (256, 64), (64, 256), (256, 256), (1024, 256), (256, 1024), (1024, 1024))
CUDA_ROWS = (64, 512, 2048, 8192, 32768)
CUDA_WIDTHS = tuple(itertools.product((512, 2048, 8192), (512, 2048, 8192)))


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """The default grid, coarse; refinement adds points along m."""
    rows, widths = (CUDA_ROWS, CUDA_WIDTHS) if device.type == "cuda" else (CPU_ROWS, CPU_WIDTHS)
    return tuple(
        Case(operation="gemm", dtype=dtype, direction="forward", axes={"m": m, "n": n, "k": k})
        for dtype, m, (n, k) in itertools.product(dtypes, rows, widths)
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build the operands of one GEMM."""
    m, n, k = (case.axes[axis] for axis in ("m", "n", "k"))
    dtype = DTYPES[case.dtype]

    def operands() -> tuple[Tensor, ...]:
        return (
            random(m, k, dtype=dtype, device=device),
            random(n, k, dtype=dtype, device=device, grad=case.kind != FROZEN),
        )

    return through_autograd(functional.linear, operands=operands, device=device)
