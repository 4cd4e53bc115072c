"""Routers against closed forms, against single engines, and against each other."""

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from tests.expect import present
from tuner.catalog.serve_rules.traits import Batching
from tuner.costs.serve.queueing import mean_wait_s
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.routed import (
    PrefillInstances,
    RequestRouting,
    Routed,
    RoutedInstances,
    simulate_routed,
)
from tuner.simulate.serving.routing import Router
from tuner.simulate.serving.steps import StepTimes
from tuner.spec.serving.routers import RouterPolicy

Floats = npt.NDArray[np.float64]
SERVICE_S, TOKEN_S = 0.01, 1e-6


def times(*, step_s: float, token_s: float = 0.0, past_s: float = 0.0) -> StepTimes:
    return StepTimes(
        linear_s=[step_s + token_s * tokens for tokens in range(4001)],
        head_s=[0.0] * 1001,
        decode_s=[[past_s * num * past for past in (0.0, 1e6)] for num in range(1001)],
        past_step=1e6,
        prompt_s=[0.0, 0.0],
        prompt_step=1e6,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def answering(
    count: int, *, step_s: float, weight: float = 1.0, **rules: object
) -> RoutedInstances:
    fields = {
        "batching": Batching.CHUNKED,
        "step_tokens": 2000,
        "reserves_output": False,
        "kv_tokens": 1e9,
    } | rules
    return RoutedInstances(
        count=count,
        ranks=1,
        times=times(step_s=step_s, token_s=1e-6, past_s=1e-9),
        rules=Rules(**fields),  # type: ignore[arg-type]  # named by the tests
        weight=weight,
    )


def drawn(count: int, *, rate_per_s: float, seed: int = 3) -> Requests:
    rng = np.random.default_rng(seed)
    return Requests(
        input_R=rng.integers(10, 1500, count),
        output_R=rng.integers(1, 200, count),
        arrival_s_R=np.cumsum(rng.exponential(1.0 / rate_per_s, count)),
    )


def queued(policy: RouterPolicy, *, servers: int, load: float, count: int) -> Floats:
    """Waits for prefill instances that read prompts of exponential lengths one by one."""
    rng = np.random.default_rng(1)
    requests = Requests(
        input_R=np.maximum(np.rint(rng.exponential(SERVICE_S / TOKEN_S, count)), 1).astype(int),
        output_R=np.full(count, 2),
        arrival_s_R=np.cumsum(rng.exponential(SERVICE_S / (load * servers), count)),
    )
    found = simulate_routed(
        requests,
        kinds=(
            RoutedInstances(
                count=1,
                ranks=1,
                times=times(step_s=1e-12),
                rules=Rules(batching=Batching.CHUNKED, step_tokens=100, preempts=False),
                weight=1.0,
            ),
        ),
        prefills=(
            PrefillInstances(
                count=servers,
                ranks=1,
                prompt_s=lambda tokens, busy: TOKEN_S * tokens,
                whole_prompt_s=lambda tokens, busy: TOKEN_S * tokens,
                kv_transfer_s_by_kind=(lambda tokens: 0.0,),
                weight=1.0,
            ),
        ),
        routing=RequestRouting(policy=policy),
    )
    return np.asarray(found.served.ttft_s_R - TOKEN_S * requests.input_R)


def in_turn_s(*, servers: int, load: float) -> float:
    """Mean wait of one of so many that are served in turn: arrivals are Erlang's, GI/M/1."""
    sigma = load
    for _ in range(500):
        sigma = (servers * load / (servers * load + 1.0 - sigma)) ** servers
    return SERVICE_S * sigma / (1.0 - sigma)


def two_choices_s(*, load: float) -> float:
    """Mean wait behind the less loaded of two of many servers (Mitzenmacher, 2001, lemma 1)."""
    queue = sum(load ** (2.0**length - 1.0) for length in range(1, 30))
    return float(SERVICE_S * (queue / load - 1.0))


@pytest.mark.parametrize(
    ("load", "count"), [(0.5, 12_000), pytest.param(0.8, 60_000, marks=pytest.mark.slow)]
)
def test_waits_follow_the_closed_form_of_every_policy(load: float, count: int) -> None:
    alone = mean_wait_s(rate_per_s=load / SERVICE_S, service_s=SERVICE_S)
    assert alone == pytest.approx(SERVICE_S * load / (1.0 - load))
    waits = {
        policy: float(queued(policy, servers=40, load=load, count=count).mean())
        for policy in (RouterPolicy.RANDOM, RouterPolicy.POWER_OF_TWO)
    }
    assert waits[RouterPolicy.RANDOM] == pytest.approx(alone, rel=0.05)
    # Forty servers are not infinitely many: they wait up to 5 % longer.
    assert waits[RouterPolicy.POWER_OF_TWO] == pytest.approx(two_choices_s(load=load), rel=0.08)
    found = float(queued(RouterPolicy.ROUND_ROBIN, servers=4, load=load, count=count).mean())
    assert found == pytest.approx(in_turn_s(servers=4, load=load), rel=0.05)


@pytest.mark.parametrize("count", [10_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_the_least_loaded_instance_waits_between_one_queue_for_all_and_two_choices(
    count: int,
) -> None:
    load, servers = 0.9, 4
    one_queue = mean_wait_s(
        rate_per_s=load * servers / SERVICE_S, service_s=SERVICE_S, servers=servers
    )
    least, two, even, chance = (
        float(queued(policy, servers=servers, load=load, count=count).mean())
        for policy in (
            RouterPolicy.LEAST_REQUESTS,
            RouterPolicy.POWER_OF_TWO,
            RouterPolicy.ROUND_ROBIN,
            RouterPolicy.RANDOM,
        )
    )
    assert one_queue * 0.9 < least < two < even < chance
    # Two random servers, the shorter queue: within 4 % of one queue at 90 % load per server pair.
    assert least < 1.4 * one_queue


@pytest.mark.parametrize("kv_tokens", [1e9, 4000.0])
def test_instances_in_turn_are_single_engines_with_every_nth_request(kv_tokens: float) -> None:
    # Request by request, preempted ones included: the order of events loses nothing.
    requests = drawn(1500, rate_per_s=12.0)
    kind = answering(3, step_s=0.01, kv_tokens=kv_tokens, most_running=40)
    found = simulate_routed(
        requests, kinds=(kind,), routing=RequestRouting(policy=RouterPolicy.ROUND_ROBIN)
    )
    for place in range(3):
        own = slice(place, None, 3)
        alone = simulate(
            Requests(
                input_R=requests.input_R[own],
                output_R=requests.output_R[own],
                arrival_s_R=present(requests.arrival_s_R)[own],
            ),
            times=kind.times,
            rules=kind.rules,
        )
        assert found.served.end_s_R[own] == pytest.approx(alone.end_s_R, abs=1e-9)
        assert found.served.ttft_s_R[own] == pytest.approx(alone.ttft_s_R, abs=1e-9)
    assert Counter(found.place_R.tolist()) == {0: 500, 1: 500, 2: 500}


def shares(policy: RouterPolicy, *, rate_per_s: float, weights: tuple[float, float]) -> Routed:
    fast, slow = (
        answering(1, step_s=step_s, weight=weight, most_running=int(weight))
        for step_s, weight in zip((0.01, 0.02), weights, strict=True)
    )
    return simulate_routed(
        drawn(6000, rate_per_s=rate_per_s),
        kinds=(fast, slow),
        routing=RequestRouting(policy=policy),
    )


def test_a_slower_instance_gets_less_only_where_the_router_looks_at_load() -> None:
    # Equal requests outstanding, unequal speed: twice as long an answer, half as many a second.
    rate, weights = 30.0, (60.0, 60.0)
    even, least, two = (
        float((shares(policy, rate_per_s=rate, weights=weights).place_R == 0).mean())
        for policy in (
            RouterPolicy.ROUND_ROBIN,
            RouterPolicy.LEAST_REQUESTS,
            RouterPolicy.POWER_OF_TWO,
        )
    )
    assert even == 0.5
    assert least == pytest.approx(2.0 / 3.0, abs=0.03)
    assert two == pytest.approx(least, abs=0.01)


def test_weights_fill_instances_of_unequal_places_alike() -> None:
    # 60 and 15 places of unequal speed: 8 requests of 9 go to the larger where both are full alike;
    # unweighted routing sends the small one as many as the large one has, and they wait there.
    weighted, plain = (
        shares(policy, rate_per_s=45.0, weights=(60.0, 15.0))
        for policy in (RouterPolicy.WEIGHTED_LEAST_REQUESTS, RouterPolicy.LEAST_REQUESTS)
    )
    assert float((weighted.place_R == 0).mean()) == pytest.approx(8.0 / 9.0, abs=0.02)
    last = [float(np.quantile(one.served.ttft_s_R, 0.9)) for one in (weighted, plain)]
    assert last[0] < 0.5 * last[1]


def test_sessions_meet_their_prefix_where_the_router_looks_for_it() -> None:
    count, servers = 4000, 5
    asked = drawn(count, rate_per_s=40.0)
    requests = Requests(
        input_R=asked.input_R,
        output_R=asked.output_R,
        arrival_s_R=asked.arrival_s_R,
        cached_R=asked.input_R // 2,
    )
    kind = answering(servers, step_s=0.01, most_running=200)
    found = {
        policy: simulate_routed(
            requests, kinds=(kind,), routing=RequestRouting(policy=policy, has_sessions=True)
        )
        for policy in (RouterPolicy.RANDOM, RouterPolicy.CACHE_AWARE)
    }
    assert found[RouterPolicy.RANDOM].hit_ratio == pytest.approx(1.0 / servers, abs=0.02)
    assert found[RouterPolicy.CACHE_AWARE].hit_ratio > 0.99
    ttft = {policy: one.served.ttft_s_R.mean() for policy, one in found.items()}
    assert ttft[RouterPolicy.CACHE_AWARE] < ttft[RouterPolicy.RANDOM]


def test_a_prefix_is_left_where_too_many_wait_for_it() -> None:
    router = Router(
        policy=RouterPolicy.CACHE_AWARE, weight_N=(1.0, 1.0), rng=np.random.default_rng(0)
    )
    places = [router.send(0) for _ in range(100)]
    # 65 to none is uneven, by more than 64 and by half; from there on they stay 64 apart.
    assert places == [0] * 65 + [1, 0] * 17 + [1]


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    requests = Requests(input_R=np.full(400, 100), output_R=np.full(400, 50))
    found = simulate_routed(
        requests,
        kinds=(answering(2, step_s=0.01),),
        routing=RequestRouting(policy=RouterPolicy.LEAST_REQUESTS),
        concurrency=20,
    ).served
    events = sorted([(at, 1) for at in found.arrival_s_R] + [(at, -1) for at in found.end_s_R])
    under_way = np.cumsum([change for _, change in events])
    assert under_way.max() == 20
    assert float(np.median(under_way)) >= 19


def test_turns_of_a_closed_loop_stay_in_order_on_whichever_instance() -> None:
    after_R = np.array([turn - 3 if turn >= 3 else -1 for turn in range(60)])
    requests = Requests(
        input_R=np.full(60, 500),
        output_R=np.arange(60) % 7 + 20,
        arrival_s_R=None,
        after_R=after_R,
    )
    kinds = (answering(2, step_s=0.01), answering(1, step_s=0.03))
    served = simulate_routed(
        requests,
        kinds=kinds,
        routing=RequestRouting(policy=RouterPolicy.LEAST_REQUESTS),
        concurrency=8,
    ).served
    has_before = after_R >= 0
    assert (served.arrival_s_R[has_before] >= served.end_s_R[after_R[has_before]] - 1e-12).all()
