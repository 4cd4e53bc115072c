"""A training step's time and memory by cause, by stage, by pipeline rank.

All numbers are the plan's (`predicted` of tuner/plans/train.py); nothing is priced here.
"""

from collections.abc import Sequence
from typing import Final

from tuner.config.equal_stages import equal_stages
from tuner.config.train_words import train_words
from tuner.plans.breakdown import cause_words
from tuner.plans.train import Plan, StagePrediction, TrainPrediction
from tuner.report.axes import axis, layout, limit_line, limit_text, time_axis
from tuner.report.content import Cell, Figure, Table, between, number, seconds, share, size, word
from tuner.report.palette import BLUE, GREEN, ORANGE, filled, second_bars
from tuner.units import format_bytes, format_s, parse_bytes

MOST_COMPARED: Final = 4
"""Runners-up drawn with the plan's decision."""

_PARTS: Final = ("parameter", "gradient", "optimizer", "activation", "other")
_PART_WORDS: Final = ("parameters", "gradients", "optimizer state", "activations", "buffers")


def breakdown_figure(plan: Plan, predicted: TrainPrediction) -> Figure:
    """Draw the step's seconds by cause, with those of the runners-up."""
    others = plan.alternatives[:MOST_COMPARED]
    rows = [("the plan", "predicted", predicted)]
    rows += [
        (f"runner-up {number}", f"alternatives.{number - 1}.predicted", other.predicted)
        for number, other in enumerate(others, start=1)
    ]
    causes = list(dict.fromkeys(cause for *_, one in rows for cause in one.breakdown_s))
    largest = {cause: max(one.breakdown_s.get(cause, 0.0) for *_, one in rows) for cause in causes}
    causes = sorted((cause for cause in causes if largest[cause] > 0.0), key=lambda c: -largest[c])
    names = [name for name, *_ in rows]
    traces = tuple(
        {
            "type": "bar",
            "orientation": "h",
            "name": cause_words(cause),
            "y": names,
            "x": [one.breakdown_s.get(cause, 0.0) for *_, one in rows],
            "marker": filled(place),
            "hovertext": [
                f"{cause_words(cause)}: {format_s(one.breakdown_s.get(cause, 0.0))}"
                for *_, one in rows
            ],
            "hoverinfo": "text",
        }
        for place, cause in enumerate(causes)
    )
    decisions = [train_words(one.decision) for one in others]
    table = Table(
        caption="Seconds of a step by cause",
        header=("", *(cause_words(cause) for cause in causes), "step", "decision"),
        rows=tuple(
            (
                word(name),
                *(
                    seconds(
                        one.breakdown_s.get(cause, 0.0),
                        key=f"{key}.breakdown_s.{cause}" if cause in one.breakdown_s else "",
                    )
                    for cause in causes
                ),
                seconds(one.step_time_s, key=f"{key}.step_time_s"),
                word(said),
            )
            for (name, key, one), said in zip(
                rows,
                (train_words(plan.decision) if plan.decision else "", *decisions),
                strict=True,
            )
        ),
    )
    return Figure(
        name="breakdown",
        title="Where a step's time goes",
        reading="Predicted seconds of one step by cause, for the plan and its runners-up. "
        "Overlapped communication is not counted.",
        traces=traces,
        layout=layout(
            x=time_axis("step time"),
            y=axis("", autorange="reversed", type="category"),
            barmode="stack",
        ),
        table=table,
        height=190 + 44 * len(rows),
    )


def stage_time_figure(predicted: TrainPrediction) -> Figure:
    """Draw the seconds of one micro-batch on each stage."""
    stages = predicted.stages
    names = _stage_names(stages)
    parts = (
        ("forward", [one.forward_s for one in stages], BLUE, ""),
        ("backward", [one.backward_s for one in stages], ORANGE, "/"),
    )
    return Figure(
        name="stage-time",
        title="Time of a micro-batch by stage",
        reading="Predicted seconds of one micro-batch, stage by stage in execution order; "
        "recomputation counts as backward. The slowest stage sets the pace.",
        traces=second_bars(names, parts),
        layout=layout(
            x=axis("stage", type="category"),
            y=time_axis("micro-batch time", rangemode="tozero"),
            barmode="stack",
        ),
        table=Table(
            caption="Seconds of one micro-batch by stage",
            header=("stages", "layers", "forward", "backward"),
            rows=_equal_rows(
                [
                    (
                        number(one.layers, key=f"predicted.stages.{index}.layers"),
                        seconds(one.forward_s, key=f"predicted.stages.{index}.forward_s"),
                        seconds(one.backward_s, key=f"predicted.stages.{index}.backward_s"),
                    )
                    for index, one in enumerate(stages)
                ]
            ),
        ),
        height=340,
    )


def memory_unit(most_bytes: float) -> tuple[str, int]:
    """Return the unit for drawing so many bytes, and its bytes."""
    unit = next(
        (unit for unit in ("GiB", "MiB", "KiB") if most_bytes >= parse_bytes(f"1{unit}")), "B"
    )
    return unit, parse_bytes(f"1{unit}")


def stage_memory_figure(predicted: TrainPrediction) -> Figure:
    """Draw the bytes of each stage by kind."""
    stages = predicted.stages
    unit, unit_bytes = memory_unit(max(stage.total_bytes for stage in stages))
    names = _stage_names(stages)
    return Figure(
        name="stage-memory",
        title="Memory by stage",
        reading="Predicted bytes of each stage, on its device with the highest peak.",
        traces=tuple(
            {
                "type": "bar",
                "name": said,
                "x": names,
                "y": [_bytes(one, part) / unit_bytes for one in stages],
                "marker": filled(place),
                "hovertext": [f"{said}: {format_bytes(_bytes(one, part))}" for one in stages],
                "hoverinfo": "text+x",
            }
            for place, (part, said) in enumerate(zip(_PARTS, _PART_WORDS, strict=True))
        ),
        layout=layout(
            x=axis("stage", type="category"),
            y=axis(unit, rangemode="tozero"),
            barmode="stack",
        ),
        table=Table(
            caption="Bytes of each stage on its device with the highest peak",
            header=("stages", *_PART_WORDS, "total"),
            rows=_equal_rows(
                [
                    (
                        *(
                            size(_bytes(one, part), key=f"predicted.stages.{index}.{part}_bytes")
                            for part in _PARTS
                        ),
                        size(one.total_bytes),
                    )
                    for index, one in enumerate(stages)
                ]
            ),
        ),
        height=360,
    )


def peak_figure(predicted: TrainPrediction) -> Figure:
    """Draw the peak of each pipeline rank with its band, against usable memory."""
    peaks, bands = predicted.peak_memory_bytes, predicted.peak_memory_bytes_band
    limit = predicted.memory_limit_bytes
    unit, unit_bytes = memory_unit(max(peaks))
    names = [f"rank {rank}" for rank in range(len(peaks))]
    traces = (
        {
            "type": "bar",
            "name": "predicted peak and its band",
            "x": names,
            "y": [peak / unit_bytes for peak in peaks],
            "marker": {"color": GREEN},
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [
                    (high - peak) / unit_bytes for peak, (_, high) in zip(peaks, bands, strict=True)
                ],
                "arrayminus": [
                    (peak - low) / unit_bytes for peak, (low, _) in zip(peaks, bands, strict=True)
                ],
                "color": "ink",
                "thickness": 1.5,
            },
            "hovertext": [
                f"{format_bytes(peak)}, {format_bytes(low)} to {format_bytes(high)}"
                for peak, (low, high) in zip(peaks, bands, strict=True)
            ],
            "hoverinfo": "text+x",
        },
    )
    marks = {}
    if limit is not None:
        text = f"usable: {format_bytes(limit)}"
        marks = {
            "shapes": [limit_line(limit / unit_bytes, is_vertical=False)],
            "annotations": [limit_text(text, limit / unit_bytes, is_vertical=False)],
        }
    return Figure(
        name="peak",
        title="Peak against usable memory",
        reading="Predicted highest peak of each pipeline rank's devices; the line on top of a bar "
        "is the error band from published peaks.",
        traces=traces,
        layout=layout(
            x=axis("pipeline rank", type="category"),
            y=axis(unit, rangemode="tozero"),
            bargap=0.5,
            **marks,
        ),
        table=Table(
            caption="Peak of each pipeline rank",
            header=("pipeline rank", "peak", "band", "activations", "of usable memory"),
            rows=tuple(
                (
                    word(name),
                    size(peak, key=f"predicted.peak_memory_bytes.{rank}"),
                    between(bands[rank], unit="bytes"),
                    size(
                        predicted.activation_bytes[rank], key=f"predicted.activation_bytes.{rank}"
                    ),
                    word("not stated") if limit is None else share(peak / limit),
                )
                for rank, (name, peak) in enumerate(zip(names, peaks, strict=True))
            ),
        ),
        height=340,
    )


def _bytes(stage: StagePrediction, part: str) -> int:
    value: int = getattr(stage, f"{part}_bytes")
    return value


def _equal_rows(rows: Sequence[tuple[Cell, ...]]) -> tuple[tuple[Cell, ...], ...]:
    """Yield a row per kind of stage, with the numbers of the first one."""
    printed = [tuple(cell.text for cell in row) for row in rows]
    return tuple((word(one.label), *rows[one.stages[0]]) for one in equal_stages(printed))


def _stage_names(stages: Sequence[StagePrediction]) -> list[str]:
    return [str(index) for index in range(len(stages))]
