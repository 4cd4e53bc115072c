"""Token copies that experts of a limited capacity keep.

An expert with x times the mean load keeps min(x, c) of it. Over a log-normal load of mean 1 and
spread s that is on average

    kept = P((ln c - s^2 / 2) / s) + c P(-(ln c + s^2 / 2) / s)      P: the normal distribution

which is the share of the copies that all layers of a rank keep together, and so its memory. The
most-loaded rank of a single layer, which sets the time, may reach the capacity.

Spreads of recorded loads: 0.63 of DeepSeek-V3 (256 experts, 58 layers), which keeps 0.75 at c = 1,
as does the median of 15 recorded layers of OLMoE (64 experts; 0.49 to 0.91). Mixtral's 8 experts
keep 0.91 to 0.98 (0.96 at the median of 9 layers), which is a spread of 0.11.

HybridEP that reads no counts back has buffers of tokens x ranks x min(local experts, k) x a share.
Element-wise kernels run over all of them, grouped GEMMs do not (torchtitan of June 2026,
distributed/deepep/hybridep.py; pull request 3659).

Not covered: models whose loads a recording states; it bounds them by the capacity.
"""

import math
from statistics import NormalDist
from typing import Final

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape

MANY_EXPERTS: Final = 64
"""Experts from which on loads spread as widely as in the recordings of 64 and 256 experts."""
_SPREAD: Final = 0.63
_SPREAD_OF_FEW: Final = 0.11


def kept_ratio(capacity: float, *, num_experts: int) -> float:
    """Return the share of the copies that experts keep at a capacity over the mean load."""
    spread = _SPREAD if num_experts >= MANY_EXPERTS else _SPREAD_OF_FEW
    below = NormalDist().cdf
    half = 0.5 * spread**2
    return below((math.log(capacity) - half) / spread) + capacity * below(
        -(math.log(capacity) + half) / spread
    )


def buffer_rows(model: ModelShape, s: Strategies) -> Numbers:
    """Return rows of the buffers that experts read over the copies that come on average."""
    largest_share = np.minimum(model.experts / s.expert, model.top_k) / np.maximum(model.top_k, 1.0)
    return s.buffered_ratio * s.expert * largest_share
