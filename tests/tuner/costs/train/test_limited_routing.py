"""Group-limited routing against draws, and against a simulation of DeepSeek-V3's router."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.config.columns import Numbers
from tuner.config.shapes import ModelShape
from tuner.costs.train.limited_routing import reached_places
from tuner.prices.train.collectives import distinct_places

DRAWS = 20_000


def shape(*, experts: Numbers, top_k: Numbers, groups: Numbers, per_token: Numbers) -> ModelShape:
    return ModelShape(
        hidden=1.0,
        heads=1.0,
        kv_heads=1.0,
        head_dim=1.0,
        value_dim=1.0,
        vocab=1.0,
        dense_layers=0.0,
        moe_layers=1.0,
        experts=experts,
        top_k=top_k,
        num_groups=groups,
        groups_per_token=per_token,
    )


DEEPSEEK_V3 = shape(experts=256.0, top_k=8.0, groups=8.0, per_token=4.0)
DEEPSEEK_V2 = shape(experts=160.0, top_k=6.0, groups=8.0, per_token=3.0)


def routed(model: ModelShape) -> np.ndarray:
    """Experts of many tokens, [DRAWS, k]: groups by their two best scores, then the best experts.

    Independent scores, as megatron/core/transformer/moe/moe_utils.py sums them by group.
    """
    rng = np.random.default_rng(0)
    experts, groups = int(model.experts), int(model.num_groups)
    best = int(model.top_k) // int(model.groups_per_token)
    score = rng.random((DRAWS, groups, experts // groups))
    by_group = np.sort(score, axis=2)[:, :, -best:].sum(axis=2)
    chosen = np.argsort(by_group, axis=1)[:, -int(model.groups_per_token) :]
    is_out = np.ones((DRAWS, groups), dtype=bool)
    np.put_along_axis(is_out, chosen, values=False, axis=1)
    score[is_out] = -1.0
    return np.argsort(score.reshape(DRAWS, experts), axis=1)[:, -int(model.top_k) :]


def places_of(model: ModelShape, experts: np.ndarray, places: int) -> float:
    place = experts * places // int(model.experts)
    reached = np.zeros((DRAWS, places), dtype=bool)
    np.put_along_axis(reached, place, values=True, axis=1)
    return float(reached.sum(axis=1).mean())


@each_row(
    ("model", "places"),
    [(DEEPSEEK_V3, places) for places in (1, 2, 4, 8, 16, 32, 64, 256)]
    + [(DEEPSEEK_V2, places) for places in (2, 4, 8, 16, 40)],
)
def test_the_formula_is_the_mean_of_many_routed_tokens(model: ModelShape, places: int) -> None:
    simulated = places_of(model, routed(model), places)
    assert float(reached_places(model, float(places))) == pytest.approx(simulated, rel=0.015)


def test_deepseek_v3_reaches_four_of_its_eight_nodes_at_most() -> None:
    assert float(distinct_places(8.0, 256.0, 8.0)) > 5.0
    assert float(reached_places(DEEPSEEK_V3, 8.0)) == pytest.approx(4.0)


@given(
    places=st.integers(1, 64),
    per_token=st.integers(1, 8),
    top_k=st.integers(1, 8),
)
@settings(deadline=None, max_examples=60)
def test_limits_only_lower_what_is_reached(places: int, per_token: int, top_k: int) -> None:
    limited = replace(DEEPSEEK_V3, groups_per_token=float(per_token), top_k=float(top_k))
    reached = float(reached_places(limited, float(places)))
    assert reached <= float(distinct_places(float(places), 256.0, float(top_k))) + 1e-9
    assert reached >= 1.0 - 1e-9


def test_columns_with_and_without_groups_stand_side_by_side() -> None:
    both = shape(
        experts=np.array([256.0, 256.0]),
        top_k=np.array([8.0, 8.0]),
        groups=np.array([8.0, 1.0]),
        per_token=np.array([4.0, 1.0]),
    )
    actual = np.asarray(reached_places(both, np.array([8.0, 8.0])))
    assert actual[0] == pytest.approx(float(reached_places(DEEPSEEK_V3, 8.0)))
    assert actual[1] == pytest.approx(float(distinct_places(8.0, 256.0, 8.0)))
