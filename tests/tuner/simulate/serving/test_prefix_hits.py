"""Blocks found in prefix caches, worked out by hand."""

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.simulate.serving.prefix_hits import (
    by_prefix,
    hit_tokens,
    in_turn,
    prefix_hits,
    ranks_in_turn,
)
from tuner.spec.serving.traces import Blocks


def blocks_of(*prompts: list[int]) -> Blocks:
    return Blocks(
        id_B=np.array([one for prompt in prompts for one in prompt], dtype=np.int64),
        count_N=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
    )


def at(*places: int) -> np.ndarray:
    return np.array(places, dtype=np.int64)


CHAT = blocks_of([1, 2], [9], [1, 2, 3], [9, 8], [1, 2, 3, 4])
"""A conversation of three turns, and one of two between them."""


def test_a_prompt_finds_its_leading_blocks_where_it_is_sent() -> None:
    # All to one: turn 2 finds 1 and 2, the other conversation 9, turn 3 finds 1, 2 and 3.
    assert prefix_hits(CHAT, at(0, 0, 0, 0, 0), cache_blocks=100).tolist() == [0, 0, 2, 1, 3]
    # Two in turn: requests 0, 2, 4 go to the first, 1 and 3 to the second: the same hits.
    assert prefix_hits(CHAT, in_turn(5, 2), cache_blocks=100).tolist() == [0, 0, 2, 1, 3]
    # Three in turn: 0 and 3 meet, 1 and 4 meet, 2 is alone: nothing is found.
    assert prefix_hits(CHAT, in_turn(5, 3), cache_blocks=100).tolist() == [0, 0, 0, 0, 0]
    # A block that is found after one that is not helps nothing.
    other = blocks_of([1, 2, 3], [1, 7, 3])
    assert prefix_hits(other, at(0, 0), cache_blocks=100).tolist() == [0, 1]


def test_the_oldest_blocks_are_evicted_the_end_of_a_prefix_first() -> None:
    # A cache of 3. [1, 2]: holds 2, 1 (oldest first). [9]: 2, 1, 9. [1, 2, 3] finds both and is
    # held as 3, 2, 1; 9 goes. [9, 8] finds nothing and is held as 8, 9 beside 1: of the chain its
    # beginning is left. [1, 2, 3, 4] finds 1 alone.
    assert prefix_hits(CHAT, at(0, 0, 0, 0, 0), cache_blocks=3).tolist() == [0, 0, 2, 0, 1]
    # A prompt that is longer than the cache leaves its beginning: [1, 2] of [1, 2, 3].
    assert prefix_hits(blocks_of([1, 2, 3], [1, 2, 3]), at(0, 0), cache_blocks=2).tolist() == [0, 2]


def test_one_token_of_a_prompt_is_computed_whatever_is_found() -> None:
    assert hit_tokens(at(0, 2, 2), at(700, 1024, 900)).tolist() == [0, 1023, 899]


def test_ranks_of_an_instance_are_dealt_out_in_turn() -> None:
    # Requests 0, 1, 3 go to instance 0, so to its ranks 0, 1, 0; 2 and 4 to ranks 2 and 3 of 1.
    assert ranks_in_turn(at(0, 0, 1, 0, 1), 2).tolist() == [0, 1, 2, 0, 3]


def test_the_cache_aware_rule_follows_prefixes_and_else_the_least_load() -> None:
    arrivals = np.arange(5.0)
    # [1, 2] and [9] go to the least loaded: 0, then 1. [1, 2, 3] matches 2 of 3 on 0, [9, 8] 1 of 2
    # on 1, [1, 2, 3, 4] 3 of 4 on 0: all more than 0.3.
    found = by_prefix(CHAT, arrivals, instances=3, cache_blocks=100, stay_s=9.0)
    assert found.tolist() == [0, 1, 0, 1, 0]
    # Where each request ends before the next comes, all loads are zero and the first gets them.
    found = by_prefix(CHAT, arrivals, instances=3, cache_blocks=100, stay_s=1.0)
    assert found.tolist() == [0, 0, 0, 0, 0]
    # 1 of 4 blocks is no more than 0.3: the third instance, which has no request, gets it.
    short = blocks_of([1], [2], [1, 5, 6, 7])
    found = by_prefix(short, np.arange(3.0), instances=3, cache_blocks=100, stay_s=9.0)
    assert found.tolist() == [0, 1, 2]


def test_the_cache_aware_rule_leaves_an_instance_that_is_overloaded() -> None:
    same = blocks_of(*[[1, 2]] * 130)
    together = by_prefix(same, np.zeros(130), instances=2, cache_blocks=9, stay_s=100.0)
    # 65 to the first: one more than 64 above the least, so the next goes to the other, whose load
    # of 1 makes the difference 64 again, and so on in turn.
    assert together[:65].tolist() == [0] * 65
    assert together[65:71].tolist() == [1, 0, 1, 0, 1, 0]
    apart = by_prefix(same, np.arange(0.0, 1300.0, 10.0), instances=2, cache_blocks=9, stay_s=1.0)
    assert set(apart.tolist()) == {0}


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
            lambda path: [hash(tuple(path[: depth + 1])) % 10**9 for depth in range(len(path))]
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_hits_are_those_of_a_cache_simulated_block_by_block(
    prompts: list[list[int]], size: int, places: int
) -> None:
    """Against a plain LRU that is asked about single blocks."""
    expected = []
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(places)]
    for number, prompt in enumerate(prompts):
        cache = caches[number % places]
        found = 0
        while found < len(prompt) and prompt[found] in cache:
            found += 1
        expected.append(found)
        for block in prompt[:size][::-1]:
            cache.pop(block, None)
            cache[block] = None
            if len(cache) > size:
                cache.popitem(last=False)
    found_N = prefix_hits(blocks_of(*prompts), in_turn(len(prompts), places), cache_blocks=size)
    assert found_N.tolist() == expected
    more_N = prefix_hits(blocks_of(*prompts), in_turn(len(prompts), places), cache_blocks=10**6)
    assert (more_N >= found_N).all()


def test_blocks_are_dealt_out_by_request() -> None:
    assert list(CHAT.lists()) == [[1, 2], [9], [1, 2, 3], [9, 8], [1, 2, 3, 4]]
    assert list(CHAT.taken(np.array([True, False, False, True, False])).lists()) == [[1, 2], [9, 8]]
    assert list(blocks_of([]).lists()) == [[]]


def sessions_of(rng: np.random.Generator, *, count: int, turns: int) -> list[list[int]]:
    """Return the prompts of sessions that grow by a block or two a turn, in a random order."""
    order = rng.permutation(np.repeat(np.arange(count), turns)).tolist()
    blocks: dict[int, list[int]] = {session: [1000 * session] for session in range(count)}
    prompts = []
    for session in order:
        own = blocks[session]
        own += range(own[-1] + 1, own[-1] + 2 + int(rng.integers(2)))
        prompts.append(list(own))
    return prompts


def test_routing_to_ranks_finds_no_fewer_blocks_than_routing_to_instances() -> None:
    for seed in range(24):
        rng = np.random.default_rng(seed)
        instances, ranks = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        prompts = sessions_of(rng, count=int(rng.integers(4, 24)), turns=6)
        blocks, arrivals = blocks_of(*prompts), np.arange(float(len(prompts)))
        size, stay_s = 200, float(rng.integers(1, 9))
        to_instances = ranks_in_turn(
            by_prefix(
                blocks, arrivals, instances=instances, cache_blocks=size * ranks, stay_s=stay_s
            ),
            ranks,
        )
        to_ranks = by_prefix(
            blocks, arrivals, instances=instances * ranks, cache_blocks=size, stay_s=stay_s
        )
        split, whole = (
            prefix_hits(blocks, place_R, cache_blocks=size) for place_R in (to_instances, to_ranks)
        )
        assert whole.sum() >= split.sum(), seed
        if ranks == 1:
            assert to_ranks.tolist() == to_instances.tolist(), seed
        # Every rank finds what its own stream of prompts alone finds in its cache.
        for rank in set(to_ranks.tolist()):
            own_R = to_ranks == rank
            alone = prefix_hits(blocks.taken(own_R), at(*[0] * own_R.sum()), cache_blocks=size)
            assert alone.tolist() == whole[own_R].tolist(), seed


def test_a_prefix_of_all_requests_is_found_on_every_rank_however_they_are_routed() -> None:
    common = blocks_of(*[[1, 2, 3, 10 + number] for number in range(240)])
    found = prefix_hits(common, ranks_in_turn(in_turn(240, 2), 12), cache_blocks=100)
    # Each of 24 ranks computes it once.
    assert found.sum() == 3 * (240 - 24)
