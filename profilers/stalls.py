"""What one of many collectives takes: its data, and now and then a rank that wakes up late.

A rank that waits for others gives up its core and is woken when data comes. On a virtual machine
that takes a tick of a scheduler every few calls: of 1,500 all-gathers of 4 KiB over gloo, 88 %
took 0.2 to 0.5 ms and the others 2 to 6 ms, which makes a mean of 0.7 ms. A step adds up hundreds
of calls, so the mean counts; but of a few repeats of one size it is mostly luck. The sizes of a
kind in one group wait alike, so short calls tell together what they wait:

    q_i    lower quartile of the repeats of size i: nobody was late
    d_i    mean of what its n_i repeats take beyond that
    s      mean of what all repeats take beyond their q_i
    w_i    s^2 / (s^2 + q_i^2): how much of size i is waiting
    t_i  = q_i + w_i sum(n w d) / sum(n w) + (1 - w_i) d_i

With 15 % of calls late by 4 ms this halves the error of a mean of 5 or of 20 repeats of 0.2 ms, and
leaves calls as they are that take long beside what they wait. A repeat counts up to what is usual:
a pause of the whole machine is not the call's. The limit is the share of q_i that 99 % of all
repeats stay below. Where nobody is late, as among accelerators, t_i is the mean within the noise.

Model and name are ours. That late wake-ups grow with the number of calls, not with bytes: Petrini
et al., The Case of the Missing Supercomputer Performance, SC 2003.

Letters: S sizes, N repeats of a size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUIET_QUANTILE = 0.25
"""Of a large reduce-scatter every second call is late: a median is not what data takes."""
USUAL_QUANTILE = 0.99
LEAST_S = 1e-12
"""Stands for a time below the clock's resolution."""


def seconds_with_stalls(repeats_SN: Sequence[Sequence[float]]) -> Floats:
    """Mean seconds of a call of every size [S], from the repeats of all of them.

    Args:
        repeats_SN: seconds of the repeats of each size, one at least; how many may differ.
    """
    repeats = [np.maximum(np.asarray(one, dtype=np.float64), LEAST_S) for one in repeats_SN]
    num_S = np.array([len(one) for one in repeats], dtype=np.float64)
    quiet_S = np.array([np.quantile(one, QUIET_QUANTILE) for one in repeats])
    shares = [one / quiet - 1.0 for one, quiet in zip(repeats, quiet_S, strict=True)]
    most = np.quantile(np.concatenate(shares), USUAL_QUANTILE)
    beyond_S = quiet_S * [np.minimum(share, most).mean() for share in shares]
    usual_s = float(num_S @ beyond_S / num_S.sum())
    waiting_S = usual_s**2 / (usual_s**2 + quiet_S**2)
    weight_S = num_S * waiting_S
    common_s = max(0.0, weight_S @ beyond_S / max(weight_S.sum(), LEAST_S))
    seconds_S: Floats = quiet_S + waiting_S * common_s + (1.0 - waiting_S) * beyond_S
    return seconds_S
