"""The sampled tokens of a workload: fit, hold-out, or all."""

from enum import StrEnum

import numpy as np

from solvers.placement.ranks import Ints
from tuner.search.place.evidence import WorkloadEvidence


class Tokens(StrEnum):
    """Which of the sampled tokens."""

    FIT = "fit"
    HOLDOUT = "holdout"
    ALL = "all"


def sampled_LTK(one: WorkloadEvidence, tokens: Tokens) -> Ints:
    """Return chosen experts of sampled tokens, [L][T][K]."""
    samples_LTK = {
        Tokens.FIT: one.fit_LTK,
        Tokens.HOLDOUT: one.holdout_LTK,
        Tokens.ALL: one.recording.token_LTK,
    }[tokens]
    if samples_LTK is None:
        raise ValueError(f"{one.name!r} holds no sampled tokens")
    return np.asarray(samples_LTK, dtype=np.int64)
