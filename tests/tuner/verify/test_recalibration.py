"""Two factors from trials, and never a trial's own time in its own prediction."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expect import present
from tests.tuner.verify.testing import Record
from tuner.costs.residuals import residual_for
from tuner.verify.measured_steps import factors, fitted_residual, recalibrated_step_s
from tuner.verify.records import TrialRecord

Times = list[tuple[float, float]]

PRIOR = residual_for("reference", device="any", device_kind="cpu")

parts = st.floats(0.01, 10.0)
several = st.lists(st.tuples(parts, parts), min_size=4, max_size=8)


def _trials(record: Record, seconds: Times, *, a: float, b: float) -> list[TrialRecord]:
    """Trials without noise: measured = a * computation + b * communication."""
    return [
        record(
            number,
            measured_s=a * computation + b * communication,
            predicted_step_s=computation + communication,
            predicted_communication_s=communication,
        )
        for number, (computation, communication) in enumerate(seconds)
    ]


def test_known_factors_come_back_from_trials_without_noise(record: Record) -> None:
    seconds = [(1.0, 0.1), (1.0, 1.0), (0.2, 1.0), (2.0, 0.5), (0.5, 2.0), (1.0, 3.0)]
    computation, communication = factors(_trials(record, seconds, a=1.4, b=0.8))
    # The prior pulls both a little towards the median ratio, which lies between them.
    assert computation == pytest.approx(1.4, rel=0.02)
    assert communication == pytest.approx(0.8, rel=0.02)
    assert 0.8 < communication < computation < 1.4


@given(seconds=several, a=st.floats(0.3, 3.0))
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_common_factor_comes_back_exactly(record: Record, seconds: Times, a: float) -> None:
    # Prior and data agree, so the pull costs nothing.
    computation, communication = factors(_trials(record, seconds, a=a, b=a))
    assert computation == pytest.approx(a, rel=1e-6)
    assert communication == pytest.approx(a, rel=1e-6)


def test_alike_trials_cannot_tell_the_factors_apart_so_both_are_one(record: Record) -> None:
    assert factors(_trials(record, [(1.0, 0.0)] * 3, a=1.5, b=9.0)) == pytest.approx((1.5, 1.5))


@given(seconds=several, own=st.floats(0.01, 100.0), chosen=st.integers(0, 3))
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_trials_own_time_does_not_change_its_recalibrated_prediction(
    record: Record, seconds: Times, own: float, chosen: int
) -> None:
    trials = _trials(record, seconds, a=1.3, b=0.9)
    before = recalibrated_step_s(trials[chosen], trials)
    trials[chosen] = trials[chosen].model_copy(update={"measured_step_s": own})
    assert recalibrated_step_s(trials[chosen], trials) == before


def test_failed_trials_say_nothing_about_the_others(record: Record) -> None:
    trials = _trials(record, [(1.0, 0.5), (2.0, 0.5), (1.0, 2.0)], a=1.2, b=1.1)
    failed = record(9, measured_s=None)
    assert recalibrated_step_s(trials[0], [*trials, failed]) == recalibrated_step_s(
        trials[0], trials
    )
    # A failed trial still learns what it should have taken.
    assert recalibrated_step_s(failed, trials) == pytest.approx(1.2 * 1.5 + 1.1 * 0.5, rel=0.05)


def test_too_few_others_give_nothing(record: Record) -> None:
    two = [record(0, measured_s=2.0), record(1, measured_s=3.0)]
    assert recalibrated_step_s(two[0], two) is None
    assert fitted_residual(two, prior=PRIOR) is None
    third = record(2, measured_s=2.5)
    assert recalibrated_step_s(third, two) is not None
    assert fitted_residual([*two, third], prior=PRIOR) is not None


def test_trials_that_nothing_predicts_give_no_residual(record: Record) -> None:
    trials = [record(number, measured_s=1e-9) for number in range(4)]
    assert fitted_residual(trials, prior=PRIOR) is None


def test_no_trial_is_an_impossible_argument() -> None:
    with pytest.raises(ValueError, match="no trial"):
        factors([])


def test_the_fitted_residual_corrects_the_one_that_the_plan_was_made_with(record: Record) -> None:
    trials = _trials(record, [(1.0, 0.1), (1.0, 1.0), (0.2, 1.0), (2.0, 0.5)], a=1.2, b=1.2)
    prior = PRIOR.model_copy(update={"computation": 2.0, "communication": 0.5})
    result = present(fitted_residual(trials, prior=prior))
    assert (result.computation, result.communication) == pytest.approx((2.4, 0.6))
    assert (result.engine, result.release, result.device_kind) == ("reference", "2.0", "cpu")
    assert result.num_runs == 4
    # Nothing is left over, but nobody believes a band of nothing.
    assert result.band_ratio == 0.02
