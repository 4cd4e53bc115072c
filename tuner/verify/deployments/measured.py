"""What was measured of a deployment: all its launches, medians over their runs, missed targets."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tuner.serve_plan import ServeDecision, ServePlan
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_ratio, format_s
from tuner.verify.deployments.records import BenchRun, ServeTrialRecord, Spread

FAILED_RATIO: Final = 0.01
"""The share that the strictest percentile of a target, P99, leaves out."""

Metric = Literal["ttft", "tpot"]
STATISTICS: Final = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """All launches of one decision."""

    first: ServeTrialRecord
    """Whose prediction counts."""
    records: tuple[ServeTrialRecord, ...]

    @property
    def runs(self) -> tuple[BenchRun, ...]:
        """Runs of the launches that ended well."""
        return tuple(run for one in self.records if one.status == "ok" for run in one.runs)


def gathered(records: Iterable[ServeTrialRecord]) -> tuple[Deployment, ...]:
    """Join the launches of each decision, in the order they were first launched."""
    found: dict[ServeDecision, list[ServeTrialRecord]] = {}
    for record in sorted(records, key=lambda one: one.number):
        found.setdefault(record.decision, []).append(record)
    return tuple(Deployment(first=each[0], records=tuple(each)) for each in found.values())


def _median_spread(spreads: Sequence[Spread]) -> Spread:
    found = {name: [getattr(one, name) for one in spreads] for name in STATISTICS}
    return Spread(
        **{name: None if None in each else statistics.median(each) for name, each in found.items()}
    )


def measured_spread(runs: Sequence[BenchRun], metric: Metric) -> Spread:
    """Return the median over runs of each statistic that all of them have, in seconds."""
    return _median_spread([run.ttft_s if metric == "ttft" else run.tpot_s for run in runs])


def median_of(runs: Sequence[BenchRun], of: Callable[[BenchRun], float | None]) -> float | None:
    """Return the median over runs of what all of them tell; None where one does not."""
    found = [of(run) for run in runs]
    told = [one for one in found if one is not None]
    return statistics.median(told) if told and len(told) == len(found) else None


def failed_ratio(runs: Sequence[BenchRun]) -> float | None:
    """Return the share of all requests that failed; None where a run does not tell."""
    failed = [run.failed for run in runs]
    told = [one for one in failed if one is not None]
    if not told or len(told) < len(failed):
        return None
    return sum(told) / (sum(told) + sum(run.completed for run in runs))


def missed_targets(plan: ServePlan, runs: Sequence[BenchRun]) -> Iterator[str]:
    """Say which targets do not hold."""
    failed = failed_ratio(runs)
    if failed is not None and failed > FAILED_RATIO:
        yield f"{format_ratio(failed)} of the requests failed"
    slo = plan.goal.slo
    by_metric: tuple[tuple[Metric, Percentiles], ...] = (("ttft", slo.ttft), ("tpot", slo.tpot))
    for metric, targets in by_metric:
        spread = measured_spread(runs, metric)
        for name, limit_s in _limits(targets).items():
            measured_s = getattr(spread, name)
            if measured_s is None:
                yield f"{metric.upper()} {name.upper()} was not told by the client"
            elif measured_s > limit_s:
                title = name if name == "mean" else name.upper()
                yield f"{metric.upper()} {title} {format_s(measured_s)} of {format_s(limit_s)}"


def _limits(targets: Percentiles) -> dict[str, float]:
    limits = {name: getattr(targets, name) for name in STATISTICS}
    return {name: limit_s for name, limit_s in limits.items() if limit_s is not None}
