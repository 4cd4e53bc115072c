"""Finds the cycle in which a repeating schedule runs, so that not all of it has to be simulated.

A schedule whose passes wait for one another and for their devices is linear over (max, +): each
pass ends at the largest of some earlier ends plus constants. Let row k hold the ends of one turn of
it, and let no pass wait for what is further back than the turn before its own. Then all later turns
follow from row k alone, by a function that is monotone and moves with time
(Baccelli et al., Synchronization and Linearity, 1992, chapter 3), and so with

    least = min (row k - row (k - c)),  most = max (row k - row (k - c))

every later end lies within n least and n most of the end n c turns before it. Where least = most,
the schedule has reached its cycle of c turns, which then lasts for good: nothing is assumed. Else
the width is the most that an extrapolation is off.

Letters: K turns, E ends of one turn. Not covered: speeds that change over time.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

SETTLED_RATIO: Final = 1e-10
"""Of a cycle's seconds: ends whose differences agree to this differ by rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A number of turns, and how far they move every end."""

    turns: int
    least_s: float
    most_s: float

    @property
    def mean_s(self) -> float:
        """Seconds from a cycle to the next."""
        return 0.5 * (self.least_s + self.most_s)

    @property
    def is_settled(self) -> bool:
        """Whether every end moves by the same time, up to rounding."""
        return self.most_s - self.least_s <= SETTLED_RATIO * self.most_s


def find_cycle(end_s_KE: npt.NDArray[np.float64]) -> Cycle:
    """Return the shortest settled cycle that ends with the last turn, else the narrowest.

    Args:
        end_s_KE: ends of consecutive turns, at least two.
    """
    moved_KE = end_s_KE[-1] - end_s_KE[-2::-1]
    turns_K = np.arange(1, len(end_s_KE))
    least_K, most_K = moved_KE.min(axis=1), moved_KE.max(axis=1)
    width_K = np.divide(most_K - least_K, most_K, out=np.zeros_like(most_K), where=most_K > 0.0)
    settled = np.flatnonzero(width_K <= SETTLED_RATIO)
    best = int(settled[0]) if len(settled) else int(width_K.argmin())
    return Cycle(turns=int(turns_K[best]), least_s=float(least_K[best]), most_s=float(most_K[best]))
