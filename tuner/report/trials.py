"""Trials of a training plan: measured against predicted."""

from typing import Final

from tuner.config.train_words import train_words
from tuner.plans.train import TrainPrediction
from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import (
    Block,
    Cell,
    Figure,
    NamedValues,
    Notes,
    Section,
    Table,
    number,
    seconds,
    share,
    size,
    some,
    word,
)
from tuner.report.palette import BLUE, GREEN, VERMILLION
from tuner.units import format_ratio, format_s
from tuner.verify.records import Trial, Verified

NAME: Final = "verified"


def trials_section(verified: Verified, predicted: TrainPrediction) -> Section:
    """Return the section on the trials."""
    ran = [trial for trial in verified.trials if trial.measured_step_s is not None]
    return Section(
        name=NAME,
        heading="Predicted and measured",
        blocks=some(
            _accuracy(verified),
            _times(verified, predicted) if ran else None,
            _memory(verified) if ran else None,
            _failures(verified),
            Notes(notes=verified.notes) if verified.notes else None,
        ),
    )


def _accuracy(verified: Verified) -> NamedValues:
    accuracy = verified.accuracy
    facts: list[tuple[str, Cell]] = [("trials", number(len(verified.trials)))]
    if verified.winner is not None and verified.winner_step_s is not None:
        facts.append(("fastest measured", seconds(verified.winner_step_s)))
        facts.append(("its decision", word(train_words(verified.winner))))
    if verified.regret_ratio is not None:
        tie = ", within the noise of the steps" if verified.tie else ""
        said = f"{format_ratio(verified.regret_ratio)} slower than the fastest{tie}"
        facts.append(("the plan's own choice", Cell(text=said, value=verified.regret_ratio)))
    if accuracy.rank_of_measured_best is not None:
        place = accuracy.rank_of_measured_best
        facts.append(("the fastest was predicted as", word(f"number {place}")))
    if accuracy.predicted_median_ape is not None:
        facts.append(("median error, before any trial", share(accuracy.predicted_median_ape)))
    if accuracy.recalibrated_median_ape is not None:
        said = "median error, corrected by the other trials"
        facts.append((said, share(accuracy.recalibrated_median_ape)))
    if accuracy.activation_max_ape is not None:
        facts.append(("largest error of activation bytes", share(accuracy.activation_max_ape)))
    return NamedValues(facts=tuple(facts))


def _names(trials: tuple[Trial, ...]) -> list[str]:
    """Name trials by their order, smaller jobs also by their devices."""
    return [
        f"trial {index}" if trial.scale is None else f"trial {index}, {trial.scale.num_devices} dev"
        for index, trial in enumerate(trials)
    ]


def _times(verified: Verified, predicted: TrainPrediction) -> Figure:
    trials = verified.trials
    names = _names(trials)
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
            header=("trial", "predicted", "corrected", "measured", "error", "decision"),
            rows=tuple(
                (
                    word(name),
                    seconds(trial.predicted_step_s),
                    _maybe(trial.recalibrated_step_s),
                    _maybe(trial.measured_step_s) if trial.status == "ok" else word(trial.status),
                    _error(trial),
                    word(train_words(trial.decision)),
                )
                for name, trial in zip(names, trials, strict=True)
            ),
        ),
        height=420,
    )


def _memory(verified: Verified) -> Table | None:
    rows = [
        (
            word(name),
            size(max(trial.predicted_activation_bytes)),
            size(max(trial.measured_activation_bytes)),
            word(train_words(trial.decision)),
        )
        for name, trial in zip(_names(verified.trials), verified.trials, strict=True)
        if trial.measured_activation_bytes and trial.predicted_activation_bytes
    ]
    if not rows:
        return None
    return Table(
        caption="Activation bytes of the peak-memory pipeline rank",
        header=("trial", "predicted", "measured", "decision"),
        rows=tuple(rows),
    )


def _failures(verified: Verified) -> Block | None:
    failed = tuple(
        f"{name}: {trial.status.replace('_', ' ')}{f', {trial.reason}' if trial.reason else ''}"
        for name, trial in zip(_names(verified.trials), verified.trials, strict=True)
        if trial.status != "ok"
    )
    return Notes(notes=failed) if failed else None


def _maybe(value: float | None) -> Cell:
    return word("-") if value is None else seconds(value)


def _error(trial: Trial) -> Cell:
    if trial.measured_step_s is None:
        return word("-")
    error = (trial.predicted_step_s - trial.measured_step_s) / trial.measured_step_s
    return Cell(text=f"{100.0 * error:+.1f} %", value=error)


def _hover(trial: Trial) -> str:
    measured = trial.measured_step_s
    said = trial.status if measured is None else f"measured {format_s(measured)}"
    decision = train_words(trial.decision).replace(", ", "\n")
    return f"predicted {format_s(trial.predicted_step_s)}, {said}\n{decision}"
