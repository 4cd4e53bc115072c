"""Trials of a training plan: measured against predicted."""

from collections.abc import Iterator

from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision, train_words
from tuner.plans.train import TrainPrediction
from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import (
    Cell,
    Depth,
    Figure,
    NamedValues,
    Notes,
    Section,
    Table,
    maybe,
    named,
    seconds,
    size,
    some,
    word,
)
from tuner.report.palette import BLUE, GREEN, VERMILLION
from tuner.units import format_counted, format_ratio, format_s
from tuner.verify.loop import failure_cause
from tuner.verify.records import Extrapolated, Trial, Verified


def trials_section(verified: Verified, predicted: TrainPrediction) -> Section:
    """Return the section on the trials: which won, and how accurate the model was."""
    ran = any(trial.measured_step_s is not None for trial in verified.trials)
    return Section(
        name="verified",
        heading="Verification",
        blocks=some(
            _times(verified, predicted) if verified.trials else None,
            _verdict(verified),
            _memory(verified) if ran else None,
            Notes(notes=verified.notes) if verified.notes else None,
        ),
    )


def _verdict(verified: Verified) -> NamedValues:
    accuracy, step_s = verified.accuracy, verified.winner_step_s
    measured = "" if step_s is None else format_s(step_s)
    if verified.winner_extrapolated is not None:
        measured = f"{_extrapolated_words(verified.winner_extrapolated)}, extrapolated"
    if all(trial.decision != verified.winner for trial in verified.trials):
        measured += "; no trial of it was launched, at full or smaller scale"
    corrected = accuracy.recalibrated_median_ape
    recalibrated = "" if corrected is None else f", {format_ratio(corrected)} recalibrated"
    return named(
        (
            "winner",
            f"{short_decision(verified.winner)}: {measured}"
            if verified.winner
            else "no trial ran: nothing is verified",
        ),
        ("first choice", verified.winner and _first_choice(verified)),
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


def _first_choice(verified: Verified) -> str:
    if verified.regret_ratio is None:
        return "did not run"
    if verified.regret_ratio == 0.0:
        return "it is the winner"
    is_measured = all(trial.scale is None for trial in verified.trials)
    doubt = "noise" if is_measured else "extrapolation error"
    tie = f" (a tie: less than the {doubt})" if verified.tie else ""
    return f"{format_ratio(verified.regret_ratio)} slower than the winner{tie}"


def _extrapolated_words(extrapolated: Extrapolated) -> str:
    """Format a step time with its 90 % error band, e.g. `12.3 s ± 6.0 %`."""
    return f"{format_s(extrapolated.step_time_s)} ± {format_ratio(extrapolated.error_ratio)}"


def _extrapolations(verified: Verified) -> Iterator[tuple[str, str]]:
    """Yield the step times of jobs that were launched at a smaller scale only."""
    largest: dict[TrainDecision, tuple[Trial, Extrapolated]] = {}
    for trial in sorted(verified.trials, key=_size):
        if trial.extrapolated is not None:
            largest[trial.decision] = (trial, trial.extrapolated)
    for decision, (trial, extrapolated) in largest.items():
        unseen = "".join(f"; not launched: {one}" for one in extrapolated.unseen)
        yield (
            "extrapolated",
            f"{short_decision(decision)}: {_extrapolated_words(extrapolated)} (90 % error band),"
            f" from{_scale_words(trial).removeprefix(', on')}{unseen}",
        )


def _size(trial: Trial) -> tuple[int, int]:
    return (0, 0) if trial.scale is None else (trial.scale.num_devices, len(trial.scale.layers))


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


def _error(predicted_s: float | None, measured_s: float | None) -> Cell:
    if predicted_s is None or not measured_s:
        return word("-")
    error = predicted_s / measured_s - 1.0
    return Cell(text=f"{100.0 * error:+.1f} %", value=error)


def _hover(trial: Trial) -> str:
    measured = trial.measured_step_s
    said = trial.status if measured is None else f"measured {format_s(measured)}"
    decision = train_words(trial.decision).replace(", ", "\n")
    return f"predicted {format_s(trial.predicted_step_s)}, {said}\n{decision}"
