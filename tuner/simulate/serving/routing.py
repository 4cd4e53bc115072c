"""A router's state: requests outstanding on each instance, and the policy's next choice.

Ties go to the instance that is listed first, as the gateways' scans do (`min_by_key` in
policies/cache_aware.rs of vllm-router 0.1.17); weighted ones to the instance with the fewest
requests so far over its weight, which nginx's smooth round robin comes to.

Cache-aware routing knows for each request which instance holds its prefix. It goes there unless
the most outstanding exceed the fewest by more than 64 and by half; elsewhere the prefix must be
computed.

Not covered: loads that are polled and stale, evicted prefixes, retries.

Letters: N instances.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tuner.spec.serving.routers import IMBALANCE_RATIO, IMBALANCE_REQUESTS, RouterPolicy


@dataclass(slots=True, kw_only=True)
class Router:
    """Spreads requests over instances."""

    policy: RouterPolicy
    weight_N: Sequence[float]
    """Sequences that each instance may run at once; only weighted policies look at it."""
    rng: np.random.Generator
    outstanding: list[int] = field(init=False)
    sent: list[int] = field(init=False)
    """Requests that each instance has been given so far."""

    def __post_init__(self) -> None:
        if not self.weight_N or min(self.weight_N) <= 0.0:
            raise ValueError(f"weights {self.weight_N}: a router has an instance, each above 0")
        self.outstanding = [0] * len(self.weight_N)
        self.sent = [0] * len(self.weight_N)

    def send(self, holder: int | None = None) -> int:
        """Pick an instance for the next request and count it there.

        Args:
            holder: of the request's prefix, if any; only cache-aware routing looks at it.
        """
        place = self._pick(holder)
        self.outstanding[place] += 1
        self.sent[place] += 1
        return place

    def end(self, place: int) -> None:
        """Take note that a request has ended there."""
        self.outstanding[place] -= 1

    def _pick(self, holder: int | None) -> int:
        count, outstanding = len(self.outstanding), self.outstanding
        if count == 1:
            return 0
        if self.policy is RouterPolicy.LEAST_REQUESTS:
            return outstanding.index(min(outstanding))
        match self.policy:
            case RouterPolicy.ROUND_ROBIN:
                return sum(self.sent) % count
            case RouterPolicy.RANDOM:
                return int(self.rng.integers(count))
            case RouterPolicy.POWER_OF_TWO:
                first = int(self.rng.integers(count))
                second = (first + 1 + int(self.rng.integers(count - 1))) % count
                return first if outstanding[first] <= outstanding[second] else second
            case RouterPolicy.WEIGHTED_LEAST_REQUESTS:
                return min(range(count), key=self._weighted)
            case RouterPolicy.CACHE_AWARE if holder is not None and not self._is_uneven():
                return holder
            case _:
                return outstanding.index(min(outstanding))

    def _weighted(self, place: int) -> tuple[float, float]:
        weight = self.weight_N[place]
        return self.outstanding[place] / weight, self.sent[place] / weight

    def _is_uneven(self) -> bool:
        highest, lowest = max(self.outstanding), min(self.outstanding)
        return highest - lowest > IMBALANCE_REQUESTS and highest > IMBALANCE_RATIO * lowest
