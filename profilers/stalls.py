"""The mean time of collectives: their data, and now and then a rank that wakes up late.

A rank that waits for others gives up its core and is woken when data comes. On a virtual machine
that takes a tick of a scheduler every few calls: of 1,500 all-gathers of 4 KiB over gloo, 89 % took
0.2 to 0.5 ms and the others up to 6 ms, which makes a mean of 0.66 ms.
A step adds up hundreds of calls, so the mean counts; but the mean of a few repeats of one size is
mostly noise. The short sizes of a kind in one group wait about equally long, so their means are
shrunk towards a common one by as much as they scatter (shrinkage, or empirical Bayes: Efron and
Morris, JASA 70, 1975):

    q_i    lower quartile of the n_i repeats of size i: mostly no rank was late
    d_i    mean of their time beyond that
    v      variance of the time of a repeat beyond it, about zero
    V_i    v / n_i: sampling variance of d_i
    U_i  = (0.3 s)^2 + q_i^2: how far the true wait of a size may differ from s
    s    = sum(d / (V + U)) / sum(1 / (V + U))
    t_i  = q_i + (V_i s + U_i d_i) / (V_i + U_i)

v, too, is a mean weighted by 1 / (V + U), so that the scatter of large messages does not count for
small ones; s and v are iterated. With many repeats t_i is their mean. Of 5 or 20 repeats of 0.2 ms,
15 % late by 4 ms, this removes a third to a half of the error of their own mean. U is our prior:
waits of short calls differ by about a third, and a long call has its own.

A repeat counts up to 3 q_i, or to what 99 % of all repeats take beyond their q_i, which is never
the largest of them, and no more than `LATEST_S`: a pause of the whole machine is not part of the
call. Two pauses among 100 repeats are taken for calls that were late by that much.

That late wake-ups grow with the number of calls, not with bytes: Petrini et al., The Case of the
Missing Supercomputer Performance, SC 2003.

Letters: S sizes, N repeats of a size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUIET_QUANTILE = 0.25
"""Quantile of undisturbed calls. Every second call of a large reduce-scatter is late: the median is
not the time of the data."""
USUAL_QUANTILE = 0.99
LATEST_S = 0.02
"""Two ticks of the slowest clock that Linux is usually built with (CONFIG_HZ of 100)."""
USUAL_RATIO = 2.0
"""Multiple of q_i by which a single call may exceed q_i and still be usual."""
SPREAD_RATIO = 0.3
"""Prior deviation, as a share of s, of the waits of one size's short calls from those of its
kind."""
ITERATIONS = 50
LEAST_S = 1e-12
"""Seconds that replace a time below the clock's resolution."""


def seconds_with_stalls(repeats_SN: Sequence[Sequence[float]]) -> Floats:
    """Mean seconds of a call of every size [S], from the repeats of all of them.

    Args:
        repeats_SN: seconds of the repeats of each size, one at least; how many may differ. A size
            of one or two among others of many counts too long: its lower quartile may be late.
    """
    num_S = np.array([len(times_N) for times_N in repeats_SN], dtype=np.float64)
    quiet_S, beyond_SN = _quiet_and_beyond(repeats_SN)
    beyond_S = np.array([beyond_N.mean() for beyond_N in beyond_SN])
    squares_S = np.array([np.square(beyond_N).mean() for beyond_N in beyond_SN])
    weight_S = 1.0 / quiet_S**2
    luck_S, prior_S, common_s = quiet_S, quiet_S, 0.0
    for _ in range(ITERATIONS):
        common_s = max(0.0, float(weight_S @ beyond_S / weight_S.sum()))
        variance = float((num_S * weight_S) @ squares_S / (num_S @ weight_S))
        luck_S = variance / num_S + LEAST_S**2
        prior_S = (SPREAD_RATIO * common_s) ** 2 + quiet_S**2
        weight_S = 1.0 / (luck_S + prior_S)
    waits_S = (luck_S * common_s + prior_S * beyond_S) / (luck_S + prior_S)
    seconds_S: Floats = quiet_S + waits_S
    return seconds_S


def _quiet_and_beyond(repeats_SN: Sequence[Sequence[float]]) -> tuple[Floats, list[Floats]]:
    """Lower quartile of each size [S], and the seconds of its repeats that count beyond it."""
    repeats = [np.maximum(np.asarray(times_N, dtype=np.float64), LEAST_S) for times_N in repeats_SN]
    quiet_S = np.array([np.quantile(times_N, QUIET_QUANTILE) for times_N in repeats])
    beyond = [times_N - quiet for times_N, quiet in zip(repeats, quiet_S, strict=True)]
    usual_s = np.quantile(np.concatenate(beyond), USUAL_QUANTILE, method="lower")
    most_S = np.maximum(USUAL_RATIO * quiet_S, min(usual_s, LATEST_S))
    return quiet_S, [
        np.minimum(beyond_N, limit) for beyond_N, limit in zip(beyond, most_S, strict=True)
    ]
