"""Whether a placement is called worth it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rows import each_row
from tuner.plans.place import LeftOut, MigrationCost, PassSpread, Verdict, WorkloadOutcome
from tuner.search.place.verdict import Gain, gain_noise, to_verdict


def fold(*, after: float, before: float = 1.5, worst: float = 1.2) -> LeftOut:
    return LeftOut(
        workload="law",
        imbalance_after=after,
        imbalance_rule=1.3,
        imbalance_before=before,
        worst_rank_ratio=worst,
        worst_rank_ratio_before=1.5,
    )


def verdict_for(
    *,
    gain: float = 0.3,
    noise: float = 0.01,
    step_gain: float | None = None,
    left_out: tuple[LeftOut, ...] = (),
    migration: MigrationCost | None = None,
    rebalance_s: float | None = None,
) -> Verdict:
    return to_verdict(
        Gain(gain_ratio=gain, noise_ratio=noise, step_gain_ratio=step_gain),
        left_out=left_out,
        migration=migration,
        rebalance_s=rebalance_s,
    )


MOVE = MigrationCost(moved_experts=7, transfer_s=3.0, break_even_s=30.0)


@each_row(
    ("stated", "word", "says"),
    [
        ({}, "worth it", "30.0 % less"),
        ({"gain": 0.01, "noise": 0.02}, "not worth it", "noise"),
        # A small share of a whole pass, however even the ranks become.
        ({"step_gain": 0.005}, "not worth it", "two runs of one configuration"),
        # Worse than nothing on an unseen workload.
        ({"left_out": (fold(after=1.1), fold(after=1.6))}, "fragile", "'law'"),
        # 2.49 times the mean where nothing reached 1.5 without a plan.
        ({"left_out": (fold(after=1.1, worst=2.49),)}, "fragile", ""),
        # A move must pay before the next one.
        ({"migration": MOVE, "rebalance_s": 10.0}, "not worth it", ""),
        ({"migration": MOVE, "rebalance_s": 100.0}, "worth it", ""),
    ],
)
def test_the_first_reason_that_applies_decides(
    stated: dict[str, Any], word: str, says: str
) -> None:
    verdict = verdict_for(**stated)
    assert verdict.word == word
    assert says in verdict.reason


def test_noise_is_the_standard_error_over_passes() -> None:
    before_P = np.array([2.0, 2.0, 2.0, 2.0])
    after_P = np.array([1.0, 1.0, 1.2, 1.2])
    # Gains 0.5, 0.5, 0.4, 0.4: deviation 0.0577, over sqrt(4), times Student's 2.353.
    assert gain_noise(before_P, after_P, counted=1e9) == pytest.approx(0.06792, rel=1e-3)


def test_one_pass_has_the_noise_of_counting() -> None:
    one = np.array([1.0])
    few, many = (gain_noise(one, one, counted=n) for n in (200.0, 20_000.0))
    assert few == pytest.approx(0.1645)
    assert many == pytest.approx(few / 10.0)


def test_passes_that_agree_by_chance_are_no_more_certain_than_their_counts() -> None:
    before_P, after_P = np.array([2.0, 2.0]), np.array([1.0, 1.0])
    assert gain_noise(before_P, after_P, counted=200.0) == pytest.approx(0.1645)


def test_correlated_passes_count_less() -> None:
    gain_P = 0.3 + 0.1 * np.random.default_rng(3).standard_normal(100)
    of_passes = gain_noise(np.ones(100), 1.0 - gain_P, counted=1e9)
    # The same gains, a hundred times as many passes: each stands for a whole document.
    of_groups = gain_noise(np.ones(10_000), 1.0 - np.repeat(gain_P, 100), counted=1e9)
    assert of_groups == pytest.approx(of_passes)
    # Ten stretches' means against a hundred passes: Student's factor and chance apart, the same.
    assert 0.5 < of_passes / (1.645 * 0.1 / 10.0) < 2.0


def outcome(*, before: float, after: float) -> WorkloadOutcome:
    spread = PassSpread(p50=1.0, p99=1.0)
    return WorkloadOutcome(
        workload="chat",
        passes_planned_from=1,
        passes_judged=1,
        imbalance_before=before,
        imbalance_rule=1.0,
        imbalance_after=after,
        pass_before=spread,
        pass_after=spread,
    )


@each_row(
    ("after", "word", "says"),
    [
        (1.04, "worth it", "up to 4.0 % more load"),
        (1.15, "fragile", "1.15 times the mean"),
        (2.5, "fragile", "2.50 times the mean"),
    ],
)
def test_less_traffic_on_overloaded_ranks_is_not_praised(
    after: float, word: str, says: str
) -> None:
    verdict = to_verdict(
        Gain(gain_ratio=0.3, noise_ratio=0.01, saved="traffic"),
        loads=((outcome(before=1.0, after=after), 0.02),),
    )
    assert verdict.word == word
    assert says in verdict.reason


@each_row(
    ("rule_gain", "noise", "word", "says"),
    [
        (0.31, None, "not worth it", "EPLB's rule saves 31.00 %"),
        (0.3, None, "worth it", ""),
        (None, None, "worth it", ""),
        (0.31, 0.02, "worth it", "no better or worse than EPLB's rule, which saves 31.00 %"),
        (0.29, 0.02, "worth it", "no better or worse than EPLB's rule, which saves 29.00 %"),
        (0.33, 0.02, "not worth it", "3.00 % more, beyond the noise of 2.00 %"),
        (0.25, 0.02, "worth it", "noise 1.00 %"),
    ],
)
def test_what_saves_less_than_eplbs_rule_beyond_the_noise_is_not_worth_it(
    rule_gain: float | None, noise: float | None, word: str, says: str
) -> None:
    gain = Gain(gain_ratio=0.3, noise_ratio=0.01, eplb_gain_ratio=rule_gain)
    verdict = to_verdict(gain if noise is None else replace(gain, eplb_noise_ratio=noise))
    assert verdict.word == word
    assert says in verdict.reason
    assert ("no better or worse" in verdict.reason) == ("no better" in says)
    assert ("EPLB's rule saves" in verdict.reason) == (word == "not worth it")


def test_a_loss_is_called_a_loss() -> None:
    beyond, within = verdict_for(gain=-0.0122, noise=0.0039), verdict_for(gain=-0.002, noise=0.0039)
    assert beyond.word == within.word == "not worth it"
    assert beyond.reason == "1.22 % more load on the most-loaded ranks, beyond the noise of 0.39 %"
    assert within.reason == "the loss of 0.20 % is within the noise of 0.39 %"
