"""Plans beside each other: differences in the words of `explain`, the best beyond the band."""

from pathlib import Path

import pytest

from tests.expect import present
from tuner.config.train_words import train_changes
from tuner.errors import TunerError
from tuner.explain.comparison import compare, compare_stored
from tuner.goals.registry import goal_of, read_any_plan
from tuner.plans.train import Plan, TrainPrediction

CHECKS = Path(__file__).parents[3] / "examples" / "checks"
STORED = Path(__file__).parents[3] / "examples" / "profiles"


def _slower(plan: Plan, times: float) -> Plan:
    own = present(plan.predicted)
    fields = {
        "step_time_s": own.step_time_s * times,
        "step_time_s_band": tuple(edge * times for edge in own.step_time_s_band),
        "tokens_per_s_per_device": own.tokens_per_s_per_device / times,
        "breakdown_s": {name: one * times for name, one in own.breakdown_s.items()},
    }
    return plan.model_copy(
        update={"predicted": TrainPrediction.model_validate(own.model_dump() | fields)}
    )


def test_plans_of_every_goal_are_compared() -> None:
    for names in (
        ("train-mixtral", "train-qwen3", "train-infeasible"),
        ("serve-mixed-pool", "serve-aggregated", "serve-disaggregated", "serve-infeasible"),
        ("place-balance", "place-layer-chain"),
    ):
        result = compare([CHECKS / name for name in names])
        assert result.goal == names[0].partition("-")[0]
        assert [Path(plan.plan).name for plan in result.plans] == list(names)
        assert result.plans[present(result.best)].against_best is None
        assert result.plans[0].question_changes == result.plans[0].decision_changes == ()
        assert all(plan.question_changes for plan in result.plans[1:])
        for plan in result.plans:
            assert bool(plan.decision) == (plan.status in ("optimal", "feasible"))
        assert (
            len({line.count(",") for line in result.table().to_csv(index=False).splitlines()}) == 1
        )


def test_a_runner_up_is_compared_as_the_plan_explains_it() -> None:
    plan = read_any_plan(CHECKS / "train-mixtral")
    assert isinstance(plan, Plan)
    other = plan.alternatives[0]
    as_plan = plan.model_copy(update={"decision": other.decision, "predicted": other.predicted})
    result = compare_stored([plan, as_plan], names=["plan", "other"])
    rival = goal_of(plan).rivals(plan)[0]
    assert result.plans[1].terms_s == rival.terms_s
    assert sum(rival.terms_s.values()) == pytest.approx(
        result.plans[1].figures["step_time_s"] - result.plans[0].figures["step_time_s"]
    )
    assert result.plans[1].decision_changes == train_changes(present(plan.decision), other.decision)
    assert result.plans[1].question_changes == ()
    assert result.plans[1].ratios["step_time_s"].band == pytest.approx(other.ratio_band)
    assert any(one.is_tie for one in result.plans) == other.within_band


def test_only_beyond_the_band_is_a_plan_worse() -> None:
    plan = read_any_plan(CHECKS / "train-mixtral")
    assert isinstance(plan, Plan)
    near, far = _slower(plan, 1.01), _slower(plan, 3.0)
    result = compare_stored([far, plan, near], names=["far", "plan", "near"])
    assert result.best == 1
    assert [one.is_tie for one in result.plans] == [False, False, True]
    assert result.verdict == (
        "best by tokens/s: plan; tied with it, within the band of the ratio: near;"
        " worse beyond the band: far"
    )
    assert present(result.plans[0].against_best).ratio == pytest.approx(1.0 / 3.0)


def test_two_engines_are_different_specs() -> None:
    plan = read_any_plan(CHECKS / "serve-aggregated")
    engine = plan.goal.engine.model_copy(update={"name": "trtllm"})  # type: ignore[union-attr]
    other = plan.model_copy(update={"goal": plan.goal.model_copy(update={"engine": engine})})
    result = compare_stored([plan, other], names=["one", "other"])
    assert any("goal.engine.name" in change for change in result.plans[1].question_changes)


def test_plans_of_two_goals_and_a_single_one_are_refused() -> None:
    with pytest.raises(TunerError, match=r"is a plan to serve, .* one to train"):
        compare([CHECKS / "train-qwen3", CHECKS / "serve-aggregated"])
    with pytest.raises(TunerError, match="1 plan; name 2 to 64"):
        compare([CHECKS / "train-qwen3"])


def test_plans_of_the_reference_step_have_bands_of_single_times() -> None:
    result = compare([STORED / "epyc-quickstart-1", STORED / "epyc-quickstart-2"])
    assert result.plans[1].ratios["tokens_per_s"].band is not None
