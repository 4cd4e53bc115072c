"""Winner, regret, ties and factors from records made by hand.

All deployments are predicted 10 ms to the first token, 1 ms a further one, and 10 good requests a
second and device; see conftest.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import present
from tests.rows import each_row
from tests.tuner.engines.serving.testing import aggregated
from tuner.config.serve import ServeDecision
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.plans.serve import Latency, PlannedHits, ServePlan, ServePrediction
from tuner.verify.deployments.conclusion import conclude
from tuner.verify.deployments.records import ServeTrialRecord

Plan = Callable[..., ServePlan]

SLO = {"ttft": {"p90": 0.05}, "tpot": {"p90": 0.005}}


def run(**changes: Any) -> BenchmarkRun:
    ttft_s, tpot_s = changes.pop("ttft_s", 0.02), changes.pop("tpot_s", 0.002)
    fields: dict[str, Any] = {
        "completed": 100,
        "failed": 0,
        "duration_s": 1.0,
        "ttft_s": Spread(mean=ttft_s, p50=ttft_s, p90=ttft_s, p99=ttft_s),
        "tpot_s": Spread(mean=tpot_s, p50=tpot_s, p90=tpot_s, p99=tpot_s),
        "requests_per_s": 100.0,
        "output_tokens_per_s": 500.0,
        "goodput_requests_per_s": 80.0,
        "mean_input_tokens": 4.0,
        "mean_output_tokens": 5.0,
    }
    return BenchmarkRun.model_validate(fields | changes)


def record(
    plan: ServePlan, place: int, *runs: BenchmarkRun, number: int | None = None, **changes: Any
) -> ServeTrialRecord:
    """Return the launch of the plan's decision of this place, the choice being 0."""
    decisions = [plan.decision, *(other.decision for other in plan.alternatives)]
    fields: dict[str, Any] = {
        "number": place if number is None else number,
        "origin": "alternative" if place else "plan",
        "decision": decisions[place],
        "status": "ok" if runs else "crashed",
        "predicted": plan.predicted,
        "runs": runs,
        "wall_s": 1.0,
        "engine": "sglang",
        "client": "vllm-bench",
    }
    return ServeTrialRecord.model_validate(fields | changes)


def test_the_fewest_devices_that_hold_the_targets_win(serve_plan: Plan) -> None:
    plan = serve_plan(slo=SLO)
    slow = record(plan, 0, run(ttft_s=0.06))
    result = conclude(plan, [slow, record(plan, 1, run()), record(plan, 2, run(ttft_s=0.001))])
    assert result.winner == plan.alternatives[0].decision
    assert result.trials[0].misses == ("TTFT P90 60.0 ms of 50.0 ms",)
    assert result.regret_ratio is None
    assert "the plan's choice misses its SLOs: TTFT P90 60.0 ms of 50.0 ms" in result.notes


def test_regret_is_what_the_first_choice_costs_more(serve_plan: Plan) -> None:
    plan = serve_plan((24, 16, 8), slo=SLO)
    result = conclude(plan, [record(plan, place, run()) for place in (0, 1, 2)])
    # 24 devices where 8 hold the targets too.
    assert result.regret_ratio == pytest.approx(2.0)
    assert result.winner == plan.alternatives[1].decision


def test_goodput_is_judged_by_the_device_with_its_noise(serve_plan: Plan) -> None:
    plan = serve_plan((8, 16), objective="goodput")

    def measured(first: list[float], second: list[float]) -> Any:
        runs = [[run(goodput_requests_per_s=one) for one in each] for each in (first, second)]
        return [record(plan, place, *each) for place, each in enumerate(runs)]

    # 80 / 8 = 10 against 176 / 16 = 11: 10 % more, and no noise.
    result = conclude(plan, measured([80.0] * 3, [176.0] * 3))
    assert result.winner == plan.alternatives[0].decision
    assert result.regret_ratio == pytest.approx(0.1)
    assert not result.tie
    # The same medians with runs that differ by half: a tie.
    assert conclude(plan, measured([60.0, 80.0, 100.0], [120.0, 176.0, 220.0])).tie


def test_equal_devices_are_ordered_by_the_time_of_a_request(serve_plan: Plan) -> None:
    plan = serve_plan((16, 8), slo=SLO)
    twin = aggregated(count=1, devices=16, attention_dp=16, ep=16)
    plan = plan.model_copy(
        update={
            "alternatives": (plan.alternatives[0].model_copy(update={"decision": twin}),),
        }
    )
    # 20 ms + 4 * 2 ms against 22 ms + 4 * 1 ms.
    result = conclude(
        plan, [record(plan, 0, run()), record(plan, 1, run(ttft_s=0.022, tpot_s=0.001))]
    )
    assert result.winner == twin
    assert result.regret_ratio == 0.0
    assert result.tie


def test_money_decides_where_the_goal_is_cost(serve_plan: Plan, predicted: ServePrediction) -> None:
    plan = serve_plan((8, 16), objective="cost")
    cheap = predicted.model_copy(update={"cost_per_hour": 24.0})
    result = conclude(plan, [record(plan, 0, run()), record(plan, 1, run(), predicted=cheap)])
    assert result.winner == plan.alternatives[0].decision
    # 48 an hour against 24.
    assert result.regret_ratio == pytest.approx(1.0)


def test_factors_are_medians_and_each_deployment_is_judged_by_the_others(
    serve_plan: Plan,
) -> None:
    plan = serve_plan()
    ratios = (2.0, 3.0, 7.0)
    result = conclude(
        plan,
        [record(plan, place, run(ttft_s=0.01 * ratio)) for place, ratio in enumerate(ratios)],
    )
    assert result.factors is not None
    assert result.factors.ttft == pytest.approx(3.0)
    assert result.factors.tpot == pytest.approx(2.0)
    # The medians of (3, 7), (2, 7) and (2, 3), of 10 ms each.
    repeated = [trial.recalibrated_ttft_s for trial in result.trials]
    assert repeated == pytest.approx([0.05, 0.045, 0.025])
    assert result.accuracy.ttft_median_ape == pytest.approx(2.0 / 3.0)
    # |50 - 20| / 20, |45 - 30| / 30, |25 - 70| / 70.
    assert result.accuracy.recalibrated_ttft_median_ape == pytest.approx(45.0 / 70.0)
    assert result.accuracy.tpot_within_band == 0


def test_a_run_that_holds_by_luck_is_outvoted(serve_plan: Plan) -> None:
    plan = serve_plan(slo=SLO)
    result = conclude(plan, [record(plan, 0, run(), run(ttft_s=0.06), run())])
    assert result.winner == plan.decision
    assert "some runs of a deployment meet the SLOs and others do not" in result.notes


def test_launches_of_one_decision_are_joined(serve_plan: Plan) -> None:
    plan = serve_plan(slo=SLO)
    first = record(plan, 0, run(ttft_s=0.02), run(ttft_s=0.03))
    repeated = record(plan, 0, run(ttft_s=0.04), number=5, origin="repeat")
    failed = record(plan, 0, number=6, origin="repeat", reason="broke")
    (trial,) = conclude(plan, [failed, repeated, first]).trials
    assert (trial.status, trial.runs, trial.measured_ttft_s) == ("ok", 3, 0.03)
    # A launch that ran after one that did not is what counts.
    (trial,) = conclude(plan, [record(plan, 0, reason="broke"), repeated]).trials
    assert (trial.status, trial.reason, trial.runs) == ("ok", "", 1)


@each_row(
    ("runs", "ratio", "holds"),
    [
        # Exactly 1 % may fail.
        ([run(completed=99, failed=1)], 0.01, True),
        ([run(completed=98, failed=2)], 0.02, False),
        ([run(completed=99, failed=1), run(failed=None)], None, True),
    ],
)
def test_failed_requests_are_counted(
    serve_plan: Plan, runs: list[BenchmarkRun], ratio: float | None, holds: bool
) -> None:
    plan = serve_plan()
    result = conclude(plan, [record(plan, 0, *runs)])
    (trial,) = result.trials
    assert (trial.failed_ratio, trial.holds_targets) == (ratio, holds)
    assert any("requests failed" in note for note in result.notes)


def test_a_percentile_that_the_client_does_not_tell_holds_nothing(serve_plan: Plan) -> None:
    plan = serve_plan(slo=SLO)
    silent = run().model_copy(update={"ttft_s": Spread(mean=0.001)})
    (trial,) = conclude(plan, [record(plan, 0, silent)]).trials
    assert trial.misses == ("TTFT P90 was not reported by the client",)


def test_requests_of_other_lengths_are_noted(serve_plan: Plan) -> None:
    plan = serve_plan()
    result = conclude(plan, [record(plan, 0, run(mean_output_tokens=2.0))])
    assert "requests had 2 output tokens on average, the plan is for 5" in " ".join(result.notes)
    assert not any("input tokens" in note for note in result.notes)


def test_the_prefix_cache_is_spoken_of(serve_plan: Plan) -> None:
    plan = serve_plan()
    concluded = conclude(plan, [record(plan, 0, run(prefix_hit_ratio=0.5))])
    assert "50.0 % of the prompt tokens were in the prefix cache, planned 0.0 %" in concluded.notes
    assert any(
        "does not report prefix cache hits" in note
        for note in conclude(plan, [record(plan, 0, run())]).notes
    )


def test_measured_hits_are_compared_with_those_that_the_plan_counts_on(serve_plan: Plan) -> None:
    plan = serve_plan()
    hits = PlannedHits(ratio=0.283, ratio_band=(0.113, 0.289), instances=4, ranks=16)
    predicted = present(plan.predicted).model_copy(update={"prefix_hits": hits})
    plan = plan.model_copy(update={"predicted": predicted})
    assert (
        "12.0 % of the prompt tokens were in the prefix cache, planned 28.3 % (11.3 % to 28.9 %)"
        in conclude(plan, [record(plan, 0, run(prefix_hit_ratio=0.12))]).notes
    )


def test_where_goodput_is_not_told_completed_requests_are_compared(serve_plan: Plan) -> None:
    plan = serve_plan((8, 16), objective="goodput")
    records = [
        record(plan, 0, run(goodput_requests_per_s=None)),
        record(plan, 1, run(requests_per_s=400.0)),
    ]
    result = conclude(plan, records)
    assert result.winner == plan.alternatives[0].decision
    assert result.trials[0].measured_goodput_per_device is None
    assert "some run reports no goodput: completed requests were compared instead" in result.notes


def test_nothing_that_ran_concludes_nothing(serve_plan: Plan) -> None:
    plan = serve_plan()
    result = conclude(plan, [record(plan, 0, reason="broke")])
    assert (result.winner, result.regret_ratio, result.factors, result.tie) == (
        None,
        None,
        None,
        False,
    )
    assert result.trials[0].holds_targets is None


times_s = st.floats(1e-4, 10.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(times_s, times_s), min_size=1, max_size=3), st.randoms())
def test_the_order_of_launches_changes_nothing(
    serve_plan: Plan, measured: list[tuple[float, float]], shuffled: Any
) -> None:
    plan = serve_plan(slo=SLO)
    records = [
        record(plan, place, run(ttft_s=ttft_s, tpot_s=tpot_s))
        for place, (ttft_s, tpot_s) in enumerate(measured)
    ]
    result = conclude(plan, records)
    shuffled.shuffle(records)
    assert conclude(plan, records) == result
    holding: list[ServeDecision] = [one.decision for one in result.trials if one.holds_targets]
    assert result.winner in holding if holding else result.winner is None


def test_single_token_answers_have_no_tpot_to_compare(
    serve_plan: Plan, predicted: ServePrediction
) -> None:
    plan = serve_plan()
    nothing = predicted.model_copy(update={"tpot_s": Latency(mean=0, p50=0, p90=0, p99=0)})
    result = conclude(plan, [record(plan, 0, run(tpot_s=0.0), predicted=nothing)])
    assert present(result.factors).tpot == 1.0


def test_the_most_good_requests_win_where_their_rate_is_the_goal(serve_plan: Plan) -> None:
    traffic = {"rate": 100.0, "input_tokens": 4, "output_tokens": 5}
    plan = serve_plan(objective="rate", traffic=traffic)
    records = [
        record(plan, 0, run(goodput_requests_per_s=80.0)),
        record(plan, 1, run(goodput_requests_per_s=100.0)),
    ]
    result = conclude(plan, records)
    # On twice the devices: only requests count.
    assert result.winner == plan.alternatives[0].decision
    assert result.regret_ratio == pytest.approx(100.0 / 80.0 - 1.0)


def test_what_deployments_show_corrects_later_plans(serve_plan: Plan) -> None:
    plan = serve_plan()
    # Predicted are 10 ms and 1 ms.
    records = [
        record(plan, 0, run(ttft_s=0.015, tpot_s=0.002)),
        record(plan, 1, run(ttft_s=0.015, tpot_s=0.002)),
    ]
    single = present(conclude(plan, records[:1]).residual)
    first = present(conclude(plan, records).residual)
    assert (first.engine, first.num_deployments) == (plan.goal.engine.name, 2)
    for metric, measured in (("ttft", 1.5), ("tpot", 2.0)):
        after_one, after_two = (getattr(launches, metric) for launches in (single, first))
        assert 1.0 < after_one.factor < after_two.factor < measured
        assert measured / after_two.factor < after_two.spread < after_one.spread
    # A plan that was corrected already: its factor goes on.
    provenance = plan.provenance.model_copy(update={"residual": first})
    again = present(conclude(plan.model_copy(update={"provenance": provenance}), records).residual)
    assert again.ttft.factor == pytest.approx(first.ttft.factor**2)
    assert again.tpot.factor == pytest.approx(first.tpot.factor**2)
    assert again.num_deployments == 4
    short = [record(plan, place, run(tpot_s=0.0)) for place in (0, 1)]
    assert conclude(plan, short).residual is None
