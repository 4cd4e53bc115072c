import itertools

import numpy as np
import pytest

from solvers.placement.matching import augmented


def test_every_matching_is_as_good_as_any() -> None:
    for columns in (1, 2, 3, 5, 6):
        rng = np.random.default_rng(columns)
        rows = np.arange(columns)
        for value_KK in rng.normal(size=(12, columns, columns)):
            best = max(
                value_KK[rows, list(order)].sum()
                for order in itertools.permutations(range(columns))
            )
            column_K = augmented(value_KK)
            assert sorted(column_K) == list(range(columns))
            assert value_KK[rows, column_K].sum() == pytest.approx(best)


def test_many_columns_give_a_hidden_matching_back() -> None:
    rng = np.random.default_rng(0)
    hidden_K = rng.permutation(40)
    value_KK = rng.random((40, 40))
    value_KK[np.arange(40), hidden_K] += 1.0
    assert (augmented(value_KK) == hidden_K).all()
