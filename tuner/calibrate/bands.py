"""Error bands from held-out residuals: split conformal prediction, per set of known facts.

A band is [exp(-q), exp(q)] of measured over predicted seconds, where q is the quantile of the size
of held-out residuals that covers the stated share of a new recipe, ceil((n + 1) share) of n recipes
(Vovk et al., "Algorithmic Learning in a Random World", 2005). Recipes have equal weight, however
many runs they have. With too few recipes there is no band, and that of a more general regime is
used.

The known facts of a regime determine the residuals of its band:

    its family, device generation and release   recipes held out
    its family and device generation            whole releases held out
    its family                                  whole generations of devices held out
    its device generation                       whole families held out
    nothing                                     the same, all together

Letters: C runs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tuner.calibrate.fit import Floats
from tuner.costs.train.calibration import Band, Regime, Where, narrowest_band

FEWEST: Final = 12
"""Recipes that a band needs."""
STATED: Final = 0.9

LEVELS: Final[Mapping[tuple[str, ...], str]] = {
    ("family", "generation", "release"): "group",
    ("family", "generation"): "release",
    ("family",): "generation",
    ("generation",): "family",
    (): "family",
}
"""Known facts, and what was held out to estimate their accuracy."""


def error_bands(
    regimes: Sequence[Regime],
    groups: Sequence[str],
    residual_by: Mapping[str, Floats],
    *,
    stated: float = STATED,
) -> tuple[Band, ...]:
    """Return a band for every set of facts with enough recipes; NaN residuals are left out."""
    has_release = {regime.family for regime in regimes if regime.release}
    bands = []
    for facts, key in LEVELS.items():
        wheres = [_where(regime, facts) for regime in regimes]
        for where in dict.fromkeys(where for where in wheres if where is not None):
            # Without any known release there is none to hold out.
            is_unreleased = facts == ("family", "generation") and where.family not in has_release
            residual_C = residual_by["group" if is_unreleased else key]
            chosen = [
                place
                for place, other in enumerate(wheres)
                if other == where and np.isfinite(residual_C[place])
            ]
            band = _band(where, residual_C, groups, chosen, stated)
            if band is not None:
                bands.append(band)
    return tuple(bands)


def _where(regime: Regime, facts: tuple[str, ...]) -> Where | None:
    values = {name: str(getattr(regime, name)) for name in facts}
    return Where(**values) if all(values.values()) else None


def _band(
    where: Where, residual_C: Floats, groups: Sequence[str], chosen: Sequence[int], stated: float
) -> Band | None:
    by_group: dict[str, list[float]] = {}
    for place in chosen:
        by_group.setdefault(groups[place], []).append(abs(float(residual_C[place])))
    rank = math.ceil((len(by_group) + 1) * stated)
    if len(by_group) < FEWEST or rank > len(by_group):
        return None
    size = _quantile(list(by_group.values()), rank / len(by_group))
    return Band(
        where=where,
        low=round(math.exp(-size), 4),
        high=round(math.exp(size), 4),
        groups=len(by_group),
        rows=len(chosen),
    )


def _quantile(sizes_by_group: Sequence[Sequence[float]], share: float) -> float:
    """Return the least size that holds `share` of all, every group weighing the same."""
    weighted = sorted((size, 1.0 / len(sizes)) for sizes in sizes_by_group for size in sizes)
    needed, seen = share * len(sizes_by_group), 0.0
    for size, weight in weighted:
        seen += weight
        if seen >= needed - 1e-9:
            return size
    return weighted[-1][0]


def covered_ratio(
    regimes: Sequence[Regime],
    groups: Sequence[str],
    residual_C: Floats,
    bands: Sequence[Band],
) -> dict[str, float]:
    """Return, per recipe with a finite residual, the share of its runs inside their bands."""
    inside: dict[str, list[bool]] = {}
    for regime, group, residual in zip(regimes, groups, residual_C, strict=True):
        if math.isfinite(residual):
            low, high = narrowest_band(regime, bands)
            inside.setdefault(group, []).append(low <= math.exp(-residual) <= high)
    return {group: sum(each) / len(each) for group, each in inside.items()}
