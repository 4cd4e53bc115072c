"""Trials of a plan of any goal: measured against predicted, and what they conclude."""

from collections.abc import Iterator

from tuner.config.serve_words import short_serve
from tuner.config.train_words import short_decision, train_words
from tuner.engines.metrics.benchmark_run import Spread
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.content import (
    Block,
    Cell,
    Depth,
    Figure,
    NamedValues,
    Section,
    Table,
    bullets,
    maybe,
    named,
    number,
    seconds,
    section,
    share,
    size,
    word,
)
from tuner.report.plot_style import BLUE, GREEN, VERMILLION, axis, layout, time_axis
from tuner.report.serve_decision import decision_facts
from tuner.units import format_counted, format_ratio, format_s
from tuner.verify.deployments.records import ServeTrial, ServeVerified
from tuner.verify.loop import failure_cause
from tuner.verify.placement_records import PlaceVerified
from tuner.verify.records import Extrapolated, Trial, Verified

AnyVerified = Verified | ServeVerified | PlaceVerified


def trials_section(verified: AnyVerified | None, plan: object) -> Section | None:
    """Return the section on the trials; None where there is no conclusion.

    Args:
        verified: conclusion from the trials of a plan of any goal.
        plan: the plan.
    """
    blocks: Iterator[Block | None] = iter(())
    if isinstance(verified, Verified) and isinstance(plan, Plan) and plan.predicted is not None:
        blocks = _trained(verified, plan.predicted)
    elif isinstance(verified, ServeVerified):
        blocks = _served(verified)
    elif isinstance(verified, PlaceVerified):
        blocks = _placed(verified)
    notes = bullets(() if verified is None else verified.notes)
    return section("verified", "Predicted and measured", *blocks, notes)


def _trained(verified: Verified, predicted: TrainPrediction) -> Iterator[Block | None]:
    yield _times(verified, predicted) if verified.trials else None
    yield _verdict(verified)
    yield _memory(verified)


def _served(verified: ServeVerified) -> Iterator[Block | None]:
    yield Table(
        caption="Launched deployments, means over requests, medians over runs",
        header=(
            *("deployment", "from", "status", "runs", "TTFT", "predicted", "error"),
            *("TPOT", "predicted", "error", "requests/s", "failed", "SLO"),
        ),
        rows=tuple(map(_row, verified.trials)),
    )
    yield bullets(
        f"{short_deployment(trial)}: {trial.reason or '; '.join(trial.misses)}"
        for trial in verified.trials
        if trial.reason or trial.misses
    )
    yield NamedValues(facts=tuple(_facts(verified)))


def _placed(verified: PlaceVerified) -> Iterator[Block | None]:
    ratio = verified.regret_ratio
    yield named(
        ("measured on", verified.device),
        ("winner", verified.winner),
        ("plan", verified.winner and _first_choice(ratio, is_winner=ratio == 0.0)),
    )
    yield Table(
        caption=f"Expert GEMMs of the slowest rank, mean of {len(verified.layers)} layers",
        header=("placement", "predicted", "measured"),
        rows=tuple(
            (
                word(trial.decision),
                maybe(seconds, trial.predicted_layer_time_s),
                maybe(seconds, trial.measured_layer_time_s),
            )
            for trial in verified.trials
        ),
    )


def _verdict(verified: Verified) -> NamedValues:
    accuracy, step_s = verified.accuracy, verified.winner_step_s
    measured = "" if step_s is None else format_s(step_s)
    if verified.winner_extrapolated is not None:
        measured = f"{_extrapolated_words(verified.winner_extrapolated)}, extrapolated"
    if all(trial.decision != verified.winner for trial in verified.trials):
        measured += "; no trial of it was launched, at full or smaller scale"
    doubt = (
        "noise" if all(trial.scale is None for trial in verified.trials) else "extrapolation error"
    )
    tie, ratio = f" (a tie: less than the {doubt})" * verified.tie, verified.regret_ratio
    first = _first_choice(ratio, is_winner=ratio == 0.0, tie=tie)
    corrected = accuracy.recalibrated_median_ape
    recalibrated = "" if corrected is None else f", {format_ratio(corrected)} recalibrated"
    return named(
        (
            "winner",
            f"{short_decision(verified.winner)}: {measured}"
            if verified.winner
            else "no trial ran: nothing is verified",
        ),
        ("first choice", verified.winner and first),
        *_extrapolations(verified),
        *_failures(verified),
        (
            "step time",
            accuracy.predicted_median_ape is not None
            and f"median error {format_ratio(accuracy.predicted_median_ape)}{recalibrated} from the"
            " others"
            * (corrected is not None),
        ),
        (
            "activations",
            accuracy.activation_max_ape is not None
            and f"largest error {format_ratio(accuracy.activation_max_ape)}",
        ),
        (
            "measured best",
            accuracy.rank_of_measured_best
            and f"ranked {accuracy.rank_of_measured_best} by the model",
        ),
    )


def _first_choice(
    regret_ratio: float | None, *, is_winner: bool, tie: str = "", unknown: str = "did not run"
) -> str:
    """Say how far the plan's own choice is behind the best that was launched."""
    if regret_ratio is None:
        return unknown
    return (
        "it is the winner" if is_winner else f"{format_ratio(regret_ratio)} behind the winner{tie}"
    )


def _extrapolated_words(extrapolated: Extrapolated) -> str:
    """Format a step time with its 90 % error band, e.g. `12.3 s ± 6.0 %`."""
    return f"{format_s(extrapolated.step_time_s)} ± {format_ratio(extrapolated.error_ratio)}"


def _extrapolations(verified: Verified) -> Iterator[tuple[str, str]]:
    """Yield the step times of jobs that were launched at a smaller scale only."""
    smaller = [small_trial for small_trial in verified.trials if small_trial.scale is not None]
    smaller.sort(key=lambda small_trial: (small_trial.scale or small_trial.decision).num_devices)
    for decision, trial in {small_trial.decision: small_trial for small_trial in smaller}.items():
        if extrapolated := trial.extrapolated:
            unseen = "".join(f"; not launched: {difference}" for difference in extrapolated.unseen)
            yield (
                "extrapolated",
                f"{short_decision(decision)}: {_extrapolated_words(extrapolated)} (90 % error"
                f" band), from{_scale_words(trial).removeprefix(', on')}{unseen}",
            )


def _scale_words(trial: Trial) -> str:
    """Say at which scale a trial launched the job; nothing for the full scale."""
    scale, whole = trial.scale, trial.decision
    if scale is None:
        return ""
    num_layers, fewer = sum(whole.pipeline_layout), len(scale.layers)
    layers = f", {fewer} of {num_layers} layers" if fewer < num_layers else ""
    return f", on {scale.num_devices} of {whole.num_devices} devices{layers}"


def _failures(verified: Verified) -> Iterator[tuple[str, str]]:
    """Yield why trials failed, each reason once."""
    by_cause: dict[str, list[Trial]] = {}
    for trial in verified.trials:
        if trial.status != "ok":
            cause = failure_cause(trial) or f"{trial.status}: {trial.reason}"
            by_cause.setdefault(cause, []).append(trial)
    for first, *others in by_cause.values():
        count = format_counted(1 + len(others), "trial")
        yield "failed", f"{count} {first.status.replace('_', ' ')}: {first.reason}"


def _times(verified: Verified, predicted: TrainPrediction) -> Figure:
    trials = verified.trials
    names = [f"trial {number}" for number in range(len(trials))]
    low, high = (edge / predicted.step_time_s for edge in predicted.step_time_s_band)
    predicted_s = [trial.predicted_step_s for trial in trials]
    hover = [f"{name}\n{_hover(trial)}" for name, trial in zip(names, trials, strict=True)]
    traces = (
        {
            "type": "scatter",
            "mode": "markers",
            "name": "predicted, with its band",
            "x": names,
            "y": predicted_s,
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [value * (high - 1.0) for value in predicted_s],
                "arrayminus": [value * (1.0 - low) for value in predicted_s],
                "color": BLUE,
                "thickness": 1.5,
                "width": 6,
            },
            "marker": {"color": BLUE, "symbol": "square", "size": 10},
            "hovertext": hover,
            "hoverinfo": "text",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "corrected by the other trials",
            "x": names,
            "y": [trial.recalibrated_step_s for trial in trials],
            "marker": {"color": GREEN, "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
            "hovertext": hover,
            "hoverinfo": "text",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured (median of its steps)",
            "x": names,
            "y": [trial.measured_step_s for trial in trials],
            "marker": {"color": VERMILLION, "symbol": "x", "size": 11},
            "hovertext": hover,
            "hoverinfo": "text",
        },
    )
    return Figure(
        name="trials",
        title="Step time of every trial",
        reading="Squares: predicted before any launch, with the plan's error band. Diamonds: "
        "predicted with the other trials as calibration. Crosses: measured.",
        traces=traces,
        layout=layout(x=axis("", type="category"), y=time_axis("step time", rangemode="tozero")),
        table=Table(
            caption="Trials in launch order",
            header=(
                *("decision", "from", "status", "predicted", "corrected", "measured"),
                *("error", "corrected error"),
            ),
            rows=tuple(
                (
                    word(short_decision(trial.decision) + _scale_words(trial)),
                    word(trial.origin),
                    word(trial.status),
                    seconds(trial.predicted_step_s),
                    maybe(seconds, trial.recalibrated_step_s),
                    maybe(seconds, trial.measured_step_s),
                    _error(trial.predicted_step_s, trial.measured_step_s),
                    _error(trial.recalibrated_step_s, trial.measured_step_s),
                )
                for trial in trials
            ),
        ),
        height=420,
        depth=Depth.MORE,
    )


def _memory(verified: Verified) -> Table | None:
    rows = tuple(
        (
            word(short_decision(trial.decision)),
            size(max(trial.predicted_activation_bytes)),
            size(max(trial.measured_activation_bytes)),
        )
        for trial in verified.trials
        if trial.measured_activation_bytes and trial.predicted_activation_bytes
    )
    caption = "Activation bytes of the peak-memory pipeline rank"
    header = ("trial", "predicted", "measured")
    table = Table(caption=caption, header=header, rows=rows, depth=Depth.PAGE)
    return table if rows else None


def _hover(trial: Trial) -> str:
    measured = trial.measured_step_s
    said = trial.status if measured is None else f"measured {format_s(measured)}"
    decision = train_words(trial.decision).replace(", ", "\n")
    return f"predicted {format_s(trial.predicted_step_s)}, {said}\n{decision}"


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
    text = " + ".join(f"{group.count} x {group.devices} {group.role.value}" for group in groups)
    # The roles identify these two modes only.
    is_named_by_roles = trial.decision.mode in ("aggregated", "disaggregated")
    return text if is_named_by_roles else f"{text} ({trial.decision.mode})"


def _facts(verified: ServeVerified) -> Iterator[tuple[str, Cell]]:
    accuracy, factors = verified.accuracy, verified.factors
    yield "launched", number(len(verified.trials))
    won = next((trial for trial in verified.trials if trial.decision == verified.winner), None)
    if won is None:
        ran = any(trial.runs for trial in verified.trials)
        nothing = "no deployment could be measured: nothing is verified"
        yield "winner", word("no launched deployment meets the SLO" if ran else nothing)
    else:
        yield "winner", word(f"{short_deployment(won)}, by {verified.objective}")
        for name, spread in (("TTFT", won.measured_ttft), ("TPOT", won.measured_tpot)):
            if spread is not None:
                runs = format_counted(won.runs, "run")
                yield f"{name} of the winner", word(f"{_spread(spread)}, median of {runs}")
        yield from decision_facts(won.decision)
        first = _first_choice(
            verified.regret_ratio,
            is_winner=won is verified.trials[0],
            unknown="did not run, or misses the SLO",
        )
        yield "first choice", word(first)
        if verified.tie:
            yield "tie", word("another deployment is as good, within the noise of the runs")
    for name, factor, inside, error in (
        (
            "TTFT",
            factors.ttft if factors else None,
            accuracy.ttft_within_band,
            accuracy.ttft_median_ape,
        ),
        (
            "TPOT",
            factors.tpot if factors else None,
            accuracy.tpot_within_band,
            accuracy.tpot_median_ape,
        ),
    ):
        if factor is not None:
            yield f"measured over predicted {name}", number(factor)
            yield f"{name} within its band", word(f"{inside} of {accuracy.num_deployments}")
        if error is not None:
            yield f"median error of {name}", share(error)


def _spread(spread: Spread) -> str:
    times_s = {"mean": spread.mean, "P50": spread.p50, "P90": spread.p90, "P99": spread.p99}
    return ", ".join(
        f"{name} {format_s(time_s)}" for name, time_s in times_s.items() if time_s is not None
    )


def _row(trial: ServeTrial) -> tuple[Cell, ...]:
    times_s = (
        (trial.measured_ttft_s, trial.predicted_ttft_s),
        (trial.measured_tpot_s, trial.predicted_tpot_s),
    )
    return (
        word(short_deployment(trial)),
        word(trial.origin),
        word(trial.status),
        number(trial.runs),
        *(
            cell
            for measured_s, predicted_s in times_s
            for cell in (
                maybe(seconds, measured_s),
                seconds(predicted_s),
                _error(predicted_s, measured_s),
            )
        ),
        maybe(number, trial.measured_requests_per_s),
        maybe(share, trial.failed_ratio),
        word({None: "-", True: "met", False: "missed"}[trial.holds_targets]),
    )


def _error(predicted_s: float | None, measured_s: float | None) -> Cell:
    if predicted_s is None or not measured_s:
        return word("-")
    error = predicted_s / measured_s - 1.0
    return Cell(text=f"{100.0 * error:+.1f} %", value=error)
