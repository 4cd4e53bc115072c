"""Per-step work on parameters, by kind; no operand is found in a cache.

    adamw        one AdamW step in fp32, parameters cut into tensors of about a million elements
    accumulate   gradients of `dtype` added to fp32 ones in place
    convert      fp32 parameters converted to `dtype`

The foreach implementation of AdamW is timed, as the reference step uses it. Betas, weight decay and
the rest do not change what is read and written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from profilers.devices import DTYPES, last_cache_bytes
from profilers.kernels.autograd import Prepared, in_turns, random
from profilers.records import Case

TENSOR_ELEMENTS = 2**20
CPU_PARAMETERS = tuple(2**power for power in (12, 16, 20, 23))
CUDA_PARAMETERS = tuple(2**power for power in (16, 20, 24, 27, 29))


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Sizes by factors of eight to sixteen."""
    sizes = CUDA_PARAMETERS if device.type == "cuda" else CPU_PARAMETERS
    kinds = [("adamw", "fp32")]
    kinds += [(kind, dtype) for kind in ("accumulate", "convert") for dtype in dtypes]
    return tuple(
        Case(operation="optimizer", kind=kind, dtype=dtype, axes={"parameters": size})
        for kind, dtype in kinds
        for size in sizes
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build what one kind works on.

    Raises:
        ValueError: the kind does not exist.
    """
    size, dtype = case.axes["parameters"], DTYPES[case.dtype]
    if case.kind == "adamw":
        return _adamw(size, device)
    if case.kind not in ("accumulate", "convert"):
        raise ValueError(f"kind {case.kind!r} is not one of adamw, accumulate, convert")
    turns = in_turns(
        lambda: (_drawn(size, torch.float32, device), _drawn(size, dtype, device)),
        cold_bytes=last_cache_bytes(device),
    )
    run = _accumulate if case.kind == "accumulate" else _convert
    return Prepared(forward=lambda: run(*next(turns)), backward=None)


def _drawn(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return random(size, dtype=dtype, device=device, grad=False)


def _accumulate(total: Tensor, gradient: Tensor) -> Tensor:
    return total.add_(gradient)


def _convert(parameters: Tensor, target: Tensor) -> Tensor:
    return target.copy_(parameters)


def _adamw(size: int, device: torch.device) -> Prepared:
    """The optimizer's state is made by the first warm-up step."""
    full, rest = divmod(size, TENSOR_ELEMENTS)
    sizes = [TENSOR_ELEMENTS] * full + ([rest] if rest else [])
    parameters = [torch.nn.Parameter(_drawn(size, torch.float32, device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = _drawn(len(parameter), torch.float32, device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    return Prepared(forward=optimizer.step, backward=None)
