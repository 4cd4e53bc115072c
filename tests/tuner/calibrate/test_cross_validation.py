"""Folds that keep together what belongs together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.calibrate.cross_validation import assign_folds, held_out
from tuner.calibrate.fit import Problem, fit, group_blocks


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=60), st.integers(1, 12))
@settings(deadline=None, max_examples=100)
def test_no_key_is_ever_on_both_sides(keys: list[str], most: int) -> None:
    fold_C = assign_folds(keys, max_folds=most)
    for key in set(keys):
        assert len({int(fold) for fold, own in zip(fold_C, keys, strict=True) if own == key}) == 1
    assert len(set(fold_C.tolist())) == min(most, len(set(keys)))


def _problem() -> Problem:
    """Six runs that take `value` seconds each; two recipes, of 1 s and of 2 s."""
    holds_PC = np.ones((1, 6))
    return Problem(
        price=lambda values_KC: values_KC[0],
        generic_KC=np.ones((1, 6)),
        low_K=np.array([0.01]),
        high_K=np.array([100.0]),
        measured_C=np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
        weight_C=np.ones(6),
        constant_P=np.array([0], dtype=np.intp),
        holds_PC=holds_PC,
        spread_P=np.array([10.0]),
        blocks=group_blocks(holds_PC),
    )


def test_what_is_held_out_is_predicted_by_the_rest() -> None:
    problem = _problem()
    residual_C = held_out(problem, fit(problem), np.array([0, 0, 0, 1, 1, 1]))
    # Without its own recipe, each is predicted to take as long as the other.
    assert residual_C == pytest.approx([np.log(2.0)] * 3 + [-np.log(2.0)] * 3, abs=0.02)


def test_runs_that_are_in_no_fit_have_no_residual() -> None:
    problem = _problem()
    used_C = np.array([True, True, False, False, False, False])
    residual_C = held_out(problem, fit(problem), np.array([0, 1, 0, 0, 0, 0]), used_C=used_C)
    assert residual_C[:2] == pytest.approx([0.0, 0.0], abs=0.01)
    assert np.isnan(residual_C[2:]).all()
