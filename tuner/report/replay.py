"""A deployment's traffic simulated again, at the planned rate and at others.

A plan stores four figures of a latency. Simulated again from its spec, with the same engine model
(tuner/search/serve/simulation.py), the same instances serve the same requests, which gives the
whole distribution; other rates show where the instances saturate:

    goodput = (requests served per second) x (share of them within every stated SLO percentile)

The plan's instances are looked up among all priced options; if one is missing (another release,
other tables), nothing is simulated. Not covered: traces, which have their own rate, and remote
prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.serve import ServeDecision
from tuner.plans.serve import Latency
from tuner.search.serve.demand import PrefixHits
from tuner.search.serve.options import ServingPool
from tuner.search.serve.planned_instances import planned_groups, simulate_planned
from tuner.search.serve.simulation import latency_of
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.serving.spec import ServeSpec

FACTORS: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors on the planned traffic."""
QUANTILES: Final = tuple(
    round(share, 3) for share in (*np.linspace(0.0, 0.98, 50), 0.99, 0.995, 1.0)
)
"""Quantiles at which the distributions are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """Results of the same instances under other traffic."""

    factor: float
    """Multiple of the planned rate, or of the planned concurrency."""
    offered: float
    """The offered rate (requests/s) or concurrency."""
    requests_per_s: float
    good_per_s: float
    """Requests per second that meet the SLO."""
    ttft_s: Latency
    tpot_s: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of the repeated simulation."""

    is_open: bool
    """Open loop: requests arrive at a rate; otherwise a closed loop."""
    ttft_s: tuple[float, ...]
    """Seconds of TTFT at `QUANTILES`, under the planned traffic."""
    tpot_s: tuple[float, ...]
    rates: tuple[LoadPoint, ...]

    @property
    def as_planned(self) -> LoadPoint:
        """The result at the planned load."""
        return next(point for point in self.rates if point.factor == 1.0)


def replayed(
    spec: ServeSpec,
    priced_pools: Sequence[ServingPool],
    decision: ServeDecision,
    *,
    hits: PrefixHits | None = None,
) -> Replay | None:
    """Simulate a decision's instances again; None where that is not possible.

    Args:
        spec: that was planned.
        priced_pools: its pools.
        decision: to be simulated.
        hits: prefix cache hits of recorded prompts.

    Raises:
        SpecError: the traffic, a recorded routing or its placement cannot be used.
    """
    traffic = spec.goal.traffic
    planned = traffic.rate if traffic.rate is not None else traffic.concurrency
    if planned is None:
        return None
    problem = build_serve_problem(spec, tuple(priced_pools), SearchSettings(), hits=hits)
    known = planned_groups(problem, decision)
    if known is None:
        return None
    at_rates, at_planned = [], None
    for factor in FACTORS:
        simulated = simulate_planned(problem, decision, known, factor=factor)
        at_planned = simulated if factor == 1.0 else at_planned
        at_rates.append(
            LoadPoint(
                factor=factor,
                offered=planned * factor,
                requests_per_s=simulated.requests_per_s,
                good_per_s=simulated.requests_per_s * simulated.met_ratio,
                ttft_s=latency_of(simulated.ttft_s_R),
                tpot_s=latency_of(simulated.tpot_s_R),
            )
        )
    if at_planned is None or not len(at_planned.ttft_s_R) or not len(at_planned.tpot_s_R):
        return None
    return Replay(
        is_open=traffic.rate is not None,
        ttft_s=_quantile_traces(at_planned.ttft_s_R),
        tpot_s=_quantile_traces(at_planned.tpot_s_R),
        rates=tuple(at_rates),
    )


def _quantile_traces(values_R: Floats) -> tuple[float, ...]:
    return tuple(float(quantile) for quantile in np.quantile(values_R, QUANTILES))
