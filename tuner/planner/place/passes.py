"""The passes that a dispatch rule is weighed on while a plan is made."""

from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.spec.place import Dispatch
from tuner.spec.place_dispatch import UNLAUNCHED

MOST_PASSES: Final = 32
"""Weighed under a rule that looks at each pass by itself."""

MOST_SOLVED_PASSES: Final = 8
"""Weighed where each takes a linear program for every layer."""


def weighs_passes(dispatch: str) -> bool:
    """Whether a rule looks at each pass by itself, so that the mean pass does not stand for it."""
    return dispatch in PASS_BY_PASS or dispatch in {rule.value for rule in UNLAUNCHED}


def planned_passes(one: WorkloadEvidence, dispatch: str) -> Floats:
    """Return what a rule is weighed on: the mean pass, or passes where it differs from one to next.

    Rules that look at each pass by itself, at which experts it reads, whether it is uneven or how
    its counts are split best, are weighed on recorded passes, or on draws from the mean where one
    pass was recorded.
    """
    if not weighs_passes(dispatch):
        return one.planned_LE[None]
    planned_PLE = one.whole_PLE[: one.planned_passes] if one.is_split else one.planned_LE[None]
    most = MOST_SOLVED_PASSES if dispatch in PASS_BY_PASS else MOST_PASSES
    taken = np.linspace(0, len(planned_PLE) - 1, most).round().astype(np.int64)
    is_drawn = dispatch == Dispatch.ACTIVATED.value and not one.is_counted
    return planned_PLE[taken if is_drawn else np.unique(taken)]
