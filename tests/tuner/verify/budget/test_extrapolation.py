"""What trials say of jobs that were not launched, on cases worked out by hand and at random."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuner.verify.budget.extrapolation import (
    NINE_OF_TEN,
    Estimates,
    MeasuredTrial,
    estimates,
    infer_belief,
)
from tuner.verify.budget.scheduler import Budget, Spending
from tuner.verify.budget.trial_options import PARTS, STATE, TrialJob, parts_s_K

Hidden = Callable[..., Any]


def _job(
    wide: Any, parts: Sequence[float], *, candidate: int = 0, layers: int | None = None
) -> TrialJob:
    """A job with these seconds of its parts; a smaller one keeps so many layers."""
    plan = wide.plan
    possible = wide.possible()
    decision = plan.runners_up[candidate].decision
    scales = [one.job.scale for one in possible.options_of(decision) if one.job.scale is not None]
    scale = None if layers is None else next(one for one in scales if len(one.layers) == layers)
    # A model of eight layers.
    whole_s = sum(parts) * 8.0 / (layers or 8)
    return TrialJob(
        candidate=decision,
        scale=scale,
        parts_s_K=np.array(parts),
        sync=(16, 2, True),
        whole_s=whole_s,
    )


def _seen(job: TrialJob, measured_s: float) -> MeasuredTrial:
    return MeasuredTrial(job=job, measured_s=measured_s, noise_s=0.0)


@pytest.mark.slow
def test_a_common_factor_carries_over_and_its_error_is_what_one_candidate_is_off(
    wide: Any,
) -> None:
    small = _job(wide, (1.0, 0.5, 0.0, 0.0, 0.0), layers=4)
    whole = _job(wide, (2.0, 1.0, 0.0, 0.0, 0.0))
    belief = infer_belief([_seen(small, 3.0)], [whole], band_ratio=0.3)
    # Twice what was predicted, with the same shares: 2 * 3 s, off by own terms of 5 % each.
    assert belief.mean_s_T[0] == pytest.approx(6.0)
    assert 0.05 < belief.error_s(0) / 6.0 < 0.25


def test_two_layer_counts_tell_layers_from_ends(wide: Any) -> None:
    few = _job(wide, (1.0, 0.0, 1.0, 0.0, 0.0), layers=2)
    more = _job(wide, (2.0, 0.0, 1.0, 0.0, 0.0), layers=4)
    whole = _job(wide, (4.0, 0.0, 1.0, 0.0, 0.0))
    # Layers take what is predicted, ends three times that: 7 s in all.
    both = infer_belief([_seen(few, 4.0), _seen(more, 5.0)], [whole], band_ratio=0.3)
    one = infer_belief([_seen(few, 4.0)], [whole], band_ratio=0.3)
    # Two trials of 4 and 5 s move away from 2 * 5 s and towards the truth, and are surer.
    assert abs(both.mean_s_T[0] - 7.0) < abs(one.mean_s_T[0] - 7.0)
    assert both.error_s(0) < one.error_s(0)


def test_gradient_sums_over_more_replicas_keep_the_models_band(wide: Any) -> None:
    small = _job(wide, (1.0, 0.0, 0.0, 1.0, 0.0), layers=4)
    alike = _job(wide, (2.0, 0.0, 0.0, 2.0, 0.0))
    other = replace(alike, sync=(64, 8, True))
    belief = infer_belief([_seen(small, 2.0)], [alike, other], band_ratio=0.6)
    assert belief.mean_s_T[0] == pytest.approx(belief.mean_s_T[1], rel=0.05)
    # Two of four seconds, off by 0.6 / 1.645 in each of the two sums: 60 % of 2 s at the least.
    assert belief.error_s(1) > 1.2 > belief.error_s(0)
    narrow = infer_belief([_seen(small, 2.0)], [other], band_ratio=0.01)
    assert belief.error_s(1) > narrow.error_s(0)


def test_a_whole_job_that_ran_leaves_nothing_but_its_noise(wide: Any) -> None:
    whole = _job(wide, (2.0, 1.0, 0.5, 0.5, 0.1))
    seen = MeasuredTrial(job=whole, measured_s=5.0, noise_s=0.05)
    belief = infer_belief([seen], [whole], band_ratio=0.3)
    assert belief.mean_s_T[0] == pytest.approx(5.0, rel=0.01)
    assert belief.error_s(0) == pytest.approx(NINE_OF_TEN * 0.05, rel=0.1)


def test_trials_that_agree_narrow_the_error_and_trials_that_do_not_widen_it(wide: Any) -> None:
    parts = (1.0, 0.5, 0.2, 0.2, 0.1)
    small = [_job(wide, parts, candidate=one, layers=4) for one in range(6)]
    whole = _job(wide, tuple(2.0 * one for one in parts))
    agreeing = infer_belief([_seen(one, 2.0) for one in small], [whole], band_ratio=0.3)
    scattered = [2.0, 2.8, 1.5, 2.6, 1.4, 2.2]
    unlike = [_seen(one, took) for one, took in zip(small, scattered, strict=True)]
    assert infer_belief(unlike, [whole], band_ratio=0.3).error_s(0) > 2.0 * agreeing.error_s(0)


def test_a_job_nearer_to_the_whole_one_says_more_of_it(wide: Any) -> None:
    parts = (1.0, 0.5, 0.0, 0.0, 0.0)
    whole = _job(wide, parts)
    errors = []
    for layers in (1, 2, 4):
        small = _job(wide, tuple(one * layers / 8.0 for one in parts), layers=layers)
        assert small.halvings == pytest.approx(np.log2(8 / layers))
        belief = infer_belief([_seen(small, small.predicted_s)], [whole], band_ratio=0.3)
        assert belief.mean_s_T[0] == pytest.approx(1.5)
        errors.append(belief.error_s(0))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.2 * errors[-1]


def test_nothing_seen_is_the_models_word(wide: Any) -> None:
    whole = _job(wide, (2.0, 1.0, 0.0, 0.0, 0.0))
    belief = infer_belief([], [whole], band_ratio=0.3)
    assert belief.mean_s_T[0] == pytest.approx(3.0)
    assert belief.error_s(0) > 0.3 * 3.0
    assert infer_belief([], [], band_ratio=0.3).mean_s_T.size == 0


def test_the_parts_of_a_prediction_are_its_step(wide: Any) -> None:
    for option in wide.possible().options_of(wide.plan.decision):
        parts_K = parts_s_K(option.predicted)
        assert parts_K.sum() == pytest.approx(option.predicted.step_time_s)
        assert (parts_K >= 0.0).all()
        causes = option.predicted.breakdown_s
        assert parts_K[STATE] == pytest.approx(causes.get("data_communication", 0.0))
        assert parts_K[PARTS.index("head")] == pytest.approx(causes["embedding"] + causes["head"])


def test_the_plans_choice_is_judged_without_a_trial_of_its_own(wide: Any, hidden: Hidden) -> None:
    machine, possible = hidden(7), wide.possible()
    slow = possible.candidates()[-1]
    assert slow != wide.plan.decision
    result = estimates(possible, [machine.record(0, slow, None)])
    assert [job.candidate for job in result.jobs] == [slow, wide.plan.decision]
    said = result.extrapolated(wide.plan.decision)
    assert said is not None
    assert said.unseen == ("any job of this decision, at any scale",)
    assert result.extrapolated(slow) is None
    assert estimates(possible, []).best is None


def _tried(wide: Any, machine: Any, budget: Budget, *, trials: int) -> tuple[Estimates, Spending]:
    possible = wide.possible(max_devices=budget.max_devices or 16)
    spending = Spending(
        possible=possible,
        budget=budget,
        clock=lambda: machine.clock_s,
        num_steps=machine.num_steps,
    )
    return estimates(possible, machine.spent(spending, trials=trials)), spending


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(100, 180), marks=pytest.mark.slow)])
def test_stated_errors_hold_nine_of_ten_truths_of_hidden_machines(
    wide: Any, hidden: Hidden, seeds: range
) -> None:
    inside = []
    for seed in seeds:
        machine = hidden(seed)
        result, _ = _tried(wide, machine, Budget(max_devices=8), trials=6)
        for job in result.jobs:
            said = result.extrapolated(job.candidate)
            assert said is not None
            low_s, high_s = said.step_time_s_band
            inside.append(low_s <= machine.step_s(job.candidate, None) <= high_s)
    assert len(inside) >= 2 * len(seeds)
    assert np.mean(inside) >= 0.9
