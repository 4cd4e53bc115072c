"""KV tokens that running sequences hold together, by the engine's admission rule.

    n sequences run    I, O input and output tokens    U a share of the output, even in 0..1

A slot that is always filled holds a request in proportion to its output length (demand.py), at a
uniformly random position:

    reserves outputs    each takes I + O, weighted by O
    takes as they grow  each takes I + U O, weighted by O

Slots are filled independently, so that what n of them take is distributed as the n-th power of one
slot's characteristic function says: its quantile is exact but for the grid, also for few sequences
and heavy tails.

Not covered: prefixes that sequences share.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex128]

OCCUPANCY_QUANTILE: Final = 0.99
"""Share of the time at which memory has room for all that run."""
SHARES: Final = 16
"""Positions in an output that are sampled."""
BINS: Final = 2**13
"""Points of the grid on which slots are added up."""
COUNTS: Final = 40
"""Numbers of sequences that are added up; between them quantiles are interpolated."""
FAR: Final = 12.0
"""Standard deviations to which the grid reaches."""


def grown(prompt_lengths: Floats, output_lengths: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Return tokens that a running sequence has at a random time, and how often.

    Args:
        prompt_lengths: of those that run.
        output_lengths: of the same, when they will have ended.
        weight: probability of each; adds up to 1.
    """
    share_S = (np.arange(SHARES) + 0.5) / SHARES
    tokens = prompt_lengths[:, None] + share_S * output_lengths[:, None]
    probability = np.broadcast_to(weight[:, None] / SHARES, tokens.shape)
    return tokens.ravel(), probability.ravel()


def joint_quantiles(
    tokens: Floats, weight: Floats, *, most_sequences: int, ratio: float = OCCUPANCY_QUANTILE
) -> Floats:
    """Tokens that 1, 2, … independent sequences stay within, at a share of the time.

    Args:
        tokens: that a sequence takes.
        weight: how often; adds up to 1.
        most_sequences: largest number of them.
        ratio: share of the time.

    Returns:
        An array that cannot be written to: a plan asks for the same many times.
    """
    return _joint_quantiles(
        tokens.tobytes(), weight.tobytes(), most_sequences=most_sequences, ratio=ratio
    )


@lru_cache(maxsize=16)
def _joint_quantiles(tokens: bytes, weight: bytes, *, most_sequences: int, ratio: float) -> Floats:
    """Return `joint_quantiles` of arrays that are given by their bytes, which can be a key."""
    tokens_N, weight_N = np.frombuffer(tokens), np.frombuffer(weight)
    least = float(tokens_N.min())
    above = tokens_N - least
    mean = float(weight_N @ above)
    spread = float(np.sqrt(weight_N @ (above - mean) ** 2))
    counts = np.unique(np.round(np.geomspace(1.0, most_sequences, COUNTS)).astype(np.int64))
    quantiles = [
        n * least
        + _quantile(above, weight_N, n, reach=n * mean + FAR * np.sqrt(n) * spread, ratio=ratio)
        for n in counts.tolist()
    ]
    result: Floats = np.interp(np.arange(1.0, most_sequences + 1.0), counts, quantiles)
    result.setflags(write=False)
    return result


def _quantile(above: Floats, weight: Floats, count: int, *, reach: float, ratio: float) -> float:
    """Return a quantile of a sum of independent terms."""
    reach = min(reach + float(above.max()), count * float(above.max()))
    if reach <= 0.0:
        return 0.0
    width = reach / (BINS - 2)
    place = above / width
    low = np.minimum(place.astype(np.int64), BINS - 2)
    right = place - low  # Between two places of the grid, so that the mean stays.
    mass = np.bincount(low, weight * (1.0 - right), BINS)
    mass += np.bincount(low + 1, weight * right, BINS)
    total = np.fft.irfft(_power(np.fft.rfft(mass, 2 * BINS), count), 2 * BINS)
    return float(width * np.searchsorted(np.cumsum(total), ratio * total.sum()))


def _power(values: Complexes, count: int) -> Complexes:
    """Return powers by squaring, which takes a tenth of the time of logarithms."""
    result = values if count % 2 else np.ones_like(values)
    while count := count // 2:
        values = values * values
        result = result * values if count % 2 else result
    return result
