"""Failures drawn from rates, for simulated runs."""

from collections.abc import Iterator

import numpy as np

from tests.tuner.faults.simulation import Failure
from tuner.faults.levels import CLASSES, FailureRates

DRAWN_AT_ONCE = 64
"""Failures; more is faster only in runs of more."""


def drawn_failures(rates: FailureRates, *, rng: np.random.Generator) -> Iterator[Failure]:
    """Draw failures without end, of any node."""
    shares = np.cumsum([rates.of(kind) / rates.per_s for kind in CLASSES])
    at_s = 0.0
    while True:
        gaps = rng.exponential(1.0 / rates.per_s, size=DRAWN_AT_ONCE).tolist()
        # The last share is one, whatever rounding makes of it.
        places = np.searchsorted(shares[:-1], rng.random(DRAWN_AT_ONCE), side="right").tolist()
        for gap_s, place in zip(gaps, places, strict=True):
            at_s += gap_s
            yield Failure(at_s=at_s, kind=CLASSES[place])
