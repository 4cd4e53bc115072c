"""Recomputation of a function in the backward pass, metered when it is run again.

The reentrant form of `torch.utils.checkpoint` is used: its recomputation is an ordinary call, so
the meter's hooks can be entered inside, and only the arguments are kept in between.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from profilers.steps.instruments import Instruments


def recomputed(
    function: Callable[..., Tensor], *arguments: Tensor | None, instruments: Instruments
) -> Tensor:
    """Call function(*arguments), keep the arguments only, and call it again in the backward.

    At least one argument must require a gradient, or the function's parameters would get none.
    """
    if not torch.is_grad_enabled():
        # Inside the first call of an outer recomputation: nothing is kept anyway.
        return function(*arguments)

    def metered(*again: Tensor | None) -> Tensor:
        with instruments.recording():
            return function(*again)

    return checkpoint(metered, *arguments, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]  # torch's stub
