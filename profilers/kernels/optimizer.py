"""One AdamW step in fp32 over parameters cut into tensors of about a million elements.

The foreach implementation is timed, as the reference step uses it. Betas, weight decay and the rest
do not change what is read and written.
"""

from collections.abc import Sequence

import torch

from profilers.kernels.autograd import Prepared
from profilers.records import Case

TENSOR_ELEMENTS = 2**20
CPU_PARAMETERS = tuple(2**power for power in (12, 16, 20, 23))
CUDA_PARAMETERS = tuple(2**power for power in (16, 20, 24, 27, 29))


def cases(device: torch.device, _dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Sizes by factors of eight to sixteen."""
    sizes = CUDA_PARAMETERS if device.type == "cuda" else CPU_PARAMETERS
    return tuple(
        Case(operation="optimizer", kind="adamw", dtype="fp32", axes={"parameters": size})
        for size in sizes
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build parameters with gradients; their state is made by the first warm-up step."""
    full, rest = divmod(case.axes["parameters"], TENSOR_ELEMENTS)
    sizes = [TENSOR_ELEMENTS] * full + ([rest] if rest else [])
    parameters = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    return Prepared(forward=optimizer.step, backward=None)
