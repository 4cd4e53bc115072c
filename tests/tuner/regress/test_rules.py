"""Verdicts on a plan beside the accepted one."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.expect import contains
from tests.rows import each_row
from tuner.regress.observed import PlanFacts
from tuner.regress.records import AcceptedChange, ScenarioVerdict
from tuner.regress.rules import Finding, Judgement, Tolerance, judge

Seen = Callable[..., PlanFacts]
Fields = Mapping[str, Any]

PASS, BETTER, DRIFT = ScenarioVerdict.PASS, ScenarioVerdict.BETTER, ScenarioVerdict.DRIFT
REGRESSION, INCOMPARABLE = ScenarioVerdict.REGRESSION, ScenarioVerdict.INCOMPARABLE
FIRST = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
OTHER = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 8}
TIE = {"decision": OTHER, "predicted": {}, "within_band": True}
FULLER = {"predicted__peak_memory_bytes": [2**36 * 1.1, 2**35]}
INFEASIBLE: Fields = {
    "decision": None,
    "predicted": None,
    "certificate__status": "infeasible",
    "certificate__objective": None,
    "certificate__bound": None,
    "binding_constraint": "memory_per_device",
}
UNKNOWN = {**INFEASIBLE, "certificate__status": "unknown"}
MADE_FOR = {
    "engine": "sglang",
    "release": "0.5.23",
    "nodes": 4,
    "ep_size": 32,
    "dispatch": "dynamic",
    "a2a_backend": "deepep",
}


def judged(accepted: PlanFacts, result: PlanFacts, **options: object) -> Judgement:
    return judge(accepted, result, tolerance=Tolerance(), **options)  # type: ignore[arg-type]


def step(step_s: float, **changes: object) -> Fields:
    """A plan of another step."""
    return {"predicted__step_time_s": step_s, "certificate__objective": step_s, **changes}


def lost(accepted_s: float) -> Fields:
    """Another decision at 11 s, with the accepted one among the alternatives."""
    accepted = {"decision": FIRST, "predicted": {"step_time_s": accepted_s}}
    return step(11.0, certificate__bound=10.9, decision=OTHER, alternatives=[accepted])


def gap(status: str, ratio: float) -> Fields:
    """A plan of another proof."""
    return {"certificate__status": status, "certificate__gap_ratio": ratio}


def made_for(**changes: object) -> Fields:
    """A plan marked with the launch that it is made for."""
    return {"made_for": [MADE_FOR | changes]}


@each_row(
    ("accepted", "found", "verdict", "words"),
    [
        ({}, {}, PASS, "optimal"),
        # Sums in another order.
        ({}, step(10.0 * (1.0 + 1e-9)), PASS, ""),
        ({}, step(10.05), DRIFT, ""),
        ({}, step(13.0), REGRESSION, "outside its band of 8.00 s to 12.0 s"),
        ({}, step(9.0, certificate__bound=8.99), BETTER, "accept it with --update"),
        (
            {"alternatives": [TIE]},
            step(10.005, decision=OTHER),
            DRIFT,
            "of the tie set: pipeline_model_parallel_size 4 -> 8",
        ),
        # 1.5 % is beyond the tolerance of one decision and inside the planner's own 2 %.
        ({}, {"predicted__step_time_s": 10.15, "decision": OTHER}, DRIFT, ""),
        ({}, {"predicted__step_time_s": 10.25, "decision": OTHER}, REGRESSION, ""),
        ({}, FULLER, REGRESSION, ""),
        # Another decision may trade memory for time.
        ({}, FULLER | {"decision": OTHER}, DRIFT, ""),
        ({}, INFEASIBLE, REGRESSION, "was optimal, now infeasible: memory_per_device"),
        (INFEASIBLE, {}, BETTER, ""),
        (INFEASIBLE, INFEASIBLE, PASS, ""),
        (INFEASIBLE, UNKNOWN, REGRESSION, ""),
        ({}, {"certificate__bound": 10.5}, REGRESSION, "the solver's bound is broken"),
        ({}, gap("feasible", 0.05), REGRESSION, "-> 5.00 %"),
        ({}, gap("feasible", 0.005), DRIFT, "-> 0.50 %"),
        ({}, gap("optimal", 0.0), DRIFT, "-> 0.00 %"),
        (
            {},
            {"predicted__step_time_s_band": [5.0, 15.0]},
            DRIFT,
            "the band of step_time_s is x2.50 as wide",
        ),
        # Another spec, whatever the plan; what one version lacks is no difference.
        (
            {},
            step(5.0, goal__global_batch_size=256),
            INCOMPARABLE,
            "goal.global_batch_size 128 -> 256",
        ),
        ({}, {"goal__seed": 3}, PASS, ""),
        ({}, {"binding_constraint": "computation: 8 s"}, DRIFT, ""),
        (
            {},
            step(11.0, provenance__profile_sha256={"h100": "b"}),
            REGRESSION,
            "measurements of 'h100' changed",
        ),
        (made_for(), made_for(), PASS, ""),
        # Plans of versions that did not mark them say nothing of it.
        ({}, made_for(), PASS, ""),
        (made_for(), made_for(nodes=2), INCOMPARABLE, "nodes 4 (now 2)"),
        (made_for(), made_for(ep_size=64), INCOMPARABLE, "ep_size 32 (now 64)"),
    ],
)
def test_what_is_found_beside_what_is_accepted_has_its_verdict_and_reason(
    seen: Seen, accepted: Fields, found: Fields, verdict: ScenarioVerdict, words: str
) -> None:
    result = judged(seen(**accepted), seen(**found))
    assert result.verdict is verdict
    assert words in result.reason


def test_what_did_not_change_is_no_change(seen: Seen) -> None:
    for found in ({}, {"binding_constraint": "memory_per_device: 70 GiB"}):
        assert judged(seen(), seen(**found)).changes == (), found


def test_a_step_beyond_the_tolerance_is_a_regression_with_numbers(seen: Seen) -> None:
    slower = step(11.0, predicted__breakdown_s={"computation": 8.0, "expert": 3.0})
    result = judged(seen(), seen(**slower))
    assert result.verdict is REGRESSION
    contains(
        result.reason,
        "10.0 s -> 11.0 s (+10.00 %)",
        "the same decision is priced differently, on the same inputs",
        "most of it in expert 2.00 s -> 3.00 s (+50.00 %)",
    )
    (change,) = (one for one in result.changes if one.what == "step_time_s")
    assert (change.accepted, change.found, change.ratio) == (10.0, 11.0, 1.1)


def test_a_bound_that_the_accepted_decision_refutes_is_told_from_higher_costs(seen: Seen) -> None:
    # The search found 11 s and claims that nothing is below 10.9, but the accepted decision is
    # still priced at 10.
    result = judged(seen(), seen(**lost(accepted_s=10.0)))
    assert result.verdict is REGRESSION
    contains(
        result.reason,
        "nothing is below 10.9, but the accepted decision still costs 10",
        "the search lost it",
    )
    result = judged(seen(), seen(**lost(accepted_s=12.0)))
    assert "the accepted decision would now cost +20.00 %" in result.reason
    assert "broken" not in result.reason


def test_what_is_known_beside_the_plan_counts(seen: Seen) -> None:
    beside = Finding(
        verdict=REGRESSION,
        words="links are slower",
        changes=(AcceptedChange(what="profile", accepted="a", found="b"),),
    )
    result = judged(seen(), seen(), beside=[beside])
    assert (result.verdict, result.reason) == (REGRESSION, "links are slower")


def test_a_placement_made_for_another_launch_names_what_differs(seen: Seen) -> None:
    result = judged(seen(**made_for()), seen(**made_for(release="0.5.24", dispatch="static")))
    assert result.verdict is DRIFT
    assert "made for sglang with release 0.5.23 (now 0.5.24), dispatch dynamic" in result.reason
    assert [change.what for change in result.changes] == [
        "made_for.sglang.release",
        "made_for.sglang.dispatch",
    ]
