"""Error bands from held-out residuals: split conformal prediction, per set of known facts.

A band is [exp(-q), exp(q)] of measured over predicted seconds, where q is the quantile of the size
of held-out residuals that covers the stated share of a new recipe, ceil((n + 1) share) of n recipes
(Vovk et al., "Algorithmic Learning in a Random World", 2005). Recipes have equal weight, however
many runs they have. With too few recipes there is no band, and that of a more general regime is
used.

The known facts of a regime determine the residuals of its band, which are always of its own kind of
model (with experts or dense):

    its family, device generation and release   recipes held out
    its family and device generation            whole releases held out
    its family                                  whole generations of devices held out
    its device generation                       whole families held out
    nothing                                     families and generations held out, both at once

There are many releases, and so a new one errs like all of them together. Of generations and
families there are few, whose errors differ: a new one is taken to err like the worst held out.

Letters: C runs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.costs.train.calibration import Band, Regime, Where, narrowest_band

STATED: Final = 0.9
FEWEST: Final = 9
"""Recipes that a band needs: the least of which nine of ten new ones can be held."""

LEVELS: Final[Mapping[tuple[str, ...], str]] = {
    ("family", "generation", "release", "model_kind"): "group",
    ("family", "generation", "model_kind"): "release",
    ("family", "model_kind"): "generation",
    ("generation", "model_kind"): "family",
    ("model_kind",): "both",
}
"""Known facts, and what was held out to estimate their accuracy."""
WORST_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "group": (),
    "release": (),
    "generation": ("generation",),
    "family": ("family",),
    "both": ("family", "generation"),
}
"""Facts that tell apart the groups of which the worst counts; none: all recipes together."""


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
    for facts, level in LEVELS.items():
        wheres = [_where(regime, facts) for regime in regimes]
        for where in dict.fromkeys(where for where in wheres if where is not None):
            # Without any known release there is none to hold out.
            is_unreleased = level == "release" and where.family not in has_release
            key = "group" if is_unreleased else level
            sizes: dict[tuple[str, ...], dict[str, list[float]]] = {(): {}}
            for regime, group, residual, run_where in zip(
                regimes, groups, residual_by[key], wheres, strict=True
            ):
                if run_where == where and np.isfinite(residual):
                    together = tuple(str(getattr(regime, name)) for name in WORST_OF[key])
                    for chosen in {(), together}:
                        by_recipe = sizes.setdefault(chosen, {})
                        by_recipe.setdefault(group, []).append(abs(float(residual)))
            band_sizes = [_size(list(recipes.values()), stated) for recipes in sizes.values()]
            if band_sizes[0] is not None:
                size = max(band_size for band_size in band_sizes if band_size is not None)
                every = sizes[()].values()
                bands.append(
                    Band(
                        where=where,
                        low=round(math.exp(-size), 4),
                        high=round(math.exp(size), 4),
                        groups=len(every),
                        rows=sum(map(len, every)),
                    )
                )
    return tuple(bands)


def _where(regime: Regime, facts: tuple[str, ...]) -> Where | None:
    values = {name: str(getattr(regime, name)) for name in facts}
    return Where(**values) if all(values.values()) else None


def _size(by_recipe: Sequence[Sequence[float]], stated: float) -> float | None:
    """Return the size that holds a new recipe as often as stated; None with too few recipes."""
    rank = math.ceil((len(by_recipe) + 1) * stated)
    if len(by_recipe) < FEWEST or rank > len(by_recipe):
        return None
    return _quantile(by_recipe, rank / len(by_recipe))


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
    return {group: sum(are_inside) / len(are_inside) for group, are_inside in inside.items()}
