"""Measurements of a deployment: all its launches, medians over their runs, missed SLOs."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tuner.config.serve import ServeDecision
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.plans.serve import ServePlan
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_ratio, format_s
from tuner.verify.deployments.records import ServeTrialRecord

FAILED_RATIO: Final = 0.01
"""The share that the strictest SLO percentile, P99, leaves out."""

GOOD: Final = frozenset({"goodput", "rate"})
"""Objectives that count goodput."""
Metric = Literal["ttft", "tpot"]
STATISTICS: Final = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDeployment:
    """All launches of one decision."""

    first: ServeTrialRecord
    """First launch of the decision, whose prediction counts."""
    records: tuple[ServeTrialRecord, ...]

    @property
    def runs(self) -> tuple[BenchmarkRun, ...]:
        """Runs of the successful launches."""
        return tuple(run for one in self.records if one.status == "ok" for run in one.runs)


def group_by_decision(records: Iterable[ServeTrialRecord]) -> tuple[MeasuredDeployment, ...]:
    """Group the launches by decision, in the order of first launch."""
    by_decision: dict[ServeDecision, list[ServeTrialRecord]] = {}
    for record in sorted(records, key=lambda one: one.number):
        by_decision.setdefault(record.decision, []).append(record)
    return tuple(
        MeasuredDeployment(first=each[0], records=tuple(each)) for each in by_decision.values()
    )


def _median_spread(spreads: Sequence[Spread]) -> Spread:
    values = {name: [getattr(one, name) for one in spreads] for name in STATISTICS}
    return Spread(
        **{name: None if None in each else statistics.median(each) for name, each in values.items()}
    )


def measured_spread(runs: Sequence[BenchmarkRun], metric: Metric) -> Spread:
    """Return the median over runs of each statistic that all runs have, in seconds."""
    return _median_spread([run.ttft_s if metric == "ttft" else run.tpot_s for run in runs])


def median_over_runs(
    runs: Sequence[BenchmarkRun], of: Callable[[BenchmarkRun], float | None]
) -> float | None:
    """Return the median of a value over runs; None if a run does not report it."""
    values = [of(run) for run in runs]
    reported = [one for one in values if one is not None]
    return statistics.median(reported) if reported and len(reported) == len(values) else None


def failed_ratio(runs: Sequence[BenchmarkRun]) -> float | None:
    """Return the share of failed requests; None if a run does not report it."""
    failed = [run.failed for run in runs]
    reported = [one for one in failed if one is not None]
    if not reported or len(reported) < len(failed):
        return None
    return sum(reported) / (sum(reported) + sum(run.completed for run in runs))


def missed_slos(plan: ServePlan, runs: Sequence[BenchmarkRun]) -> Iterator[str]:
    """Yield a line per missed SLO."""
    failed = failed_ratio(runs)
    if failed is not None and failed > FAILED_RATIO:
        yield f"{format_ratio(failed)} of the requests failed"
    for metric, name, limit_s in slo_limits(plan):
        measured_s = getattr(measured_spread(runs, metric), name)
        if measured_s is None:
            yield f"{metric.upper()} {name.upper()} was not reported by the client"
        elif measured_s > limit_s:
            title = name if name == "mean" else name.upper()
            yield f"{metric.upper()} {title} {format_s(measured_s)} of {format_s(limit_s)}"


def slo_limits(plan: ServePlan) -> tuple[tuple[Metric, str, float], ...]:
    """Return the targets of a plan: the latency, its statistic, and the limit in seconds."""
    slo = plan.goal.slo
    by_metric: tuple[tuple[Metric, Percentiles], ...] = (("ttft", slo.ttft), ("tpot", slo.tpot))
    return tuple(
        (metric, name, limit_s)
        for metric, limits in by_metric
        for name in STATISTICS
        if (limit_s := getattr(limits, name)) is not None
    )
