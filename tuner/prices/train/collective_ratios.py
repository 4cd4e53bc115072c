"""Measured over predicted seconds of collectives, by size and group.

A profile corrects the formulas of tuner/prices/train/collectives.py. For every measured group the
ratio of measured to predicted time is stored by size, and a price is

    t(V, group) = formula(V, group) * ratio(V)

with the ratio of the measured group of as many ranks, equally many of them inside a domain. A group
that was not measured takes the ratio of the nearest number of ranks with the same placement (inside
one domain, or across several) and counts as extrapolated, as do sizes outside the measured range.
Without such a group the formula is not corrected. Ratios are piecewise linear in logarithms and
constant outside the measured range.

Letters: N prices, M measured sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware

SLACK = float(np.log(1.05))
"""Distance of a size's logarithm from the measured range beyond which the size counts as
extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRatios:
    """One measured group."""

    ranks: int
    inside: int
    """Ranks of the group inside one scale-up domain."""
    log_bytes_M: Floats
    """Logarithms of the measured sizes in bytes, ascending."""
    log_ratio_M: Floats

    @property
    def is_inside(self) -> bool:
        """Return whether one domain holds it."""
        return self.inside >= self.ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveRatios:
    """Every measured collective of one profile, by kind."""

    groups: Mapping[str, tuple[GroupRatios, ...]]
    stretch: float = 1.0
    """Factor on extrapolated times, for a sensitivity test."""
    outside: dict[str, str] = field(default_factory=dict)
    """Filled while pricing: what was extrapolated, by kind, as text."""

    def corrected(
        self, kind: str, formula_s: Numbers, *, size: Numbers, ranks: Numbers, inside: Numbers
    ) -> Numbers:
        """Correct the formula's seconds of a collective over `size` bytes."""
        measured = self.groups.get(kind, ())
        if not measured or not np.any(np.greater(ranks, 1.0)):
            return formula_s
        inputs = (formula_s, size, ranks, inside)
        columns = np.broadcast_arrays(
            *(np.asarray(quantity, dtype=np.float64) for quantity in inputs)
        )
        seconds_N, log_N, ranks_N, inside_N = (column.ravel() for column in columns)
        log_N = np.log(np.maximum(log_N, 1.0))
        corrected_N = seconds_N.copy()
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
                extrapolation = f"{ranks_N[here[0]]:.0f} ranks, measured {group.ranks}"
                self.outside[kind] = extrapolation if is_other else "size"
            corrected_N[here] = seconds_N[here] * factor
        return corrected_N.reshape(columns[0].shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredHardware(Hardware):
    """A machine whose collectives were measured."""

    collectives: CollectiveRatios


def _nearest(
    measured: tuple[GroupRatios, ...], *, ranks: float, inside: float
) -> GroupRatios | None:
    """Return the closest measured group of the same placement; None where there is none."""
    candidates = [group for group in measured if group.is_inside == (inside >= ranks)]
    return min(
        candidates,
        key=lambda group: (
            abs(np.log2(group.ranks / ranks)),
            abs(np.log2(group.inside / inside)),
        ),
        default=None,
    )
