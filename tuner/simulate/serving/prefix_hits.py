"""Prefix cache hits in blocks, request by request.

    hits of a request    its leading blocks that lie in the cache of the place it is sent to
    then                 all of its blocks are in that cache, the last ones oldest, and what is
                         beyond the cache's size is evicted, oldest first

so that of a prefix the end goes before its beginning, as radix trees evict leaves first (sglang
0.5.23, srt/mem_cache/radix_cache.py) and freed requests give their last block back first (vllm
0.33.0, v1/core/single_type_kv_cache_manager.py). A block id stands for all before it too, so equal
ids are equal prefixes.

A place is whoever has a cache of its own: an attention-data rank of an instance. The assignment of
requests to places is an argument, so that any router can be evaluated:

    in_turn       round robin
    by_prefix     the cache-aware rule of sglang-router 0.3.2 and its fork vllm-router 0.1.17: the
                  place with the longest match if that is more than 0.3 of the prompt and loads are
                  balanced (the largest is not 64 above the least and 1.5 times it), else the least
                  loaded (both: policies/cache_aware.rs)

Not covered: blocks of outputs, which a next turn finds and a trace does not name until then; what
running sequences hold of the same memory beside their own prompts; caches in host memory or shared
between instances; what is evicted while a request waits. The tree of a router, which forgets only
what exceeds 2^26 characters, is taken to hold what the caches hold.

Letters: R requests.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.spec.serving.routers import CACHE_THRESHOLD, IMBALANCE_RATIO, IMBALANCE_REQUESTS
from tuner.spec.serving.traces import BLOCK_TOKENS, Blocks

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class BlockCache:
    """The blocks that a place holds, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are held."""
        for place, block in enumerate(blocks):
            if block not in self._blocks:
                return place
        return len(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold the blocks of a request, as the most recently used ones."""
        blocks_by_age = self._blocks
        for block in reversed(blocks[: self._capacity]):
            blocks_by_age[block] = None
            blocks_by_age.move_to_end(block)
        while len(blocks_by_age) > self._capacity:
            blocks_by_age.popitem(last=False)


def prefix_hits(blocks: Blocks, place_R: Ints, *, cache_blocks: int) -> Ints:
    """Return the blocks of each prompt that are found in the cache of its place.

    Args:
        blocks: of the requests, in order of arrival.
        place_R: where each is sent.
        cache_blocks: that one place holds.
    """
    caches: dict[int, BlockCache] = {}
    hits = np.zeros(len(place_R), dtype=np.int64)
    for request, (block_ids, place) in enumerate(
        zip(blocks.lists(), place_R.tolist(), strict=True)
    ):
        cache = caches.setdefault(place, BlockCache(cache_blocks))
        hits[request] = cache.match(block_ids)
        cache.take(block_ids)
    return hits


def hit_tokens(hit_R: Ints, input_R: Ints) -> Ints:
    """Return the tokens of so many leading blocks; one of a prompt at least is computed."""
    return np.minimum(hit_R * BLOCK_TOKENS, input_R - 1)


def in_turn(count: int, places: int) -> Ints:
    """Send requests to one place after the other."""
    return np.arange(count, dtype=np.int64) % places


def by_weight(count: int, shares: Sequence[float]) -> Ints:
    """Return the place of each request: the one furthest behind its share, as nginx's weights do.

    Args:
        count: of the requests.
        shares: of the requests that each place is to get; they add up to 1.
    """
    share_P = np.array(shares)
    behind = np.zeros(len(shares))
    place_R = np.empty(count, dtype=np.int64)
    for request in range(count):
        behind += share_P
        place_R[request] = place = int(behind.argmax())
        behind[place] -= 1.0
    return place_R


def ranks_in_turn(instance_R: Ints, ranks: int) -> Ints:
    """Return the rank of each request, where every instance deals out what it gets in turn."""
    seen: dict[int, int] = {}
    rank_R = np.empty_like(instance_R)
    for request, instance in enumerate(instance_R.tolist()):
        number = seen.get(instance, 0)
        seen[instance] = number + 1
        rank_R[request] = instance * ranks + number % ranks
    return rank_R


def by_prefix(
    blocks: Blocks, arrival_s_R: Floats, *, instances: int, cache_blocks: int, stay_s: float
) -> Ints:
    """Send requests by the cache-aware rule.

    Args:
        blocks: of the requests, in order of arrival.
        arrival_s_R: when they come.
        instances: to choose from, or ranks where the router chooses among these.
        cache_blocks: that one of them holds.
        stay_s: that a request is under way, which the load is counted by.
    """
    caches = [BlockCache(cache_blocks) for _ in range(instances)]
    load = [0] * instances
    in_flight: deque[tuple[float, int]] = deque()
    chosen = np.zeros(len(arrival_s_R), dtype=np.int64)
    for request, (block_ids, at_s) in enumerate(
        zip(blocks.lists(), arrival_s_R.tolist(), strict=True)
    ):
        while in_flight and in_flight[0][0] <= at_s:
            load[in_flight.popleft()[1]] -= 1
        place = _by_rule(block_ids, caches, load)
        caches[place].take(block_ids)
        load[place] += 1
        in_flight.append((at_s + stay_s, place))
        chosen[request] = place
    return chosen


def _by_rule(block_ids: Sequence[int], caches: Sequence[BlockCache], load: Sequence[int]) -> int:
    """Return the place that the rule sends a request to; of equal ones the first."""
    highest, lowest = max(load), min(load)
    if highest - lowest > IMBALANCE_REQUESTS and highest > IMBALANCE_RATIO * lowest:
        return load.index(lowest)
    matches = [cache.match(block_ids) for cache in caches]
    best = max(matches)
    if block_ids and best > CACHE_THRESHOLD * len(block_ids):
        return matches.index(best)
    return load.index(lowest)
