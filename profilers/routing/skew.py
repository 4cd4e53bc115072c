"""Skew of a recording: the load of the most-loaded expert over the mean load; 1 is balanced."""

import numpy as np

from profilers.records import Record
from profilers.routing.recording import Counts, Floats, Recording


class Skew(Record):
    """Load of the most-loaded expert over the mean."""

    median: float
    """Median over layers, over the whole recording."""
    worst: float
    """Maximum over layers, over the whole recording."""
    pass_median: float
    """Median over all layers of all passes."""
    pass_p99: float
    """99th percentile over all layers of all passes."""


def skew(recording: Recording) -> Skew:
    """Return how far a recording is from balanced."""
    of_layer = _peak_over_mean(recording.count_LE)
    of_pass = _peak_over_mean(recording.count_PLE)
    return Skew(
        median=float(np.median(of_layer)),
        worst=float(of_layer.max()),
        pass_median=float(np.median(of_pass)),
        pass_p99=float(np.quantile(of_pass, 0.99)),
    )


def _peak_over_mean(count_XE: Counts) -> Floats:
    """Return the load of the most-loaded expert over the mean, for every row that has tokens."""
    rows = count_XE.reshape(-1, count_XE.shape[-1])
    rows = rows[rows.any(axis=1)]
    return np.asarray(rows.max(axis=1) / rows.mean(axis=1), dtype=np.float64)
