"""Distinct experts that the most-loaded device reads under uniform routing, in closed form.

Expert layers are bound by memory in decode, so each waits for the device that must read the most
distinct experts. work.py prices expert layers by it; expert_loads.py has the form for recorded
shares.

Source: Janus (arXiv:2512.13525), its performance model.

Letters: Q query points, J distinct experts read, 0 to all slots.
"""

import math
from functools import cache

import numpy as np

from tuner.prices.serve.curves import Floats


def most_loaded_activated(
    *, slots: int, experts: int, top_k: float, tokens_Q: Floats, devices: int
) -> Floats:
    """Return the most-loaded device's distinct experts in one layer, the mean over draws.

    Model:   sum over j < C of 1 - F(j)^n, F of Binomial(C, 1 - (1 - k / E)^B): the mean of the
             largest of n counts, with experts and devices taken as independent of each other
    Valid:   uniform and independent routing, each expert on one device. Choosing k of E without
             repetition ties experts slightly to each other, which only narrows the counts.
    Error:   below 5 % against drawn routing, tests/tuner/costs/serve/test_activated_experts.py.
    """
    if devices < 1:
        raise ValueError(f"devices {devices} must be at least 1")
    _check(slots, experts, top_k, float(np.min(tokens_Q)))
    if top_k == experts:
        return np.full_like(tokens_Q, slots)
    log_idle_Q = tokens_Q * _log_unread(experts, top_k)
    log_read_Q = np.log(-np.expm1(log_idle_Q))
    read_J = np.arange(slots + 1.0)
    log_share_JQ = (
        _log_binomial_J(slots)[:, None]
        + read_J[:, None] * log_read_Q
        + (slots - read_J)[:, None] * log_idle_Q
    )
    below_JQ = np.minimum(np.cumsum(np.exp(log_share_JQ), axis=0), 1.0)
    return np.asarray(np.sum(1.0 - below_JQ[:-1] ** devices, axis=0))


@cache
def _log_binomial_J(slots: int) -> Floats:
    """Return the logarithms of the numbers of ways to choose none to all of the slots."""
    return np.array(
        [
            math.lgamma(slots + 1.0) - math.lgamma(j + 1.0) - math.lgamma(slots - j + 1.0)
            for j in range(slots + 1)
        ]
    )


def _log_unread(experts: int, top_k: float) -> float:
    return -math.inf if top_k == experts else math.log1p(-top_k / experts)


def _check(slots: int, experts: int, top_k: float, batch_tokens: float) -> None:
    if not 0 < top_k <= experts or slots < 1 or batch_tokens <= 0.0:
        raise ValueError(
            f"top_k {top_k} must lie in 0..{experts} experts, slots {slots} be at least 1 and "
            f"batch_tokens {batch_tokens} positive"
        )
