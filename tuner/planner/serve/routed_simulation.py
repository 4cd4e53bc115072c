"""Simulates the traffic on all instances of a mode at once, as its router spreads it.

Large deployments are simulated on a share of their instances, which gets that share of the
requests: a router with fewer to choose from evens out less, so that waits are not too short. The
share is small enough that each rank gets the requests it needs (`per_rank`) within all that are
simulated, where the numbers of instances have such a divisor.

Letters: R requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.costs.kv_transfer import whole_s
from tuner.costs.serving.engine import Batching
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.kv_transfers import HandOvers
from tuner.planner.serve.routers import RouterChoice
from tuner.planner.serve.simulation import (
    MOST_REQUESTS,
    Floats,
    Group,
    Ints,
    Played,
    most_requests,
    per_rank,
    played_of,
    prompt_times,
    thinned,
    times_of,
)
from tuner.serve_plan import Role
from tuner.simulate.serving.batching import Rules
from tuner.simulate.serving.client import ROUNDS, client_of, engine_rules, seen_ttft_s
from tuner.simulate.serving.load import Requests, Served
from tuner.simulate.serving.routed import Instances, Readers, Routed, Routing, simulate_routed
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.routers import RouterPolicy

MOST_RANKS: Final = 32
"""Simulated at once, where instances have fewer."""


def policy_of(router: RouterChoice, groups: Sequence[Group]) -> RouterPolicy:
    """Return the policy of aggregated or prefill instances: one kind or several."""
    own = [group for group in groups if group.option.role is not Role.DECODE]
    return router.policy if len(own) == 1 else router.mixed_policy


def played_routed(
    groups: Sequence[Group],
    *,
    router: RouterChoice,
    hand_overs: HandOvers,
    goal: ServeGoal,
    demand: Demand,
) -> Played:
    """Simulate instances behind their router.

    Args:
        groups: equal instances each, aggregated ones or prefill and decode ones.
        router: how requests are spread.
        hand_overs: what moving a cache takes.
        goal: with targets and traffic.
        demand: the traffic in numbers.
    """
    answering = [group for group in groups if group.option.role is not Role.PREFILL]
    reading = [group for group in groups if group.option.role is Role.PREFILL]
    is_open = demand.concurrency is None
    every = _part(
        groups,
        ranks=sum(group.ranks for group in answering),
        num_requests=_open_requests(answering, reading, 1, goal) if is_open else 0,
    )
    requests = _requests(answering, every=every, reading=reading, goal=goal, demand=demand)
    found = simulate_routed(
        requests,
        kinds=[_instances(group, requests, every, is_apart=bool(reading)) for group in answering],
        readers=[
            _readers(group, answering, requests, every, hand_overs=hand_overs, demand=demand)
            for group in reading
        ],
        routing=Routing(
            policy=policy_of(router, groups),
            decode_policy=router.decode_policy or RouterPolicy.LEAST_REQUESTS,
            holds_prefill=router.holds_prefill,
            # Hits of recorded prompts were counted under the router already.
            has_sessions=router.has_sessions and demand.cached_N is None,
        ),
        concurrency=_concurrency(demand, every),
    )
    rate = demand.rate_per_s
    if demand.concurrency is not None:
        span_s = float(found.served.end_s_R.max() - found.served.arrival_s_R.min())
        rate = every * len(found.served.end_s_R) / max(span_s, 1e-9)
    ttft_s_R, tpot_s_R = _seen(found, answering, every)
    return played_of(
        ttft_s_R,
        tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(found.served.output_R.mean()),
    )


def _part(groups: Sequence[Group], *, ranks: int, num_requests: int) -> int:
    """Return the divisor of all counts by which ranks and requests become few enough.

    Two instances of every kind are left, among which the router chooses.
    """
    fewest = min(group.count for group in groups)
    divisors = [
        every
        for every in range(1, max(fewest // 2, 1) + 1)
        if all(group.count % every == 0 for group in groups)
    ]
    by_ranks = max(every for every in divisors if every <= max(-(-ranks // MOST_RANKS), 1))
    wanted = -(-num_requests // MOST_REQUESTS)
    by_requests = next((every for every in divisors if every >= wanted), divisors[-1])
    return max(by_ranks, by_requests)


def _concurrency(demand: Demand, every: int) -> int:
    return max(1, (demand.concurrency or 1) // every)


def _requests(
    answering: Sequence[Group],
    *,
    every: int,
    reading: Sequence[Group],
    goal: ServeGoal,
    demand: Demand,
) -> Requests:
    """Draw what the simulated instances get: of the rank with the fewest as many as elsewhere."""
    count = _open_requests(answering, reading, every, goal)
    if demand.concurrency is not None:
        count = ROUNDS * _concurrency(demand, every)
    return thinned(
        goal,
        # A prefill worker's seconds know what the cache holds.
        replace(demand, computed_tokens=demand.input_tokens, cached_N=None) if reading else demand,
        count=min(most_requests(goal), count),
        every=every,
        most_tokens=min(group.option.kv_tokens for group in answering),
    )


def _open_requests(
    answering: Sequence[Group], reading: Sequence[Group], every: int, goal: ServeGoal
) -> int:
    """Return the requests of an open load of which every rank gets enough."""
    least = min(_least_share(groups, every) for groups in (answering, reading))
    return round(per_rank(goal) / least)


def _least_share(groups: Sequence[Group], every: int) -> float:
    """Return the share of a role's requests that the rank with the fewest gets; 1 without any."""
    total = sum(group.count // every * group.option.rate_per_s for group in groups)
    return min(
        (group.option.rate_per_s / group.option.degrees.attention_data / total for group in groups),
        default=1.0,
    )


def _instances(group: Group, requests: Requests, every: int, *, is_apart: bool) -> Instances:
    option = group.option
    if is_apart:
        rules = Rules(
            batching=Batching.CHUNKED,
            step_tokens=option.running + 1,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
            reserves_answers=False,
            preempts=False,
        )
    else:
        rules = engine_rules(
            option.iteration.engine,
            step_tokens=option.step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
            is_chunked=option.is_chunked,
        )
    return Instances(
        count=group.count // every,
        ranks=option.degrees.attention_data,
        times=times_of(
            option,
            requests,
            most_tokens=option.running + (1 if is_apart else option.step_tokens),
            most_running=option.running,
        ),
        rules=rules,
        weight=float(option.running * option.degrees.attention_data),
    )


def _readers(
    group: Group,
    answering: Sequence[Group],
    requests: Requests,
    every: int,
    *,
    hand_overs: HandOvers,
    demand: Demand,
) -> Readers:
    option = group.option
    paths = [
        (
            hand_overs.moved(option, other.option).busiest / hand_overs.tokens,
            hand_overs.path(option, other.option),
        )
        for other in answering
    ]
    uncached = replace(demand, computed_tokens=demand.input_tokens)
    return Readers(
        count=group.count // every,
        ranks=option.degrees.attention_data,
        prompt_s=prompt_times(option, demand, requests),
        whole_prompt_s=prompt_times(option, uncached, requests),
        handed_s=[
            lambda tokens, each=each, path=path: whole_s(each * tokens, path=path)  # type: ignore[misc]  # bound early
            for each, path in paths
        ],
        weight=float(option.running * option.degrees.attention_data),
        slot_ratio=option.iteration.slot_ratio,
    )


def _seen(found: Routed, answering: Sequence[Group], every: int) -> tuple[Floats, Floats]:
    """What clients see of each kind of instances, of all kinds together."""
    kind_of = np.repeat(np.arange(len(answering)), [group.count // every for group in answering])
    ttft, tpot = [], []
    for number, group in enumerate(answering):
        own: Ints = np.flatnonzero(kind_of[found.place_R] == number)
        if not len(own):
            continue
        part = Served(
            arrival_s_R=found.served.arrival_s_R[own],
            first_token_s_R=found.served.first_token_s_R[own],
            end_s_R=found.served.end_s_R[own],
            output_R=found.served.output_R[own],
        )
        ttft.append(seen_ttft_s(part, client=client_of(group.option.iteration.engine)))
        tpot.append(part.tpot_s_R)
    return np.concatenate(ttft), np.concatenate(tpot)
