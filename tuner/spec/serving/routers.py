"""The rules by which a router picks the instance that serves a request.

Names are ours; tuner/spec/serving/manifests/routers.py has the option of each router for them.

    policy                     looks at                                     picks
    round_robin                nothing                                      the next in a circle
    random                     nothing                                      any, each as likely
    power_of_two               requests outstanding of two drawn at random  the one with fewer
    least_requests             requests outstanding of all                  the one with the fewest
    weighted_least_requests    the same over a weight of each               the lowest quotient
    cache_aware                prefixes, then requests outstanding          the one that holds the
                                                                            prefix, unless the load
                                                                            is uneven; else the one
                                                                            with the fewest

Outstanding are requests that were sent to an instance and have not ended there, those that wait in
it included. Two drawn at random: Mitzenmacher, IEEE TPDS 12(10), 2001.
"""

from enum import StrEnum
from typing import Final


class RouterPolicy(StrEnum):
    """How a router picks an instance."""

    ROUND_ROBIN = "round_robin"
    """In turn."""
    RANDOM = "random"
    """Any."""
    POWER_OF_TWO = "power_of_two"
    """Of two drawn at random, the one with fewer requests outstanding."""
    LEAST_REQUESTS = "least_requests"
    """The fewest requests outstanding."""
    WEIGHTED_LEAST_REQUESTS = "weighted_least_requests"
    """The fewest requests outstanding for what it may run at once."""
    CACHE_AWARE = "cache_aware"
    """The instance that holds the prompt's prefix, within a limit of uneven load."""


SPREADS_BY_LOAD: Final = frozenset(
    {
        RouterPolicy.POWER_OF_TWO,
        RouterPolicy.LEAST_REQUESTS,
        RouterPolicy.WEIGHTED_LEAST_REQUESTS,
        RouterPolicy.CACHE_AWARE,
    }
)
"""Policies that send a slow instance fewer requests; the others give each an equal share."""

CACHE_THRESHOLD: Final = 0.3
"""Of a prompt that must match for its prefix to decide: default of `--cache-threshold` in
sglang-router 0.3.2 and vllm-router 0.1.17."""
IMBALANCE_REQUESTS: Final = 64
IMBALANCE_RATIO: Final = 1.5
"""Cache-aware routing follows load instead where the most outstanding exceed the fewest by more
than both: defaults of `--balance-abs-threshold` and `--balance-rel-threshold` in sglang-router
0.3.2 and vllm-router 0.1.17."""
