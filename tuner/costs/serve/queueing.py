"""Mean waits of requests, in closed form, for instances that are steady and nearly so.

    rate   arrivals per second, to all servers together
    servers of one queue, each with a mean service time; utilisation rho = rate service / servers
    cs2    squared coefficient of variation of service times

- M/M/c: Erlang's formula for the share that waits, C(c, a), a = rate service (Erlang, 1917):
  mean wait C service / (c - a); those that wait do so for an exponential time.
- M/D/1: Pollaczek and Khinchine, wait rho service / (2 (1 - rho)).
- M/G/c: Allen and Cunneen (Allen, Probability, Statistics and Queueing Theory, 1990): the wait of
  M/M/c times (1 + cs2) / 2. Exact for M/M/c and M/G/1, an approximation otherwise: a few percent
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
    *, rate_per_s: float, service_s: float, servers: int = 1, service_cv2: float = 1.0
) -> float:
    """Mean time in queue, in seconds, by Allen and Cunneen; `inf` when the servers are overrun.

    M/M/c by default; M/D/1 with `service_cv2=0`, one server.
    """
    if rate_per_s < 0.0 or service_s <= 0.0 or service_cv2 < 0.0:
        raise ValueError(
            f"rate_per_s {rate_per_s}, service_s {service_s}, squared variation {service_cv2}: "
            "none may be negative, and service takes time"
        )
    offered = rate_per_s * service_s
    waits = erlang_c(servers=servers, offered=offered)
    if offered >= servers:
        return math.inf
    return waits * (0.5 * (1.0 + service_cv2) * service_s / (servers - offered))
