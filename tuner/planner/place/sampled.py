"""The sampled tokens of a workload: planned from, judged on, or all."""

from enum import StrEnum

import numpy as np

from solvers.placement.ranks import Ints
from tuner.planner.place.evidence import WorkloadEvidence


class Tokens(StrEnum):
    """Which of the sampled tokens."""

    PLANNED = "planned"
    JUDGED = "judged"
    ALL = "all"


def sampled_LTK(one: WorkloadEvidence, tokens: Tokens) -> Ints:
    """Return chosen experts of sampled tokens, [L][T][K]."""
    found = {
        Tokens.PLANNED: one.planned_LTK,
        Tokens.JUDGED: one.judged_LTK,
        Tokens.ALL: one.recording.token_LTK,
    }[tokens]
    if found is None:
        raise ValueError(f"{one.name!r} holds no sampled tokens")
    return np.asarray(found, dtype=np.int64)
