"""Error measures worked by hand."""

import pytest

from tuner.backtest.errors import ScoredRow, summarise_errors


def _row(
    predicted_s: float | None, measured_s: float, case: str = "a", **more: object
) -> ScoredRow:
    return ScoredRow(
        predicted_s=predicted_s,
        measured_s=measured_s,
        tokens=1.0,
        case=(case,),
        **more,  # type: ignore[arg-type]  # fields by name
    )


def test_errors_are_shares_of_the_measurement() -> None:
    # |p - m| / m: 0.1, 0.2, 0.5; p / m: 1.1, 0.8, 1.5.
    result = summarise_errors([_row(1.1, 1.0, "a"), _row(1.6, 2.0, "b"), _row(6.0, 4.0, "c")])
    assert result.median_ape == pytest.approx(0.2)
    assert result.mean_ape == pytest.approx(0.8 / 3.0)
    # Between 0.2 and 0.5 at 0.8 of the way: numpy's linear quantile.
    assert result.p90_ape == pytest.approx(0.2 + 0.8 * 0.3)
    assert result.bias == pytest.approx(0.1)
    assert result.choice_regret is None
    assert result.rank_correlation is None


def test_nothing_predicted_says_nothing() -> None:
    result = summarise_errors([_row(None, 1.0)])
    assert (result.rows, result.predicted) == (1, 0)
    assert result.median_ape is None
    assert result.bias is None
    assert result.false_fits is None


def test_regret_is_what_the_predicted_best_costs_more() -> None:
    # Predicted best is the second, measured 1.2 against the best, 1.0; it is among the best three.
    result = summarise_errors([_row(3.0, 1.0), _row(1.0, 1.2), _row(2.0, 1.5), _row(4.0, 1.1)])
    assert result.choice_regret == pytest.approx(0.2)
    # Best three by prediction: 1.2, 1.5, 1.0.
    assert result.choice_regret_top3 == pytest.approx(0.0)


def test_regret_is_averaged_over_cases() -> None:
    result = summarise_errors(
        [_row(1.0, 1.3, "a"), _row(2.0, 1.0, "a"), _row(1.0, 1.0, "b"), _row(2.0, 9.0, "b")]
    )
    assert result.choice_cases == 2
    assert result.choice_regret == pytest.approx(0.15)
    assert result.choice_regret_max == pytest.approx(0.3)


def test_runs_of_one_case_are_compared_per_token() -> None:
    # Twice the batch in 1.5 times the time is the better run.
    small = ScoredRow(predicted_s=1.0, measured_s=1.0, tokens=1.0, case=("a",))
    large = ScoredRow(predicted_s=1.5, measured_s=1.5, tokens=2.0, case=("a",))
    assert summarise_errors([small, large]).choice_regret == pytest.approx(0.0)


def test_rank_correlation_is_spearmans_within_cases() -> None:
    rising = [_row(float(i), float(i**3), "a") for i in range(1, 5)]
    falling = [_row(float(i), 1.0 / i, "b") for i in range(1, 5)]
    assert summarise_errors(rising).rank_correlation == pytest.approx(1.0)
    both = summarise_errors(rising + falling)
    assert both.rank_correlation == pytest.approx(0.0)
    assert both.rank_correlation_min == pytest.approx(-1.0)


def test_ties_share_their_rank() -> None:
    # Ranks 0.5, 0.5, 2 against 0, 1, 2: covariance 1.5, variances 1.5 and 2 (sums of squares).
    result = summarise_errors([_row(1.0, 1.0), _row(1.0, 2.0), _row(2.0, 3.0)])
    assert result.rank_correlation == pytest.approx(1.5 / (1.5 * 2.0) ** 0.5)


def test_fits_are_held_against_what_ran() -> None:
    rows = [
        _row(1.0, 1.0, fits=False),
        _row(1.0, 1.0, fits=True),
        ScoredRow(
            predicted_s=1.0,
            measured_s=None,
            tokens=1.0,
            case=("a",),
            fits=True,
            has_run_out_of_memory=True,
        ),
    ]
    result = summarise_errors(rows)
    assert result.false_misfits == 1
    assert result.false_fits == 1


def test_memory_errors_need_both_numbers() -> None:
    rows = [
        _row(1.0, 1.0, predicted_bytes=9.0, measured_bytes=10.0),
        _row(1.0, 1.0, predicted_bytes=9.0),
    ]
    result = summarise_errors(rows)
    assert result.memory_rows == 1
    assert result.memory_max_ape == pytest.approx(0.1)
