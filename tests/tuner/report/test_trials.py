"""Launches of deployments on the page."""

from collections.abc import Callable
from pathlib import Path

from tests.expect import contains, present
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.goals.registry import goal_of_folder
from tuner.plans.serve import ServePlan
from tuner.report.markdown import markdown
from tuner.verify.deployments.conclusion import conclude
from tuner.verify.deployments.records import ServeTrialRecord


def record(plan: ServePlan, number: int, *runs: BenchmarkRun, reason: str = "") -> ServeTrialRecord:
    decision = present([plan.decision, *(other.decision for other in plan.alternatives)][number])
    return ServeTrialRecord(
        number=number,
        origin="alternative" if number else "plan",
        decision=decision,
        status="ok" if runs else "crashed",
        reason=reason,
        predicted=present(plan.predicted),
        runs=runs,
        wall_s=60.0,
        engine=plan.goal.engine.name,
        client="vllm-bench",
    )


def run(time_s: float) -> BenchmarkRun:
    spread = Spread(mean=time_s, p50=time_s, p90=time_s, p99=time_s)
    return BenchmarkRun(
        completed=98,
        failed=0,
        duration_s=10.0,
        ttft_s=spread,
        tpot_s=spread,
        requests_per_s=9.8,
        output_tokens_per_s=98.0,
    )


def test_a_report_says_what_launches_measured(
    serve_folder: Path, serve_plan: ServePlan, copied: Callable[[Path], Path]
) -> None:
    folder = copied(serve_folder)
    assert "nothing was launched" in markdown(goal_of_folder(folder).report(folder))
    records = [record(serve_plan, 0, run(0.0125))]
    if serve_plan.alternatives:
        records.append(record(serve_plan, 1, reason="the server ended <b>at once</b>"))
    (folder / "verified.json").write_text(conclude(serve_plan, records).model_dump_json())
    after = markdown(goal_of_folder(folder).report(folder))
    assert "nothing was launched" not in after
    contains(
        after,
        f"Measured: the best of {len(records)} launched.",
        "Predicted and measured",
        "12.5 ms",
    )
    assert "<b>" not in after
    assert ("at once" in after) == bool(serve_plan.alternatives)


def test_a_report_says_that_no_launch_held_the_targets(
    serve_folder: Path, serve_plan: ServePlan, copied: Callable[[Path], Path]
) -> None:
    folder = copied(serve_folder)
    verified = conclude(serve_plan, [record(serve_plan, 0, run(1000.0))])
    (folder / "verified.json").write_text(verified.model_dump_json())
    text = markdown(goal_of_folder(folder).report(folder))
    contains(text, "Of 1 launched, none meets the SLO.", "TPOT")
