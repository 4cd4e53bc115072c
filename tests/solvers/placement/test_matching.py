import itertools

import numpy as np
import pytest

from solvers.placement.matching import augmented, best_matchings, best_values


def test_every_matching_is_as_good_as_any() -> None:
    for columns in (
        1,
        2,
        3,
        5,
        6,
    ):
        rng = np.random.default_rng(columns)
        value_XKK = rng.normal(size=(12, columns, columns))
        rows = np.arange(columns)
        expected = [
            max(
                value_KK[rows, list(order)].sum()
                for order in itertools.permutations(range(columns))
            )
            for value_KK in value_XKK
        ]
        value_X, column_XK = best_matchings(value_XKK)
        assert value_X == pytest.approx(expected)
        assert best_values(np.moveaxis(value_XKK, 0, -1)) == pytest.approx(expected)
        for value_KK, column_K, best in zip(value_XKK, column_XK, expected, strict=True):
            assert sorted(column_K) == list(range(columns))
            assert value_KK[rows, column_K].sum() == pytest.approx(best)
            by_paths = augmented(value_KK)
            assert sorted(by_paths) == list(range(columns))
            assert value_KK[rows, by_paths].sum() == pytest.approx(best)


def test_many_columns_give_a_hidden_matching_back() -> None:
    rng = np.random.default_rng(0)
    hidden_K = rng.permutation(40)
    value_KK = rng.random((40, 40))
    value_KK[np.arange(40), hidden_K] += 1.0
    value_X, column_XK = best_matchings(value_KK[None])
    assert (column_XK[0] == hidden_K).all()
    assert best_values(value_KK[:, :, None]) == pytest.approx(value_X)
