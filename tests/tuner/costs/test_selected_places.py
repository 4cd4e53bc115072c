"""Places reached under recorded loads, against the sum over all subsets."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.costs.analytic.links import distinct_places
from tuner.costs.selected_places import Floats, busiest_places, selection_weights


def _by_subsets(weights: list[float], *, top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of every subset: the product of its weights over the sum of all."""
    product = {
        subset: float(np.prod([weights[e] for e in subset]))
        for subset in combinations(range(len(weights)), top_k)
    }
    total = sum(product.values())
    return {subset: value / total for subset, value in product.items()}


def test_two_of_three_experts_by_hand() -> None:
    # Picked 0.9, 0.7, 0.4 of the time means left out 0.1, 0.3, 0.6 of it: with two of three picked
    # the subset is who is left out. Places 0, 1, 2 are the experts: 3 * 0.9.
    weight_LE = selection_weights(np.array([[0.45, 0.35, 0.20]]), top_k=2)
    chance = _by_subsets(weight_LE[0].tolist(), top_k=2)
    assert chance[1, 2] == pytest.approx(0.1, abs=1e-5)
    assert chance[0, 2] == pytest.approx(0.3, abs=1e-5)
    assert busiest_places(weight_LE, top_k=2, places=3) == pytest.approx(2.7, abs=1e-5)
    assert busiest_places(weight_LE, top_k=2, places=1) == pytest.approx(1.0)


loads = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6)


@given(first=loads, second=loads, top_k=st.integers(1, 5), places=st.sampled_from([1, 2, 3, 6]))
@settings(deadline=None, max_examples=80)
def test_frequencies_are_met_and_places_are_those_of_all_subsets(
    first: list[float], second: list[float], top_k: int, places: int
) -> None:
    load_LE = np.array([first, second])
    weight_LE = selection_weights(load_LE, top_k=top_k)
    found_L = busiest_places(weight_LE, top_k=top_k, places=places)
    for layer in range(2):
        chance = _by_subsets(weight_LE[layer].tolist(), top_k=top_k)
        picked = [sum(p for subset, p in chance.items() if e in subset) for e in range(6)]
        wanted = top_k * load_LE[layer] / load_LE[layer].sum()
        if wanted.max() < 0.999:
            assert picked == pytest.approx(wanted.tolist(), abs=1e-4)
        size = 6 // places
        reached = [
            sum(p for subset, p in chance.items() if any(e // size == place for e in subset))
            for place in range(places)
        ]
        assert found_L[layer] == pytest.approx(places * max(reached), abs=1e-9)


@pytest.mark.parametrize(("experts", "top_k"), [(64, 8), (128, 8), (256, 8), (8, 2)])
def test_equal_loads_give_the_closed_form(experts: int, top_k: int) -> None:
    weight_LE = selection_weights(np.full((1, experts), 3.0), top_k=top_k)
    for places in (1, 2, 4, 8):
        closed = float(distinct_places(float(places), float(experts), float(top_k)))
        assert busiest_places(weight_LE, top_k=top_k, places=places) == pytest.approx(closed)


def test_skewed_loads_reach_the_busiest_place_more_often() -> None:
    rng = np.random.default_rng(3)
    load_LE: Floats = rng.lognormal(0.0, 0.63, (4, 64))
    weight_LE = selection_weights(load_LE, top_k=8)
    balanced = float(distinct_places(8.0, 64.0, 8.0))
    assert np.all(busiest_places(weight_LE, top_k=8, places=8) > balanced)


def test_an_expert_that_every_token_picks_is_reached_always() -> None:
    # 98 % of the tokens go to expert 0, as in layers of real models; more than all cannot.
    for share in (0.98 / 8, 0.5):
        load_LE = np.full((1, 64), (1 - share) / 63)
        load_LE[0, 0] = share
        found = busiest_places(selection_weights(load_LE, top_k=8), top_k=8, places=8)
        assert 8 * 0.98 <= found[0] <= 8.0


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k 9"):
        selection_weights(np.ones((1, 8)), top_k=9)
    with pytest.raises(ValueError, match="not all zero"):
        selection_weights(np.zeros((1, 8)), top_k=2)
    with pytest.raises(ValueError, match="3 equal places"):
        busiest_places(np.ones((1, 8)), top_k=2, places=3)


def test_when_every_expert_is_picked_every_place_is_reached() -> None:
    weight_LE = selection_weights(np.array([[0.7, 0.1, 0.1, 0.1]]), top_k=4)
    assert busiest_places(weight_LE, top_k=4, places=2) == pytest.approx(2.0)
