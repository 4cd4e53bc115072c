"""Conclusion from the launches of deployments: SLOs, winner, regret, tie, factors.

    m_d   measured mean of TTFT or TPOT of deployment d: median over all its runs
    p_d   the predicted one
    factor = median over d of m_d / p_d;  d itself is recalibrated by that of the others

A deployment meets an SLO if the median over its runs does. Failed requests meet none, and clients
exclude them from their percentiles; more than 1 % of them fails the deployment. The winner is the
best by the goal's objective among those that meet every SLO: highest goodput per device, lowest
cost, fewest devices; ties go to the shortest mean request. If some client reports no goodput,
completed requests are compared instead.

Not covered: the noise between launches of one decision.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tuner.config.serve import ServeDecision
from tuner.costs.serve.residual import Metric, ServeResidual, latency_residual
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.engines.serving.releases import release_on
from tuner.plans.serve import ServePlan
from tuner.prices.serve.corrections import UNCORRECTED
from tuner.spec.serving.lengths import mean_tokens
from tuner.units import format_ratio, format_s
from tuner.verify.deployments.records import (
    ServeAccuracy,
    ServeFactors,
    ServeTrial,
    ServeTrialRecord,
    ServeVerified,
)
from tuner.verify.measured_steps import ape, is_tie, median_if_all

FAILED_RATIO: Final = 0.01
"""The share that the strictest SLO percentile, P99, leaves out."""

GOOD: Final = frozenset({"goodput", "rate"})
"""Objectives that count goodput."""
METRICS: Final[tuple[Metric, ...]] = ("ttft", "tpot")
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
        return tuple(run for record in self.records if record.status == "ok" for run in record.runs)


def group_by_decision(records: Iterable[ServeTrialRecord]) -> tuple[MeasuredDeployment, ...]:
    """Group the launches by decision, in the order of first launch."""
    by_decision: dict[ServeDecision, list[ServeTrialRecord]] = {}
    for record in sorted(records, key=lambda launch: launch.number):
        by_decision.setdefault(record.decision, []).append(record)
    return tuple(
        MeasuredDeployment(first=launches[0], records=tuple(launches))
        for launches in by_decision.values()
    )


def measured_spread(runs: Sequence[BenchmarkRun], metric: Metric) -> Spread:
    """Return the median over runs of each statistic that all runs have, in seconds."""
    spreads = [run.ttft_s if metric == "ttft" else run.tpot_s for run in runs]
    values: dict[str, Any] = {
        name: median_if_all(getattr(spread, name) for spread in spreads) for name in STATISTICS
    }
    return Spread(**values)


def failed_ratio(runs: Sequence[BenchmarkRun]) -> float | None:
    """Return the share of failed requests; None if a run does not report it."""
    failed = [run.failed for run in runs if run.failed is not None]
    if not failed or len(failed) < len(runs):
        return None
    return sum(failed) / (sum(failed) + sum(run.completed for run in runs))


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
    return tuple(
        (metric, name, limit_s)
        for metric in METRICS
        for name in STATISTICS
        if (limit_s := getattr(getattr(slo, metric), name)) is not None
    )


LENGTH_RATIO: Final = 0.10
"""Tolerance on the clients' mean lengths before a note: tokenizers add special tokens and
re-tokenize."""


def conclude(plan: ServePlan, records: Sequence[ServeTrialRecord]) -> ServeVerified:
    """Derive `verified.json` from the records."""
    deployments = group_by_decision(records)
    trials = tuple(_trial(plan, deployment, deployments) for deployment in deployments)
    ran = [deployment for deployment in deployments if deployment.runs]
    order = _ranked(plan, ran)
    winner = order[0] if order else None
    return ServeVerified(
        objective=plan.goal.objective,
        trials=trials,
        winner=None if winner is None else winner.first.decision,
        regret_ratio=_regret(plan, order, ran),
        tie=len(order) > 1
        and is_tie(*(_worths(plan, deployment, ran) for deployment in order[:2])),
        factors=(
            ServeFactors(
                ttft=_factor(ran, "ttft"), tpot=_factor(ran, "tpot"), num_deployments=len(ran)
            )
            if ran
            else None
        ),
        residual=_residual(plan, ran),
        accuracy=_accuracy(trials, ran),
        notes=tuple(_notes(plan, deployments, trials)),
    )


def _trial(
    plan: ServePlan, deployment: MeasuredDeployment, deployments: Sequence[MeasuredDeployment]
) -> ServeTrial:
    runs, first, predicted = deployment.runs, deployment.first, deployment.first.predicted
    shown = next((record for record in deployment.records if record.status == "ok"), first)
    others = [peer for peer in deployments if peer is not deployment and peer.runs]
    ttft = measured_spread(runs, "ttft") if runs else None
    tpot = measured_spread(runs, "tpot") if runs else None
    misses = tuple(missed_slos(plan, runs)) if runs else ()
    good = median_if_all(run.goodput_requests_per_s for run in runs)
    return ServeTrial(
        decision=first.decision,
        origin=first.origin,
        status=shown.status,
        reason=shown.reason,
        num_devices=first.decision.num_devices,
        runs=len(runs),
        predicted_ttft_s=predicted.ttft_s.mean,
        recalibrated_ttft_s=predicted.ttft_s.mean * _factor(others, "ttft") if others else None,
        measured_ttft_s=ttft.mean if ttft else None,
        measured_ttft=ttft,
        predicted_tpot_s=predicted.tpot_s.mean,
        recalibrated_tpot_s=predicted.tpot_s.mean * _factor(others, "tpot") if others else None,
        measured_tpot_s=tpot.mean if tpot else None,
        measured_tpot=tpot,
        predicted_requests_per_s=predicted.requests_per_s,
        measured_requests_per_s=median_if_all(run.requests_per_s for run in runs),
        predicted_output_tokens_per_s=predicted.output_tokens_per_s,
        measured_output_tokens_per_s=median_if_all(run.output_tokens_per_s for run in runs),
        predicted_goodput_per_device=predicted.goodput_per_device,
        measured_goodput_per_device=None if good is None else good / first.decision.num_devices,
        failed_ratio=failed_ratio(runs),
        holds_targets=not misses if runs else None,
        misses=misses,
    )


def _ranked(plan: ServePlan, ran: Sequence[MeasuredDeployment]) -> list[MeasuredDeployment]:
    """Return the deployments that meet every SLO, best first."""
    holding = [deployment for deployment in ran if not list(missed_slos(plan, deployment.runs))]
    # sorted() is stable: exact ties stay in the plan's order.
    return sorted(
        holding,
        key=lambda deployment: (_worth(plan, deployment, ran), _request_s(plan, deployment)),
    )


def _worth(
    plan: ServePlan, deployment: MeasuredDeployment, ran: Sequence[MeasuredDeployment]
) -> float:
    return statistics.median(_worths(plan, deployment, ran))


def _worths(
    plan: ServePlan, deployment: MeasuredDeployment, ran: Sequence[MeasuredDeployment]
) -> list[float]:
    """Return the value that the goal minimises, of each run where it counts requests."""
    objective, devices = plan.goal.objective, deployment.first.decision.num_devices
    if objective in GOOD:
        per = 1 if objective == "rate" else devices
        return [-rate / per for rate in _goodputs(deployment, ran)]
    price = deployment.first.predicted.cost_per_hour if objective == "cost" else None
    return [float(devices) if price is None else price]


def _goodputs(deployment: MeasuredDeployment, ran: Sequence[MeasuredDeployment]) -> list[float]:
    """Return each run's goodput in requests per second, or completed requests if not reported."""
    good = [run.goodput_requests_per_s for run in deployment.runs]
    reported = [value for value in good if value is not None]
    return reported if _all_report_goodput(ran) else [run.requests_per_s for run in deployment.runs]


def _all_report_goodput(ran: Sequence[MeasuredDeployment]) -> bool:
    return all(
        run.goodput_requests_per_s is not None for deployment in ran for run in deployment.runs
    )


def _request_s(plan: ServePlan, deployment: MeasuredDeployment) -> float:
    """Return the latency of a mean request in seconds."""
    lengths = plan.goal.traffic.output_tokens
    sent = median_if_all(run.mean_output_tokens for run in deployment.runs) or 1.0
    tokens = sent if lengths is None else mean_tokens(lengths)
    further = max(0.0, tokens - 1.0)
    return (
        measured_spread(deployment.runs, "ttft").mean
        + further * measured_spread(deployment.runs, "tpot").mean
    )


def _regret(
    plan: ServePlan, order: Sequence[MeasuredDeployment], ran: Sequence[MeasuredDeployment]
) -> float | None:
    first = next(
        (deployment for deployment in order if deployment.first.decision == plan.decision), None
    )
    if first is None:
        return None
    chosen, best = (abs(_worth(plan, deployment, ran)) for deployment in (first, order[0]))
    if plan.goal.objective in GOOD:
        chosen, best = best, chosen
    return chosen / best - 1.0 if best > 0.0 else 0.0


def _ratios(ran: Sequence[MeasuredDeployment], metric: Metric) -> Iterator[float]:
    for deployment in ran:
        predicted = deployment.first.predicted
        predicted_s = (predicted.ttft_s if metric == "ttft" else predicted.tpot_s).mean
        measured_s = measured_spread(deployment.runs, metric).mean
        # Single-token outputs have no TPOT.
        if predicted_s > 0.0 and measured_s > 0.0:
            yield measured_s / predicted_s


def _factor(ran: Sequence[MeasuredDeployment], metric: Metric) -> float:
    return statistics.median(list(_ratios(ran, metric)) or [1.0])


def _residual(plan: ServePlan, ran: Sequence[MeasuredDeployment]) -> ServeResidual | None:
    by_metric = {name: list(_ratios(ran, name)) for name in ("ttft", "tpot")}
    releases = [release_on(plan.goal, pool) for pool in plan.cluster.pools]
    is_one = len({(engine.name, engine.release) for engine in releases}) == 1
    if min(map(len, by_metric.values())) < 1 or not is_one:
        return None
    release = releases[0]
    before = plan.provenance.residual
    ttft = latency_residual(
        by_metric["ttft"], metric="ttft", before=None if before is None else before.ttft
    )
    tpot = latency_residual(
        by_metric["tpot"], metric="tpot", before=None if before is None else before.tpot
    )
    if ttft is None or tpot is None:
        return None
    return ServeResidual(
        engine=release.name,
        release=release.release,
        ttft=ttft,
        tpot=tpot,
        num_deployments=(0 if before is None else before.num_deployments)
        + min(map(len, by_metric.values())),
        model="" if before is None else before.model,
        steps=UNCORRECTED if before is None else before.steps,
    )


def _accuracy(trials: Sequence[ServeTrial], ran: Sequence[MeasuredDeployment]) -> ServeAccuracy:
    return ServeAccuracy(
        ttft_median_ape=median_if_all(
            ape((trial.predicted_ttft_s, trial.measured_ttft_s) for trial in trials)
        ),
        tpot_median_ape=median_if_all(
            ape((trial.predicted_tpot_s, trial.measured_tpot_s) for trial in trials)
        ),
        recalibrated_ttft_median_ape=median_if_all(
            ape((trial.recalibrated_ttft_s, trial.measured_ttft_s) for trial in trials)
        ),
        recalibrated_tpot_median_ape=median_if_all(
            ape((trial.recalibrated_tpot_s, trial.measured_tpot_s) for trial in trials)
        ),
        ttft_within_band=_within(ran, "ttft"),
        tpot_within_band=_within(ran, "tpot"),
        num_deployments=len(ran),
    )


def _within(ran: Sequence[MeasuredDeployment], metric: Metric) -> int:
    bands = [
        deployment.first.predicted.ttft_s_band
        if metric == "ttft"
        else deployment.first.predicted.tpot_s_band
        for deployment in ran
    ]
    means = [measured_spread(deployment.runs, metric).mean for deployment in ran]
    return sum(low <= mean <= high for mean, (low, high) in zip(means, bands, strict=True))


def _notes(
    plan: ServePlan, deployments: Sequence[MeasuredDeployment], trials: Sequence[ServeTrial]
) -> Iterator[str]:
    ran = [deployment for deployment in deployments if deployment.runs]
    runs = [run for deployment in ran for run in deployment.runs]
    if not runs:
        return
    first = next((trial for trial in trials if trial.decision == plan.decision), None)
    if first is not None and first.misses:
        yield f"the plan's choice misses its SLOs: {'; '.join(first.misses)}"
    if plan.goal.objective in GOOD and not _all_report_goodput(ran):
        yield "some run reports no goodput: completed requests were compared instead"
    failed = sum(run.failed or 0 for run in runs)
    if failed:
        yield f"{failed} of {failed + sum(run.completed for run in runs)} requests failed"
    if any(run.failed is None for run in runs):
        yield "the number of failed requests is unknown: the client does not report it"
    if any(
        len({not list(missed_slos(plan, [run])) for run in deployment.runs}) > 1
        for deployment in ran
    ):
        yield "some runs of a deployment meet the SLOs and others do not"
    yield from _length_notes(plan, runs)
    yield _cache_note(plan, runs)


def _length_notes(plan: ServePlan, runs: Sequence[BenchmarkRun]) -> Iterator[str]:
    traffic = plan.goal.traffic
    for name, law, sent in (
        ("input", traffic.input_tokens, median_if_all(run.mean_input_tokens for run in runs)),
        ("output", traffic.output_tokens, median_if_all(run.mean_output_tokens for run in runs)),
    ):
        tokens = None if law is None else mean_tokens(law)
        if tokens and sent is not None and abs(sent / tokens - 1.0) > LENGTH_RATIO:
            yield (
                f"requests had {sent:.0f} {name} tokens on average, the plan is for"
                f" {tokens:.0f}: the prediction is for other requests"
            )


def _cache_note(plan: ServePlan, runs: Sequence[BenchmarkRun]) -> str:
    measured_hit = median_if_all(run.prefix_hit_ratio for run in runs)
    hits = None if plan.predicted is None else plan.predicted.prefix_hits
    planned = format_ratio(plan.goal.traffic.prefix_hit if hits is None else hits.ratio)
    if hits is not None and hits.ratio_band[0] < hits.ratio_band[1]:
        planned += f" ({' to '.join(map(format_ratio, hits.ratio_band))})"
    if measured_hit is not None:
        measured = format_ratio(measured_hit)
        return f"{measured} of the prompt tokens were in the prefix cache, planned {planned}"
    return (
        f"the client does not report prefix cache hits; planned are {planned} of the prompt tokens"
    )
