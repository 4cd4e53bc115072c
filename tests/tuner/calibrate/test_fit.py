"""The fit itself, on problems whose answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.arrays import Floats
from tuner.calibrate.fit import Problem, fit, group_blocks, loss, refit, slopes

WORK_CK = np.array([[1.0, 0.1], [2.0, 3.0], [0.5, 4.0], [3.0, 1.0], [1.0, 1.0], [0.2, 2.0]])


def _problem(
    measured_C: Floats,
    *,
    spread: float = 10.0,
    high: float = 100.0,
    weight_C: Floats | None = None,
    holds_PC: Floats | None = None,
    constant_P: tuple[int, ...] = (0, 1),
) -> Problem:
    """Seconds are work by constants: s_c = sum_k WORK_ck * value_kc."""
    num = len(measured_C)
    holds_PC = np.ones((len(constant_P), num)) if holds_PC is None else holds_PC
    return Problem(
        price=lambda values_KC: (WORK_CK[:num].T * values_KC).sum(axis=0),
        generic_KC=np.ones((2, num)),
        low_K=np.array([0.01, 0.01]),
        high_K=np.array([high, high]),
        measured_C=measured_C,
        weight_C=np.ones(num) if weight_C is None else weight_C,
        constant_P=np.array(constant_P, dtype=np.intp),
        holds_PC=holds_PC,
        spread_P=np.full(len(constant_P), spread),
        blocks=group_blocks(holds_PC),
    )


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
@settings(deadline=None, max_examples=30)
def test_planted_constants_are_found(first: float, second: float) -> None:
    result = fit(_problem(WORK_CK @ np.array([first, second])))
    assert np.exp(result.offset_P) == pytest.approx([first, second], rel=2e-3)


def test_offsets_of_parts_are_identified() -> None:
    # The second constant is 2 for the first half of the runs and 3 for the rest.
    holds_PC = np.array([[1.0] * 6, [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    second_C = np.array([2.0] * 3 + [3.0] * 3)
    measured_C = WORK_CK[:, 0] * 1.5 + WORK_CK[:, 1] * second_C
    result = fit(_problem(measured_C, holds_PC=holds_PC, constant_P=(0, 1, 1)))
    assert np.exp(result.offset_P) == pytest.approx([1.5, 2.0, 3.0], rel=5e-3)


def test_a_strong_prior_holds_the_generic_values() -> None:
    result = fit(_problem(WORK_CK @ np.array([2.0, 2.0]), spread=1e-4))
    assert np.abs(result.offset_P).max() < 1e-3


def test_an_outlier_pulls_little() -> None:
    measured_C = WORK_CK @ np.array([1.0, 1.0])
    measured_C[0] *= 3.0
    result = fit(_problem(measured_C))
    # Least squares would move the others by a third of log(3).
    assert np.abs(result.residual_C[1:]).max() < 0.15


def test_constants_stay_inside_their_bounds() -> None:
    problem = _problem(WORK_CK @ np.array([50.0, 50.0]), high=2.0)
    assert problem.values(fit(problem).offset_P).max() <= 2.0


def test_slopes_are_derivatives_of_the_logarithm() -> None:
    problem = _problem(WORK_CK @ np.array([1.0, 1.0]))
    slope_CP = slopes(problem, np.zeros(2))
    # d log(a + b) / d log a = a / (a + b) at a, b = WORK.
    share_C = WORK_CK[:, 0] / WORK_CK.sum(axis=1)
    assert slope_CP[:, 0] == pytest.approx(share_C, abs=0.01)


def test_leaving_runs_out_forgets_them() -> None:
    measured_C = WORK_CK @ np.array([2.0, 0.5])
    spoiled_C = measured_C.copy()
    spoiled_C[5] *= 1.6
    weight_C = np.array([1.0] * 5 + [0.0])
    problem = _problem(spoiled_C)
    residual_C = refit(problem, fit(problem), weight_C)
    assert np.abs(residual_C[:5]).max() < 5e-3
    assert residual_C[5] == pytest.approx(-np.log(1.6), abs=0.02)


def test_a_fit_never_ends_worse_than_it_began() -> None:
    problem = _problem(np.array([5.0, 0.1, 7.0, 0.3, 9.0, 0.01]))
    start = loss(problem, np.zeros(2), problem.residuals(np.zeros(2)), problem.weight_C)
    result = fit(problem)
    assert loss(problem, result.offset_P, result.residual_C, problem.weight_C) < start
