"""Decode with attention and experts on devices of their own: what few closed forms say.

An expert device is bound by memory in decode, so a layer waits for the device that must read the
most distinct experts. Routing of recorded traffic decides (solvers/placement/dispatch/activated.py
counts it for a placement); the forms here are for uniform routing, for pruning before that.

Source: Janus (arXiv:2512.13525), its performance model; the residual of the steady state and the
bound on the busiest device are as third parties report them.
"""

import math
from collections.abc import Callable

STEADY_TOLERANCE = 1e-9
"""Relative width at which the bisection of the steady state ends."""


def mean_activated(*, slots: int, experts: int, top_k: int, batch_tokens: float) -> float:
    """Distinct experts that a device of so many slots reads on average in one layer.

    Model:   C (1 - (1 - k / E)^B): a token leaves an expert alone with probability 1 - k / E
    Valid:   uniform and independent routing, each expert on one device.
    """
    _check(slots, experts, top_k, batch_tokens)
    return slots * -math.expm1(batch_tokens * _log_left_alone(experts, top_k))


def most_activated(
    *, slots: int, experts: int, top_k: int, batch_tokens: float, devices: int
) -> float:
    """Bound on the mean of the busiest device's distinct experts in one layer.

    Model:   min(C, a + sqrt(2 a ln n) + 1), a the mean of one device
    Valid:   as `mean_activated`; loose by a third where few tokens meet many experts.
    """
    if devices < 1:
        raise ValueError(f"devices {devices} must be at least 1")
    mean = mean_activated(slots=slots, experts=experts, top_k=top_k, batch_tokens=batch_tokens)
    return min(float(slots), mean + math.sqrt(2.0 * mean * math.log(devices)) + 1.0)


def steady_batch(
    *, tokens_per_s: float, tpot_s: Callable[[float], float], most: float
) -> float | None:
    """Requests in flight when tokens arrive as fast as they are made; None where they pile up.

    Model:   Little's law, B = rate TPOT(B); 1 where even one request alone is not in flight always
    Valid:   a TPOT that grows more slowly than its batch, so that B - rate TPOT(B) only grows.
    """
    if tokens_per_s < 0.0 or most < 1.0:
        raise ValueError(f"tokens_per_s {tokens_per_s} must be at least 0, most {most} at least 1")
    if most < tokens_per_s * tpot_s(most):
        return None
    if tokens_per_s * tpot_s(1.0) <= 1.0:
        return 1.0
    low, high = 1.0, most
    while high - low > STEADY_TOLERANCE * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if middle < tokens_per_s * tpot_s(middle) else (low, middle)
    return high


def _log_left_alone(experts: int, top_k: int) -> float:
    return -math.inf if top_k == experts else math.log1p(-top_k / experts)


def _check(slots: int, experts: int, top_k: int, batch_tokens: float) -> None:
    if not 1 <= top_k <= experts or slots < 1 or batch_tokens <= 0.0:
        raise ValueError(
            f"top_k {top_k} must lie in 1..{experts} experts, slots {slots} be at least 1 and "
            f"batch_tokens {batch_tokens} positive"
        )
