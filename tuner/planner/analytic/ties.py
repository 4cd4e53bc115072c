"""Which found rows the model cannot tell from the chosen decision.

Letters: C candidates.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.plan import Band
from tuner.planner.analytic.asking import Site
from tuner.planner.analytic.candidates import DEGREES, TIME_DEGREES, Candidates
from tuner.planner.analytic.found import Search
from tuner.planner.ratios import Ratios, ratios_for
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Other combinations of degrees, each at its best, that may be as fast."""

    count: int = 0
    is_least: bool = False
    """There may be more that were left out as too slow to be listed."""


NO_TIES = Ties()


def ratios_on(spec: Spec, site: Site, *, band: Band) -> Ratios:
    """Return the bands of ratios on a site; the band is that of a single time."""
    return ratios_for(
        site.residuals,
        generation=str(site.sheet.generation),
        has_experts=spec.model.moe is not None,
        band=band,
    )


def ties_of(search: Search, ratios: Ratios, *, chosen: Candidates, step_s: float) -> Ties:
    """Count the rows that tie with a chosen candidate of so many seconds."""
    return Ties(
        count=int(tied_rows(search, ratios, chosen=chosen, step_s=step_s).sum()),
        is_least=bool(step_s * ratios.farthest > search.complete_s),
    )


def tied_rows(
    search: Search, ratios: Ratios, *, chosen: Candidates, step_s: float
) -> npt.NDArray[np.bool_]:
    """Say of every found row whether it ties with a chosen candidate of other degrees."""
    if search.found is None:
        return np.zeros(0, dtype=bool)
    candidates, ratio_C = search.found.candidates, search.found.step_s / step_s
    own_C = _equal(candidates, chosen, DEGREES)
    same_C = _equal(candidates, chosen, (*TIME_DEGREES, *candidates.ways))
    low_C, high_C = (
        np.where(same_C, ratios.same_kernels[edge], ratios.other_kernels[edge]) * ratio_C
        for edge in (0, 1)
    )
    tied_C: npt.NDArray[np.bool_] = ~own_C & (low_C <= 1.0) & (high_C >= 1.0)
    return tied_C


def _equal(
    candidates: Candidates, chosen: Candidates, names: tuple[str, ...]
) -> npt.NDArray[np.bool_]:
    equal_C = np.ones(len(candidates), dtype=bool)
    for name in names:
        columns = candidates.rows if name in candidates.rows else candidates.ways
        own = chosen.rows if name in chosen.rows else chosen.ways
        equal_C &= columns[name] == own[name][0]
    return equal_C
