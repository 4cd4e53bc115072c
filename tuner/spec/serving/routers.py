"""Policies by which a router picks the instance for a request.

tuner/catalog/serve_rules/routers.py has each router's option for a policy.

    policy                     based on                                     picks
    round_robin                nothing                                      the next one
    random                     nothing                                      any, equally likely
    power_of_two               requests outstanding of two drawn at random  the one with fewer
    least_requests             requests outstanding of all                  the one with the fewest
    weighted_least_requests    the same over a weight of each               the lowest quotient
    cache_aware                prefixes, then requests outstanding          the one with the prefix
                                                                            in its cache, unless the
                                                                            load is uneven; else the
                                                                            one with the fewest

Outstanding requests were sent to an instance and have not finished there, queued ones included. Two
drawn at random: Mitzenmacher, IEEE TPDS 12(10), 2001.
"""

from enum import StrEnum
from typing import Final


class RouterPolicy(StrEnum):
    """Rule by which a router picks an instance for a request."""

    ROUND_ROBIN = "round_robin"
    """The next instance in turn."""
    RANDOM = "random"
    """Any instance, drawn at random."""
    POWER_OF_TWO = "power_of_two"
    """The less loaded, by outstanding requests, of two instances drawn at random."""
    LEAST_REQUESTS = "least_requests"
    """The instance with the fewest outstanding requests."""
    WEIGHTED_LEAST_REQUESTS = "weighted_least_requests"
    """The instance with the fewest outstanding requests relative to its largest batch."""
    CACHE_AWARE = "cache_aware"
    """The instance with the prompt's prefix in its cache, within a limit of imbalance."""


CACHE_THRESHOLD: Final = 0.3
"""Share of a prompt that must match for cache-aware routing: default of `--cache-threshold` in
sglang-router 0.3.2 and vllm-router 0.1.17."""
IMBALANCE_REQUESTS: Final = 64
IMBALANCE_RATIO: Final = 1.5
"""Cache-aware routing balances load instead if the most outstanding requests exceed the fewest by
more than both: defaults of `--balance-abs-threshold` and `--balance-rel-threshold` in sglang-router
0.3.2 and vllm-router 0.1.17."""
