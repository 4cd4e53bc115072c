"""What a profile says of collectives: measured over formula seconds, by size and group.

The formulas of tuner/costs/analytic/links.py stay; a profile corrects them. Of every measured group
the ratio of its times to the formula's is kept over the sizes, and a price is

    t(V, group) = formula(V, group) * ratio(V)

with the ratio of the measured group of as many ranks, equally many of them inside a domain. A group
that was not measured takes that of the nearest number of ranks which lies alike, inside one domain
or across several, and counts as extrapolated; so do sizes beyond the measured ones. Where nothing
alike was measured the formula stands alone. Ratios are piecewise linear in logarithms, constant
beyond both ends.

Letters: N prices, M measured sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.shapes import Hardware, Numbers

Floats = npt.NDArray[np.float64]

SLACK = float(np.log(1.05))
"""Of the logarithm of a size, before it counts as beyond what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRatios:
    """One measured group."""

    ranks: int
    inside: int
    """Of them inside one scale-up domain."""
    log_bytes_M: Floats
    """Ascending."""
    log_ratio_M: Floats

    @property
    def is_inside(self) -> bool:
        """Whether one domain holds it."""
        return self.inside >= self.ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveRatios:
    """Every measured collective of one profile, by kind."""

    groups: Mapping[str, tuple[GroupRatios, ...]]
    stretch: float = 1.0
    """Factor on what is extrapolated, to see what it weighs."""
    outside: dict[str, str] = field(default_factory=dict)
    """Filled while pricing: what was extrapolated, by kind, in words."""

    def corrected(
        self, kind: str, formula_s: Numbers, *, size: Numbers, ranks: Numbers, inside: Numbers
    ) -> Numbers:
        """Correct the formula's seconds of a collective over `size` bytes."""
        measured = self.groups.get(kind, ())
        if not measured or not np.any(np.greater(ranks, 1.0)):
            return formula_s
        asked = (formula_s, size, ranks, inside)
        columns = np.broadcast_arrays(*(np.asarray(one, dtype=np.float64) for one in asked))
        seconds_N, log_N, ranks_N, inside_N = (column.ravel() for column in columns)
        log_N = np.log(np.maximum(log_N, 1.0))
        found_N = seconds_N.copy()
        code_N = ranks_N * 2.0**24 + inside_N
        for code in np.unique(code_N):
            here = np.flatnonzero((code_N == code) & (ranks_N > 1.0))
            if not len(here):
                continue
            group = _nearest(measured, ranks=ranks_N[here[0]], inside=inside_N[here[0]])
            if group is None:
                continue
            sizes = log_N[here]
            factor = np.exp(np.interp(sizes, group.log_bytes_M, group.log_ratio_M))
            beyond = (sizes < group.log_bytes_M[0] - SLACK) | (
                sizes > group.log_bytes_M[-1] + SLACK
            )
            is_other = (group.ranks, group.inside) != (ranks_N[here[0]], inside_N[here[0]])
            beyond |= is_other
            factor = np.where(beyond, factor * self.stretch, factor)
            if beyond.any():
                asked_ranks = f"{ranks_N[here[0]]:.0f} ranks, measured {group.ranks}"
                self.outside[kind] = asked_ranks if is_other else "size"
            found_N[here] = seconds_N[here] * factor
        return found_N.reshape(columns[0].shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredHardware(Hardware):
    """A machine whose collectives were measured."""

    collectives: CollectiveRatios


def _nearest(
    measured: tuple[GroupRatios, ...], *, ranks: float, inside: float
) -> GroupRatios | None:
    """Return the measured group most like the asked one; None where none lies like it."""
    alike = [group for group in measured if group.is_inside == (inside >= ranks)]
    return min(
        alike,
        key=lambda group: (
            abs(np.log2(group.ranks / ranks)),
            abs(np.log2(group.inside / inside)),
        ),
        default=None,
    )
