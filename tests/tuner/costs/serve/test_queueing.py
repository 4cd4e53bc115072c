import math

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.formulas import crossover_load, prefill_ttft_s
from tuner.costs.serve.queueing import erlang_c, mean_wait_s


def simulated_waits(
    *, rate_per_s: float, servers: int, exponential: bool, requests: int, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """First come, first served, by Kiefer and Wolfowitz's recursion; service of 1 s on average."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0 / rate_per_s, size=requests)
    services = rng.exponential(1.0, size=requests) if exponential else np.ones(requests)
    work = [0.0] * servers
    waits = np.empty(requests)
    for number, (gap, service) in enumerate(zip(gaps.tolist(), services.tolist(), strict=True)):
        work = sorted(max(0.0, left - gap) for left in work)
        waits[number] = work[0]
        work[0] += service
    return waits[requests // 20 :]


def test_one_server_by_hand() -> None:
    # M/M/1 at half load: rho / (1 - rho) services; M/D/1 half of that.
    assert mean_wait_s(rate_per_s=5.0, service_s=0.1) == pytest.approx(0.1)
    assert mean_wait_s(rate_per_s=5.0, service_s=0.1, service_cv2=0.0) == pytest.approx(0.05)


def test_erlang_by_hand() -> None:
    # Two servers, one erlang: B = (1/2) / (1 + 1 + 1/2) = 1/5, C = B / (1 - (1 - B) / 2) = 1/3.
    assert erlang_c(servers=2, offered=1.0) == pytest.approx(1.0 / 3.0)
    assert erlang_c(servers=1, offered=0.7) == pytest.approx(0.7)
    assert erlang_c(servers=3, offered=0.0) == 0.0
    assert erlang_c(servers=3, offered=3.0) == 1.0
    assert 0.0 < erlang_c(servers=500, offered=480.0) < 1.0


@each_row(
    ("servers", "exponential", "within"), [(1, False, 0.03), (3, True, 0.05), (3, False, 0.08)]
)
def test_waits_are_those_of_a_simulation(servers: int, exponential: bool, within: float) -> None:
    rate = 0.7 * servers
    waits = simulated_waits(
        rate_per_s=rate, servers=servers, exponential=exponential, requests=200_000, seed=11
    )
    expected = mean_wait_s(
        rate_per_s=rate, service_s=1.0, servers=servers, service_cv2=float(exponential)
    )
    assert waits.mean() == pytest.approx(expected, rel=within)


def test_overrun_servers_wait_for_ever() -> None:
    assert mean_wait_s(rate_per_s=2.0, service_s=1.0, servers=2) == math.inf
    assert mean_wait_s(rate_per_s=0.0, service_s=1.0) == 0.0


def test_time_to_first_token_as_distserve_writes_it() -> None:
    rate, prefill_s, speed_up = 5.0, 0.1, 1.5
    load = rate * prefill_s
    one = prefill_s + rate * prefill_s**2 / (2 * (1 - load))
    pipeline = prefill_s + rate * prefill_s**2 / (4 * (2 - load))
    tensor = prefill_s / speed_up + rate * prefill_s**2 / (2 * speed_up * (speed_up - load))
    assert prefill_ttft_s(rate_per_s=rate, prefill_s=prefill_s) == pytest.approx(one)
    assert prefill_ttft_s(rate_per_s=rate, prefill_s=prefill_s, stages=2) == pytest.approx(pipeline)
    assert prefill_ttft_s(rate_per_s=rate, prefill_s=prefill_s, speed_up=speed_up) == pytest.approx(
        tensor
    )


@each_row(("speed_up", "load"), [(1.2, 0.434), (1.5, 0.936), (1.7, 1.257), (1.9, 1.626)])
def test_pipelines_win_above_the_published_crossover(speed_up: float, load: float) -> None:
    assert crossover_load(speed_up) == pytest.approx(load, abs=6e-4)


def test_impossible_queues_are_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        erlang_c(servers=0, offered=1.0)
    with pytest.raises(ValueError, match="service takes time"):
        mean_wait_s(rate_per_s=1.0, service_s=0.0)
