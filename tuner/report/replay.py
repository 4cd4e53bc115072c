"""A deployment's traffic played again: what every request meets, and what other rates would meet.

A plan keeps four figures of a latency. Played again from its spec, with the same engine model
(tuner/planner/serve/simulation.py), the same instances meet the same requests, and the whole
distribution can be drawn; played at other rates, the same instances show where they give way:

    goodput = (requests served a second) x (share of them inside every stated percentile's target)

The stated instances are looked up among all that can be priced; where one is not found again
(another release, other tables), nothing is played. Not covered: traces, whose rate is their own,
and long prompts on another pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.planner.serve.demand import PrefixHits, demand_of, with_hits
from tuner.planner.serve.instances import instances_of
from tuner.planner.serve.options import PoolSite
from tuner.planner.serve.simulation import Group, Played, latency_of
from tuner.planner.serve.solve_mode import Question, Settings, play, question_of, router_for
from tuner.serve_plan import Instances, Latency, ServeDecision
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.read import ServeSpec

Floats = npt.NDArray[np.float64]

FACTORS: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Of the traffic that the plan was asked to serve."""
SHARES: Final = tuple(round(share, 3) for share in (*np.linspace(0.0, 0.98, 50), 0.99, 0.995, 1.0))
"""Of requests, at which the distributions are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRate:
    """The same instances under other traffic."""

    factor: float
    """Of the planned rate, or of the planned number of requests under way."""
    asked: float
    """That rate or number."""
    requests_per_s: float
    good_per_s: float
    """Of those, what meets every target."""
    ttft_s: Latency
    tpot_s: Latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What playing again has shown."""

    is_open: bool
    """Requests arrive at a rate; otherwise so many are under way."""
    ttft_s: tuple[float, ...]
    """By `SHARES`, under the planned traffic."""
    tpot_s: tuple[float, ...]
    rates: tuple[AtRate, ...]

    @property
    def as_planned(self) -> AtRate:
        """The planned traffic itself."""
        return next(one for one in self.rates if one.factor == 1.0)


def at_planned_rate(spec: ServeSpec, planned: ServeGoal) -> ServeSpec:
    """Return the spec with the rate that was found, where the rate is the goal."""
    if planned.objective != "rate":
        return spec
    traffic = spec.goal.traffic.model_copy(update={"rate": planned.traffic.rate})
    return replace(spec, goal=spec.goal.model_copy(update={"traffic": traffic}))


def replayed(
    spec: ServeSpec,
    sites: Sequence[PoolSite],
    decision: ServeDecision,
    *,
    hits: PrefixHits | None = None,
) -> Replay | None:
    """Play a decision's instances again; None where they cannot be.

    Args:
        spec: that was planned.
        sites: its pools.
        decision: that is played.
        hits: what prefix caches hold of recorded prompts.

    Raises:
        SpecError: the traffic, a recorded routing or its placement cannot be used.
    """
    traffic = spec.goal.traffic
    planned = traffic.rate if traffic.rate is not None else traffic.concurrency
    if planned is None or decision.mode in ("prefill_offload", "attention_expert"):
        return None
    question = question_of(spec, tuple(sites), Settings(), hits=hits)
    groups = [_found(question, group) for group in decision.instances]
    known = [group for group in groups if group is not None]
    if len(known) < len(groups):
        return None
    at_rates, planned_play = [], None
    for factor in FACTORS:
        played = _played(question, decision, known, factor=factor)
        planned_play = played if factor == 1.0 else planned_play
        at_rates.append(
            AtRate(
                factor=factor,
                asked=planned * factor,
                requests_per_s=played.requests_per_s,
                good_per_s=played.requests_per_s * played.met_ratio,
                ttft_s=latency_of(played.ttft_s_R),
                tpot_s=latency_of(played.tpot_s_R),
            )
        )
    if planned_play is None or not len(planned_play.ttft_s_R) or not len(planned_play.tpot_s_R):
        return None
    return Replay(
        is_open=traffic.rate is not None,
        ttft_s=_quantiles(planned_play.ttft_s_R),
        tpot_s=_quantiles(planned_play.tpot_s_R),
        rates=tuple(at_rates),
    )


def _found(question: Question, wanted: Instances) -> Group | None:
    """Return the priced way to run an instance as the plan states it; None without one."""
    for option in question.options.options:
        if instances_of(option, count=wanted.count, island=wanted.island) == wanted:
            return Group(option=option, count=wanted.count, island=wanted.island)
    return None


def _played(
    question: Question, decision: ServeDecision, groups: Sequence[Group], *, factor: float
) -> Played:
    goal = question.spec.goal
    own = goal.traffic
    traffic = own.model_copy(
        update={"rate": own.rate * factor}
        if own.rate is not None
        else {"concurrency": max(1, round((own.concurrency or 1) * factor))}
    )
    goal = goal.model_copy(update={"traffic": traffic})
    model = question.spec.model
    longest = min(goal.max_model_len or model.max_position, model.max_position)
    demand = demand_of(goal, longest=longest)
    if question.hits is not None:
        demand = with_hits(demand, question.hits)
    asked = replace(question, spec=replace(question.spec, goal=goal), demand=demand)
    router = router_for(asked, decision.mode, groups)
    if decision.router is not None:
        router = replace(
            router,
            policy=decision.router.policy,
            mixed_policy=decision.router.policy,
            decode_policy=decision.router.decode_policy,
        )
    return play(asked, decision.mode, groups, router=router)


def _quantiles(values_R: Floats) -> tuple[float, ...]:
    return tuple(float(one) for one in np.quantile(values_R, SHARES))
