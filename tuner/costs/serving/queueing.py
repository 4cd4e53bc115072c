"""How long requests wait, in closed form, for instances that are steady and nearly so.

    rate   arrivals per second, to all servers together
    servers of one queue, each with a mean service time; utilisation rho = rate service / servers
    ca2, cs2   squared coefficients of variation of arrivals and of service times

- M/M/c: Erlang's formula for the share that waits, C(c, a), a = rate service (Erlang, 1917):
  mean wait C service / (c - a); those that wait do so for an exponential time.
- M/D/1: Pollaczek and Khinchine, wait rho service / (2 (1 - rho)).
- G/G/c: Allen and Cunneen (Allen, Probability, Statistics and Queueing Theory, 1990): the wait of
  M/M/c times (ca2 + cs2) / 2. Exact for M/M/c and M/G/1, an approximation otherwise: a few percent
  when busy, more where few wait.

Prefill in one order and one prompt at a time is near M/D/1 for equal prompts; batches, chunks and
bursts are what the simulation is for. At or above a utilisation of 1 the wait is infinite.
"""

import math


def erlang_c(*, servers: int, offered: float) -> float:
    """The share of requests that wait, with Poisson arrivals and exponential service.

    Model:   B(0) = 1, B(k) = a B(k - 1) / (k + a B(k - 1)); C = B / (1 - rho (1 - B))
    Source:  Erlang's recursion for the loss formula, and its relation to the delay formula.
    Valid:   0 <= offered = rate times service time; 1 where it is not below the servers.
    """
    if servers < 1 or offered < 0.0:
        raise ValueError(f"servers {servers} must be at least 1, offered {offered} at least 0")
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


def mean_wait_s(
    *,
    rate_per_s: float,
    service_s: float,
    servers: int = 1,
    arrival_cv2: float = 1.0,
    service_cv2: float = 1.0,
) -> float:
    """Mean time in queue, in seconds, by Allen and Cunneen; `inf` when the servers are overrun.

    M/M/c by default; M/D/1 with `service_cv2=0`, one server.
    """
    waits, among_s = _waiting(rate_per_s, service_s, servers, arrival_cv2, service_cv2)
    return 0.0 if waits == 0.0 else waits * among_s


def _waiting(
    rate_per_s: float, service_s: float, servers: int, arrival_cv2: float, service_cv2: float
) -> tuple[float, float]:
    """The share that waits, and the mean wait among those."""
    if rate_per_s < 0.0 or service_s <= 0.0 or min(arrival_cv2, service_cv2) < 0.0:
        raise ValueError(
            f"rate_per_s {rate_per_s}, service_s {service_s}, squared variations {arrival_cv2} "
            f"and {service_cv2}: none may be negative, and service takes time"
        )
    offered = rate_per_s * service_s
    waits = erlang_c(servers=servers, offered=offered)
    if offered >= servers:
        return 1.0, math.inf
    return waits, 0.5 * (arrival_cv2 + service_cv2) * service_s / (servers - offered)


def prefill_ttft_s(
    *, rate_per_s: float, prefill_s: float, stages: int = 1, speed_up: float = 1.0
) -> float:
    """Mean time to the first token of equal prompts, one at a time, in seconds.

    Model:   R D^2 / (2 p K (p K - R D)) + D / K: a stage is free again after D / (p K)
    Source:  DistServe (arXiv:2401.09670), section 3.1, for p = 2 or K; any p by the same steps.
    Valid:   Poisson arrivals; p pipeline stages, or K times the speed by tensor parallelism.
    """
    if stages < 1 or speed_up <= 0.0:
        raise ValueError(f"stages {stages} must be at least 1, speed_up {speed_up} positive")
    wait_s = mean_wait_s(
        rate_per_s=rate_per_s, service_s=prefill_s / (stages * speed_up), service_cv2=0.0
    )
    return wait_s + prefill_s / speed_up


def crossover_load(speed_up: float, *, degree: int = 2) -> float:
    """Load R D above which pipeline stages beat as many tensor-parallel ranks; of one device.

    Model:   both times of `prefill_ttft_s` equal; found by bisection, since the wait of tensor
             parallelism grows faster in R D all the way to its limit K < p.
    Source:  DistServe (arXiv:2401.09670), section 3.1 and figure 4.
    """
    if not 1.0 < speed_up < degree:
        raise ValueError(f"speed_up {speed_up} must lie between 1 and the degree {degree}")
    low, high = 0.0, speed_up
    while high - low > 1e-12 * speed_up:
        load = 0.5 * (low + high)
        tensor = prefill_ttft_s(rate_per_s=load, prefill_s=1.0, speed_up=speed_up)
        pipeline = prefill_ttft_s(rate_per_s=load, prefill_s=1.0, stages=degree)
        low, high = (low, load) if tensor > pipeline else (load, high)
    return high
