import itertools

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.search.train.pools.testing import spec
from tuner.search.train.pools.build_problem import build_pools_problem
from tuner.search.train.pools.chains import pool_prices
from tuner.search.train.pools.space import pools_space
from tuner.search.train.pools.stage_prices import (
    PoolPricing,
    chain_price,
    layer_bytes,
    price_on,
)
from tuner.spec.spec import Spec


def on_both(requested: Spec, *, candidate: int) -> list[PoolPricing]:
    problem = build_pools_problem(requested, residuals=None)
    space = pools_space(problem)
    table, rows = space.tables[-1]
    candidates = space.candidates(table, rows, table.options_TA)
    return [
        price_on(own, pool, space.options, candidates).taken(np.array([candidate]))
        for own, pool in zip(problem.by_pool, problem.cluster.pools, strict=True)
    ]


def taken_apart(on: PoolPricing, layers_S: list[int]) -> list[float]:
    """Bytes of every stage as the solver counts them."""
    parts = layer_bytes(on)
    prices = pool_prices(on, parts, more_s_K=np.zeros(2))
    m = int(np.ravel(on.strategies.num_microbatches)[0])
    ends = np.cumsum([0, *layers_S])
    return [
        float(parts.without_C[0])
        + float(prices.static_bytes_L[first:stop].sum())
        + min(len(layers_S) - stage, m) * float(prices.saved_bytes_L[first:stop].sum())
        for stage, (first, stop) in enumerate(itertools.pairwise(ends))
    ]


@each_row("layers_S", [[8, 8], [3, 5, 8], [1, 1, 13, 1]])
def test_identical_layers_have_the_bytes_of_the_full_price(layers_S: list[int]) -> None:
    on = on_both(spec("olmoe-1b-7b"), candidate=0)[0]
    price = chain_price(
        [on], pool_S=[0] * len(layers_S), layers_S=layers_S, between_s=np.zeros((1, 1))
    )
    sent = float(on.memory.boundary_C[0]) * (1.0 + float(np.ravel(on.memory.unused_ratio_C)[0]))
    assert taken_apart(on, layers_S) == pytest.approx(
        [needed - sent for needed in price.bytes_S], rel=1e-9
    )


@each_row("model", ["deepseek-v2-lite", "llama-3.1-8b", "glm-4.5-air"])
@each_row("candidate", [0, 1, -1])
def test_what_the_solver_counts_never_exceeds_the_full_price(model: str, candidate: int) -> None:
    requested = spec(model)
    layers = requested.model.num_layers
    on = on_both(requested, candidate=candidate)[0]
    for layers_S in ([layers], [1, layers - 1], [layers - 1, 1], [2, layers - 4, 2]):
        price = chain_price(
            [on], pool_S=[0] * len(layers_S), layers_S=layers_S, between_s=np.zeros((1, 1))
        )
        for counted, needed in zip(taken_apart(on, layers_S), price.bytes_S, strict=True):
            assert counted <= needed * (1.0 + 1e-9)


def test_a_send_between_pools_holds_up_every_micro_batch() -> None:
    pools = on_both(spec("olmoe-1b-7b"), candidate=0)
    m = float(np.ravel(pools[0].strategies.num_microbatches)[0])
    free, dear = (
        chain_price(pools, pool_S=[0, 1], layers_S=[8, 8], between_s=np.array([[0.0, s], [s, 0.0]]))
        for s in (0.0, 0.001)
    )
    # There and back for the first, and for the others shared by the two in flight.
    assert dear.step_s - free.step_s == pytest.approx(2 * 0.001 + (m - 1) * 2 * 0.001 / 2)
    assert dear.send_s == (0.001,)
