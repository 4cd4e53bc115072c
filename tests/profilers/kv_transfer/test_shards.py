"""Who holds and who sends what; hand-worked examples and the cover of every element."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.kv_transfer.shards import (
    CacheDegrees,
    CacheShape,
    ShardRank,
    heads_of,
    layers_of,
    ranks,
    transfers,
)
from tests.rows import each_row

GROUPED = CacheShape(num_layers=3, num_heads=4, width=2)
LATENT = CacheShape(num_layers=3, num_heads=1, width=5, is_latent=True)


def test_heads_and_layers_are_held_as_ranks_divide_them() -> None:
    shape = CacheShape(num_layers=1, num_heads=6, width=1)
    # 6 heads over 4 ranks: boundaries at floor(0, 1.5, 3, 4.5, 6)
    held = [heads_of(shape, tensor_rank=rank, tensor_degree=4) for rank in range(4)]
    assert held == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    copies = [heads_of(GROUPED, tensor_rank=rank, tensor_degree=8).start for rank in range(8)]
    assert copies == [0, 0, 1, 1, 2, 2, 3, 3]
    held = [layers_of(GROUPED, stage=stage, pipeline_degree=2) for stage in range(2)]
    assert held == [range(1), range(1, 3)]


def test_transfers_by_hand() -> None:
    plan = transfers(GROUPED, sender=CacheDegrees(tensor=8), receiver=CacheDegrees(), num_tokens=10)
    assert [transfer.sender.tensor for transfer in plan] == [0, 2, 4, 6]
    assert [transfer.heads for transfer in plan] == [range(n, n + 1) for n in range(4)]
    plan = transfers(GROUPED, sender=CacheDegrees(), receiver=CacheDegrees(tensor=2), num_tokens=10)
    assert [(transfer.receiver.tensor, transfer.heads) for transfer in plan] == [
        (0, range(2)),
        (1, range(2, 4)),
    ]
    plan = transfers(
        LATENT,
        sender=CacheDegrees(tensor=2),
        receiver=CacheDegrees(),
        num_tokens=70,
        granule_tokens=32,
    )
    # 70 tokens are 3 granules of 32: one for rank 0, two for rank 1, the last cut at 70.
    assert [(transfer.sender.tensor, transfer.tokens) for transfer in plan] == [
        (0, range(32)),
        (1, range(32, 70)),
    ]
    plan = transfers(
        GROUPED, sender=CacheDegrees(pipeline=2), receiver=CacheDegrees(pipeline=3), num_tokens=1
    )
    assert [(one.sender.stage, one.receiver.stage, one.layers) for one in plan] == [
        (0, 0, range(1)),
        (1, 1, range(1, 2)),
        (1, 2, range(2, 3)),
    ]
    # 3 layers x keys and values x 4 heads x 2; DeepSeek-V3 keeps 61 x 576
    assert GROUPED.elements_per_token == 48
    deepseek = CacheShape(num_layers=61, num_heads=1, width=576, is_latent=True)
    assert deepseek.elements_per_token == 35136


@each_row("shape", (GROUPED, LATENT))
def test_an_empty_request_sends_nothing(shape: Any) -> None:
    assert not transfers(
        shape, sender=CacheDegrees(), receiver=CacheDegrees(tensor=2), num_tokens=0
    )


@given(
    num_heads=st.integers(1, 9),
    num_layers=st.integers(1, 7),
    is_latent=st.booleans(),
    degrees=st.tuples(*[st.integers(1, 8)] * 2, *[st.integers(1, 4)] * 2),
    num_tokens=st.integers(1, 100),
    granule=st.sampled_from([1, 16, 48]),
)
@settings(max_examples=150, deadline=None)
def test_every_element_that_a_receiver_holds_arrives_once_from_a_rank_that_has_it(
    num_heads: int,
    num_layers: int,
    is_latent: bool,
    degrees: tuple[int, int, int, int],
    num_tokens: int,
    granule: int,
) -> None:
    shape = CacheShape(
        num_layers=num_layers,
        num_heads=1 if is_latent else num_heads,
        width=1,
        is_latent=is_latent,
    )
    sender = CacheDegrees(tensor=degrees[0], pipeline=degrees[2])
    receiver = CacheDegrees(tensor=degrees[1], pipeline=degrees[3])
    plan = transfers(
        shape, sender=sender, receiver=receiver, num_tokens=num_tokens, granule_tokens=granule
    )
    for target in ranks(receiver):
        mine = [one for one in plan if one.receiver == target]
        arrived = [
            (layer, head, token)
            for one in mine
            for layer in one.layers
            for head in one.heads
            for token in one.tokens
        ]
        layers = layers_of(shape, stage=target.stage, pipeline_degree=receiver.pipeline)
        heads = heads_of(shape, tensor_rank=target.tensor, tensor_degree=receiver.tensor)
        wanted = [(y, h, t) for y in layers for h in heads for t in range(num_tokens)]
        assert sorted(arrived) == wanted
        assert all(one.tokens.start % granule == 0 for one in mine)
    for one in plan:
        held = heads_of(shape, tensor_rank=one.sender.tensor, tensor_degree=sender.tensor)
        assert set(one.heads) <= set(held)


def test_what_is_no_cache_is_refused() -> None:
    assert ranks(CacheDegrees(tensor=2, pipeline=2))[2] == ShardRank(stage=1, tensor=0)
    with pytest.raises(ValueError, match="0 x 1 must be at least 1"):
        CacheDegrees(tensor=0)
    with pytest.raises(ValueError, match="one head, not 2"):
        CacheShape(num_layers=1, num_heads=2, width=1, is_latent=True)
    with pytest.raises(ValueError, match="at least 1"):
        CacheShape(num_layers=0, num_heads=2, width=1)
