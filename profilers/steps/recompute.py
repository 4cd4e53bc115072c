"""Recomputation of a function in the backward pass, metered when it is recomputed.

The reentrant form of `torch.utils.checkpoint` is used: its recomputation is an ordinary call, so
the meter's hooks can be entered inside, and only the arguments are kept in between.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from profilers.steps.instruments import Instruments


def recomputed(
    function: Callable[..., Tensor],
    x: Tensor,
    *arguments: Tensor | None,
    instruments: Instruments,
    is_inside_another: bool = False,
) -> Tensor:
    """Call function(x, *arguments), keep only these, and call it again in the backward.

    x must require a gradient, or the function's parameters would get none. The result has the
    shape of x. Inside another recomputed function, the outer one's second call only rebuilds the
    graph: its output is not read as long as only sums follow. The inner function is
    then not called for it, and NaNs stand in, which would show in every gradient if they were read.
    """
    if not torch.is_grad_enabled():
        # The first call of an outer recomputation: nothing is kept anyway.
        return function(x, *arguments)

    def metered(*is_recomputed: Tensor | None) -> Tensor:
        if is_inside_another and not torch.is_grad_enabled():
            return torch.full_like(x, math.nan)
        with instruments.recording():
            return function(*is_recomputed)

    return checkpoint(metered, x, *arguments, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]  # torch's stub
