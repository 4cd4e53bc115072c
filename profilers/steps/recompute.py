"""Recomputation of a function in the backward pass, metered when it is recomputed.

The reentrant form of `torch.utils.checkpoint` is used: its recomputation is an ordinary call, so
the meter's hooks can be entered inside, and only the arguments are kept in between.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profilers.steps.instruments import Instruments


def has_trained(module: nn.Module) -> bool:
    """Return whether any of a module's parameters is trained."""
    return any(weight.requires_grad for weight in module.parameters())


def recomputed(
    function: Callable[..., Tensor],
    x: Tensor,
    *arguments: Tensor | None,
    instruments: Instruments,
    trains: bool,
    is_inside_another: bool = False,
) -> Tensor:
    """Call function(x, *arguments), keep only these, and call it again in the backward.

    Below the first adapter x requires no gradient: where the function `trains` parameters all the
    same, another argument requires one for it; otherwise nothing is kept. The result has the shape
    of x. Inside another recomputed function, the outer one's second call only rebuilds the
    graph: its output is not read as long as only sums follow. The inner function is
    then not called for it, and NaNs stand in, which would show in every gradient if they were read.
    """
    if not torch.is_grad_enabled():
        # The first call of an outer recomputation: nothing is kept anyway.
        return function(x, *arguments)
    if not (trains or x.requires_grad):
        return function(x, *arguments)
    anchor = None if x.requires_grad else torch.zeros((), requires_grad=True)

    def metered(_anchor: Tensor | None, *is_recomputed: Tensor | None) -> Tensor:
        if is_inside_another and not torch.is_grad_enabled():
            return torch.full_like(x, math.nan)
        with instruments.recording():
            return function(*is_recomputed)

    return checkpoint(metered, anchor, x, *arguments, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]  # torch's stub
