"""What smaller jobs say of whole ones: their ratio, and an error that holds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tuner.costs.residuals import residual_for
from tuner.report.content import Evidence
from tuner.report.markdown import markdown
from tuner.report.train_page import train_report
from tuner.verify.budget.budget import Budget, Spending
from tuner.verify.records import TrialRecord, Verified
from tuner.verify.verification import conclude

Hidden = Callable[..., Any]
PRIOR = residual_for("hidden", device="", device_kind="cpu")


def _concluded(wide: Any, records: list[TrialRecord]) -> Verified:
    return conclude(wide.plan, records, prior=PRIOR, space=wide.space)


def _small(wide: Any, machine: Any, devices: int, *, number: int = 0) -> TrialRecord:
    decision = wide.plan.decision
    job = present(wide.jobs(max_devices=devices).job(decision))
    record: TrialRecord = machine.record(number, decision, job.scale)
    return record


def test_a_smaller_job_corrects_the_prediction_of_the_whole_one(wide: Any, hidden: Hidden) -> None:
    record = _small(wide, hidden(7), 8)
    result = _concluded(wide, [record])
    ratio = present(record.measured_step_s) / record.predicted_step_s
    whole = wide.space.predicted(wide.plan.decision)
    said = present(result.winner_extrapolated)
    assert result.winner_step_s == said.step_time_s == pytest.approx(ratio * whole.step_time_s)
    # One trial has no error of its own: the model's band remains.
    assert said.step_time_s_band == pytest.approx([ratio * end for end in whole.step_time_s_band])
    assert said.unseen
    assert wide.space.measured(record)[0] == pytest.approx(said.step_time_s)


def test_a_whole_job_counts_before_smaller_ones_and_larger_before_them(
    wide: Any, hidden: Hidden
) -> None:
    machine = hidden(3)
    small, large = (_small(wide, machine, devices, number=devices) for devices in (4, 8))
    if small.scale == large.scale:
        pytest.fail("the plan's choice has one smaller job")
    whole = machine.record(20, wide.plan.decision, None)
    both = _concluded(wide, [small, large])
    assert both.winner_step_s == _concluded(wide, [large]).winner_step_s
    all_three = _concluded(wide, [small, whole, large])
    assert all_three.winner_step_s == whole.measured_step_s
    assert all_three.winner_extrapolated is None
    assert [one.extrapolated for one in all_three.trials] == [None] * 3


def _others(wide: Any, machine: Any, *ratios: float) -> list[TrialRecord]:
    """Trials of other decisions than the plan's, by their measured over their predicted steps."""
    records = []
    for number, (decision, ratio) in enumerate(zip(machine.candidates()[1:], ratios, strict=False)):
        record = machine.record(number, decision, None)
        step_s = ratio * record.predicted_step_s
        changes = {"measured_step_s": step_s, "measured_steps_s": (step_s,) * 5}
        records.append(record.model_copy(update=changes))
    return records


def test_the_plans_choice_without_a_trial_wins_unless_one_was_faster_than_it_can_be(
    wide: Any, hidden: Hidden
) -> None:
    machine, own = hidden(3), wide.plan.decision
    own_s = wide.space.predicted(own).step_time_s
    slower = _others(wide, machine, 1.5, 1.5, 1.5)
    result = _concluded(wide, slower)
    assert result.winner == own
    # All trials took half as long again, so it will.
    assert result.winner_step_s == pytest.approx(1.5 * own_s, rel=0.01)
    assert present(result.winner_extrapolated).unseen == ("any job of this decision",)
    assert (result.regret_ratio, result.tie) == (None, False)
    (line,) = result.notes
    assert line.startswith("the plan's own choice was not launched and stays the winner: ")
    text = markdown(train_report(wide.plan, Evidence(verified=result)))
    assert "This configuration is expected to be faster than all of 3 trials" in text
    faster = _concluded(wide, _others(wide, machine, 1.5, 1.5, 1.5, 0.5))
    assert faster.winner == faster.trials[3].decision
    assert faster.winner_extrapolated is None
    assert not faster.notes
    failed = slower[0].model_copy(
        update={"decision": own, "number": 3, "status": "crashed", "measured_step_s": None}
    )
    assert _concluded(wide, [*slower, failed]).winner != own


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(100, 180), marks=pytest.mark.slow)])
def test_stated_errors_hold_nine_of_ten_truths_of_hidden_machines(
    wide: Any, hidden: Hidden, seeds: range
) -> None:
    inside = []
    for seed in seeds:
        machine = hidden(seed)
        spending = Spending(
            jobs=wide.jobs(max_devices=8),
            budget=Budget(max_devices=8),
            clock=lambda: 0.0,
            num_steps=machine.num_steps,
        )
        for trial in _concluded(wide, machine.spent(spending, trials=6)).trials:
            low_s, high_s = present(trial.extrapolated).step_time_s_band
            inside.append(low_s <= machine.step_s(trial.decision, None) <= high_s)
    assert len(inside) >= 2 * len(seeds)
    assert np.mean(inside) >= 0.9
