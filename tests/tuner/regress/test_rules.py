from collections.abc import Callable

from tests.rows import each_row
from tuner.regress.observed import PlanFacts
from tuner.regress.records import AcceptedChange, ScenarioVerdict
from tuner.regress.rules import Finding, Judgement, Tolerance, judge

Seen = Callable[..., PlanFacts]

OTHER = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 8}


def judged(accepted: PlanFacts, result: PlanFacts, **options: object) -> Judgement:
    return judge(accepted, result, tolerance=Tolerance(), **options)  # type: ignore[arg-type]


def slower(seen: Seen, step_s: float, **changes: object) -> PlanFacts:
    return seen(predicted__step_time_s=step_s, certificate__objective=step_s, **changes)


def _lost(seen: Seen, *, accepted_s: float) -> PlanFacts:
    """Another decision at 11 s, with the accepted one among the alternatives."""
    accepted = {"decision": seen().decision, "predicted": {"step_time_s": accepted_s}}
    return slower(seen, 11.0, certificate__bound=10.9, decision=OTHER, alternatives=[accepted])


def test_the_same_plan_passes(seen: Seen) -> None:
    result = judged(seen(), seen())
    assert result.verdict is ScenarioVerdict.PASS
    assert result.changes == ()
    assert "optimal" in result.reason


def test_sums_in_another_order_pass(seen: Seen) -> None:
    assert judged(seen(), slower(seen, 10.0 * (1.0 + 1e-9))).verdict is ScenarioVerdict.PASS


def test_a_step_beyond_the_tolerance_is_a_regression_with_numbers(seen: Seen) -> None:
    result = judged(
        seen(), slower(seen, 11.0, predicted__breakdown_s={"computation": 8.0, "expert": 3.0})
    )
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "10.0 s -> 11.0 s (+10.00 %)" in result.reason
    assert "the same decision is priced differently, on the same inputs" in result.reason
    assert "most of it in expert 2.00 s -> 3.00 s (+50.00 %)" in result.reason
    (step,) = (change for change in result.changes if change.what == "step_time_s")
    assert (step.accepted, step.found, step.ratio) == (10.0, 11.0, 1.1)


def test_a_step_inside_the_tolerance_drifts(seen: Seen) -> None:
    assert judged(seen(), slower(seen, 10.05)).verdict is ScenarioVerdict.DRIFT


def test_a_faster_step_is_better_and_offers_to_accept_it(seen: Seen) -> None:
    result = judged(seen(), slower(seen, 9.0, certificate__bound=8.99))
    assert result.verdict is ScenarioVerdict.BETTER
    assert result.reason.endswith("accept it with --update")


def test_a_step_outside_the_accepted_band_says_so(seen: Seen) -> None:
    assert "outside its band of 8.00 s to 12.0 s" in judged(seen(), slower(seen, 13.0)).reason


def test_another_decision_of_the_tie_set_drifts(seen: Seen) -> None:
    tie = {"decision": OTHER, "predicted": {}, "within_band": True}
    result = judged(seen(alternatives=[tie]), slower(seen, 10.005, decision=OTHER))
    assert result.verdict is ScenarioVerdict.DRIFT
    assert "of the tie set: pipeline_model_parallel_size 4 -> 8" in result.reason


def test_another_decision_is_allowed_the_tie_tolerance(seen: Seen) -> None:
    # 1.5 % is beyond the tolerance of one decision and inside the planner's own 2 %.
    result = judged(seen(), seen(predicted__step_time_s=10.15, decision=OTHER))
    assert result.verdict is ScenarioVerdict.DRIFT
    beyond = judged(seen(), seen(predicted__step_time_s=10.25, decision=OTHER))
    assert beyond.verdict is ScenarioVerdict.REGRESSION


def test_more_memory_for_the_same_decision_is_a_regression(seen: Seen) -> None:
    fuller = {"predicted__peak_memory_bytes": [2**36 * 1.1, 2**35]}
    assert judged(seen(), seen(**fuller)).verdict is ScenarioVerdict.REGRESSION
    # Another decision may trade memory for time.
    assert judged(seen(), seen(decision=OTHER, **fuller)).verdict is ScenarioVerdict.DRIFT


def infeasible(seen: Seen, status: str = "infeasible") -> PlanFacts:
    return seen(
        decision=None,
        predicted=None,
        certificate__status=status,
        certificate__objective=None,
        certificate__bound=None,
        binding_constraint="memory_per_device",
    )


def test_a_plan_that_is_gone_is_a_regression(seen: Seen) -> None:
    result = judged(seen(), infeasible(seen))
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "was optimal, now infeasible: memory_per_device" in result.reason


def test_a_plan_where_none_was_is_better(seen: Seen) -> None:
    assert judged(infeasible(seen), seen()).verdict is ScenarioVerdict.BETTER


def test_what_stays_infeasible_passes_and_no_longer_proven_fails(seen: Seen) -> None:
    assert judged(infeasible(seen), infeasible(seen)).verdict is ScenarioVerdict.PASS
    assert (
        judged(infeasible(seen), infeasible(seen, "unknown")).verdict is ScenarioVerdict.REGRESSION
    )


def test_a_bound_above_its_own_objective_is_called_broken(seen: Seen) -> None:
    result = judged(seen(), seen(certificate__bound=10.5))
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "the solver's bound is broken" in result.reason


def test_a_bound_that_the_accepted_decision_refutes_is_called_broken(seen: Seen) -> None:
    # The search found 11 s and claims that nothing is below 10.9, but the accepted decision is
    # still priced at 10.
    result = judged(seen(), _lost(seen, accepted_s=10.0))
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "nothing is below 10.9, but the accepted decision still costs 10" in result.reason
    assert "the search lost it" in result.reason


def test_higher_costs_and_a_lost_decision_are_distinguished(seen: Seen) -> None:
    result = judged(seen(), _lost(seen, accepted_s=12.0))
    assert "the accepted decision would now cost +20.00 %" in result.reason
    assert "broken" not in result.reason


@each_row(
    ("status", "gap", "verdict"),
    [
        ("feasible", 0.05, ScenarioVerdict.REGRESSION),
        ("feasible", 0.005, ScenarioVerdict.DRIFT),
        ("optimal", 0.0, ScenarioVerdict.DRIFT),
    ],
)
def test_a_wider_gap_is_a_weaker_proof(
    seen: Seen, status: str, gap: float, verdict: ScenarioVerdict
) -> None:
    result = judged(seen(), seen(certificate__status=status, certificate__gap_ratio=gap))
    assert result.verdict is verdict
    assert f"-> {100.0 * gap:.2f} %" in result.reason


def test_a_much_wider_band_drifts(seen: Seen) -> None:
    result = judged(seen(), seen(predicted__step_time_s_band=[5.0, 15.0]))
    assert result.verdict is ScenarioVerdict.DRIFT
    assert "the band of step_time_s is x2.50 as wide" in result.reason


def test_another_spec_is_incomparable_whatever_the_plan(seen: Seen) -> None:
    result = judged(seen(), slower(seen, 5.0, goal__global_batch_size=256))
    assert result.verdict is ScenarioVerdict.INCOMPARABLE
    assert "goal.global_batch_size 128 -> 256" in result.reason


def test_a_field_that_one_version_lacks_is_no_difference(seen: Seen) -> None:
    newer = seen(goal={"kind": "train", "global_batch_size": 128, "seed": 3})
    assert judged(seen(), newer).verdict is ScenarioVerdict.PASS


def test_other_numbers_in_the_same_constraint_are_no_change(seen: Seen) -> None:
    assert judged(seen(), seen(binding_constraint="memory_per_device: 70 GiB")).changes == ()
    result = judged(seen(), seen(binding_constraint="computation: 8 s"))
    assert result.verdict is ScenarioVerdict.DRIFT


def test_what_is_known_beside_the_plan_counts(seen: Seen) -> None:
    beside = Finding(
        verdict=ScenarioVerdict.REGRESSION,
        words="links are slower",
        changes=(AcceptedChange(what="profile", accepted="a", found="b"),),
    )
    result = judged(seen(), seen(), beside=[beside])
    assert (result.verdict, result.reason) == (ScenarioVerdict.REGRESSION, "links are slower")


def test_a_changed_profile_is_named_as_the_cause(seen: Seen) -> None:
    result = judged(seen(), slower(seen, 11.0, provenance__profile_sha256={"h100": "b"}))
    assert "measurements of 'h100' changed" in result.reason


def test_a_placement_made_for_another_launch_is_reported(seen: Seen) -> None:
    mark = {
        "engine": "sglang",
        "release": "0.5.23",
        "nodes": 4,
        "ep_size": 32,
        "dispatch": "dynamic",
        "a2a_backend": "deepep",
    }

    def made_for(**changes: object) -> PlanFacts:
        return seen(made_for=[mark | changes])

    assert judged(made_for(), made_for()).verdict is ScenarioVerdict.PASS
    # Plans of versions that did not mark them say nothing of it.
    assert judged(seen(), made_for()).verdict is ScenarioVerdict.PASS
    release = judged(made_for(), made_for(release="0.5.24", dispatch="static"))
    assert release.verdict is ScenarioVerdict.DRIFT
    assert "made for sglang with release 0.5.23 (now 0.5.24), dispatch dynamic" in release.reason
    assert "planned and emitted again" in release.reason
    assert [change.what for change in release.changes] == [
        "made_for.sglang.release",
        "made_for.sglang.dispatch",
    ]
    for name, value in (("nodes", 2), ("ep_size", 64)):
        other = judged(made_for(), made_for(**{name: value}))
        assert other.verdict is ScenarioVerdict.INCOMPARABLE
        assert f"{name} {mark[name]} (now {value})" in other.reason
