import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from profilers.non_negative import relative_fit

Floats = NDArray[np.float64]


def error_of(columns_NF: Floats, weights_F: Floats, seconds_N: Floats) -> float:
    return float(np.sum((columns_NF @ weights_F / seconds_N - 1.0) ** 2))


def best_of_all_sets(columns_NF: Floats, seconds_N: Floats) -> float:
    """The oracle: the best of the sets of columns whose free solution is nowhere negative."""
    best, num_columns = np.inf, columns_NF.shape[1]
    for count in range(1, num_columns + 1):
        for chosen in map(list, itertools.combinations(range(num_columns), count)):
            part_NF = columns_NF[:, chosen] / seconds_N[:, None]
            found = np.linalg.lstsq(part_NF, np.ones(len(seconds_N)), rcond=None)[0].astype(
                np.float64
            )
            if np.all(found >= 0.0):
                best = min(best, error_of(columns_NF[:, chosen], found, seconds_N))
    return best


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), num_columns=st.integers(1, 5), num_points=st.integers(1, 12))
def test_it_is_as_good_as_the_best_set_of_columns(
    seed: int, num_columns: int, num_points: int
) -> None:
    rng = np.random.default_rng(seed)
    columns_NF = np.exp(rng.normal(0.0, 3.0, (num_points, num_columns)))
    seconds_N = np.exp(rng.normal(0.0, 2.0, num_points))
    weights_F = relative_fit(columns_NF, seconds_N)
    assert np.all(weights_F >= 0.0)
    found = error_of(columns_NF, weights_F, seconds_N)
    assert found <= best_of_all_sets(columns_NF, seconds_N) + 1e-6


def test_weights_are_recovered_and_no_point_is_left_at_zero() -> None:
    rng = np.random.default_rng(0)
    columns_NF = np.stack([np.ones(40), *np.exp(rng.uniform(0.0, 20.0, (2, 40)))], axis=1)
    weights_F = relative_fit(columns_NF, columns_NF @ np.array([1e-5, 0.0, 1e-11]))
    assert np.allclose(weights_F, [1e-5, 0.0, 1e-11], rtol=1e-6, atol=1e-18)
    # The second column alone would fit two of three points exactly and say 0 s of the third.
    columns_NF = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    weights_F = relative_fit(columns_NF, np.array([1.0, 1.0, 1e9]))
    assert np.all(columns_NF @ weights_F > 0.0)
