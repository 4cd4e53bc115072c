"""Trials of a deployment's candidates: measured against predicted."""

from collections.abc import Iterator
from typing import Final

from tuner.config.serve_words import short_serve
from tuner.engines.metrics.benchmark_run import Spread
from tuner.report.content import (
    Cell,
    NamedValues,
    Section,
    Table,
    bullets,
    maybe,
    number,
    seconds,
    share,
    some,
    word,
)
from tuner.report.serve_decision import decision_facts
from tuner.units import format_counted, format_ratio, format_s
from tuner.verify.deployments.records import ServeTrial, ServeVerified

NAME: Final = "verified"


def serve_trials_section(verified: ServeVerified) -> Section:
    """Return the section on the trials."""
    return Section(
        name=NAME,
        heading="Predicted and measured",
        blocks=some(
            Table(
                caption="Launched deployments, means over requests, medians over runs",
                header=(
                    *("deployment", "from", "status", "runs", "TTFT", "predicted", "error"),
                    *("TPOT", "predicted", "error", "requests/s", "failed", "SLO"),
                ),
                rows=tuple(map(_row, verified.trials)),
            ),
            bullets(
                f"{short_deployment(trial)}: {trial.reason or '; '.join(trial.misses)}"
                for trial in verified.trials
                if trial.reason or trial.misses
            ),
            NamedValues(facts=tuple(_facts(verified))),
            bullets(verified.notes),
        ),
    )


def verdict_words(verified: ServeVerified) -> str:
    """Summarise the trials in a sentence."""
    launched = f"{len(verified.trials)} launched"
    if verified.winner is None:
        return f"Of {launched}, none meets the SLO."
    if verified.winner == verified.trials[0].decision:
        return f"Measured: the best of {launched}."
    won = short_serve(verified.winner)
    return f"Measured: of {launched}, {won} is better and is in the launch files."


def short_deployment(trial: ServeTrial) -> str:
    """Name a deployment in a few letters: `2 x 8 prefill + 1 x 16 decode`."""
    groups = trial.decision.instances
    text = " + ".join(f"{one.count} x {one.devices} {one.role.value}" for one in groups)
    # The roles identify these two modes only.
    is_named_by_roles = trial.decision.mode in ("aggregated", "disaggregated")
    return text if is_named_by_roles else f"{text} ({trial.decision.mode})"


def _facts(verified: ServeVerified) -> Iterator[tuple[str, Cell]]:
    accuracy = verified.accuracy
    yield "launched", number(len(verified.trials))
    won = next((one for one in verified.trials if one.decision == verified.winner), None)
    if won is None:
        ran = any(one.runs for one in verified.trials)
        nothing = "no deployment could be measured: nothing is verified"
        yield "winner", word("no launched deployment meets the SLO" if ran else nothing)
    else:
        yield "winner", word(f"{short_deployment(won)}, by {verified.objective}")
        for name, spread in (("TTFT", won.measured_ttft), ("TPOT", won.measured_tpot)):
            if spread is not None:
                runs = format_counted(won.runs, "run")
                yield f"{name} of the winner", word(f"{_spread(spread)}, median of {runs}")
        yield from decision_facts(won.decision)
        yield "first choice", _regret(verified)
        if verified.tie:
            yield "tie", word("another deployment is as good, within the noise of the runs")
    if verified.factors is not None:
        yield "measured over predicted TTFT", number(verified.factors.ttft)
        yield "measured over predicted TPOT", number(verified.factors.tpot)
        for name, inside in (
            ("TTFT within its band", accuracy.ttft_within_band),
            ("TPOT within its band", accuracy.tpot_within_band),
        ):
            yield name, word(f"{inside} of {accuracy.num_deployments}")
    for name, error in (
        ("median error of TTFT", accuracy.ttft_median_ape),
        ("median error of TPOT", accuracy.tpot_median_ape),
    ):
        if error is not None:
            yield name, share(error)


def _regret(verified: ServeVerified) -> Cell:
    if verified.regret_ratio is None:
        return word("did not run, or misses the SLO")
    if verified.trials[0].decision == verified.winner:
        return word("it is the winner")
    behind = f"{format_ratio(verified.regret_ratio)} behind the winner"
    return Cell(text=behind, value=verified.regret_ratio)


def _spread(spread: Spread) -> str:
    times_s = {"mean": spread.mean, "P50": spread.p50, "P90": spread.p90, "P99": spread.p99}
    return ", ".join(
        f"{name} {format_s(time_s)}" for name, time_s in times_s.items() if time_s is not None
    )


def _row(trial: ServeTrial) -> tuple[Cell, ...]:
    return (
        word(short_deployment(trial)),
        word(trial.origin),
        word(trial.status),
        number(trial.runs),
        *_compared(trial.measured_ttft_s, trial.predicted_ttft_s),
        *_compared(trial.measured_tpot_s, trial.predicted_tpot_s),
        maybe(number, trial.measured_requests_per_s),
        maybe(share, trial.failed_ratio),
        word({None: "-", True: "met", False: "missed"}[trial.holds_targets]),
    )


def _compared(measured_s: float | None, predicted_s: float) -> tuple[Cell, ...]:
    """Return a measured and a predicted time, and the error of the latter."""
    error = predicted_s / measured_s - 1.0 if measured_s else None
    text = "-" if error is None else f"{100.0 * error:+.1f} %"
    return maybe(seconds, measured_s), seconds(predicted_s), Cell(text=text, value=error)
