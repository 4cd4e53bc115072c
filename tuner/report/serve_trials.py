"""Trials of a deployment's candidates: measured against predicted."""

from typing import Final

from tuner.config.serve_words import short_serve
from tuner.report.content import (
    Cell,
    NamedValues,
    Notes,
    Section,
    Table,
    number,
    seconds,
    share,
    some,
    word,
)
from tuner.units import format_ratio
from tuner.verify.deployments.records import ServeTrial, ServeVerified

NAME: Final = "verified"


def serve_trials_section(verified: ServeVerified) -> Section:
    """Return the section on the trials."""
    return Section(
        name=NAME,
        heading="Predicted and measured",
        blocks=some(
            NamedValues(facts=tuple(_facts(verified))),
            _times(verified),
            _failures(verified),
            Notes(notes=verified.notes) if verified.notes else None,
        ),
    )


def verdict_words(verified: ServeVerified) -> str:
    """Summarise the trials in a sentence."""
    launched = f"{len(verified.trials)} launched"
    if verified.winner is None:
        return f"Of {launched}, none meets the SLO."
    won = short_serve(verified.winner)
    if verified.winner == verified.trials[0].decision:
        return f"Measured: the best of {launched}."
    return f"Measured: of {launched}, {won} is better and is in the launch files."


def _facts(verified: ServeVerified) -> list[tuple[str, Cell]]:
    accuracy = verified.accuracy
    facts: list[tuple[str, Cell]] = [("launched", number(len(verified.trials)))]
    if verified.winner is not None:
        tie = ", a tie within the noise of the runs" if verified.tie else ""
        facts.append((f"best by {verified.objective}", word(short_serve(verified.winner) + tie)))
    if verified.regret_ratio is not None:
        said = f"{format_ratio(verified.regret_ratio)} behind the best"
        facts.append(("the plan's own choice", Cell(text=said, value=verified.regret_ratio)))
    if verified.factors is not None:
        facts.append(("measured over predicted TTFT", number(verified.factors.ttft)))
        facts.append(("measured over predicted TPOT", number(verified.factors.tpot)))
        for name, inside in (
            ("TTFT within its band", accuracy.ttft_within_band),
            ("TPOT within its band", accuracy.tpot_within_band),
        ):
            facts.append((name, word(f"{inside} of {accuracy.num_deployments}")))
    for name, error in (
        ("median error of TTFT", accuracy.ttft_median_ape),
        ("median error of TPOT", accuracy.tpot_median_ape),
    ):
        if error is not None:
            facts.append((name, share(error)))
    return facts


def _times(verified: ServeVerified) -> Table:
    return Table(
        caption="Launched deployments, means over requests, medians over runs",
        header=(
            "deployment",
            "runs",
            "first token",
            "predicted",
            "output token",
            "predicted",
            "requests/s",
            "failed",
            "targets",
        ),
        rows=tuple(_row(trial) for trial in verified.trials),
    )


def _row(trial: ServeTrial) -> tuple[Cell, ...]:
    nothing = word("-")
    rate, failed = trial.measured_requests_per_s, trial.failed_ratio
    targets = {None: "not measured", True: "held", False: "missed"}[trial.holds_targets]
    return (
        word(short_serve(trial.decision)),
        number(trial.runs),
        nothing if trial.measured_ttft_s is None else seconds(trial.measured_ttft_s),
        seconds(trial.predicted_ttft_s),
        nothing if trial.measured_tpot_s is None else seconds(trial.measured_tpot_s),
        seconds(trial.predicted_tpot_s),
        nothing if rate is None else number(rate),
        nothing if failed is None else share(failed),
        word(targets),
    )


def _failures(verified: ServeVerified) -> Notes | None:
    said = tuple(
        f"{short_serve(trial.decision)}: {trial.reason or '; '.join(trial.misses)}"
        for trial in verified.trials
        if trial.reason or trial.misses
    )
    return Notes(notes=said) if said else None
