"""A training step's time and memory by cause, by stage, by pipeline rank.

All numbers are the plan's (`predicted` of tuner/plans/train.py); nothing is priced here.
"""

from collections.abc import Sequence
from typing import Any, Final

from tuner.config.equal_stages import equal_stages
from tuner.config.train import TrainDecision
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.breakdown import MOST_COMPARED, breakdown_figure
from tuner.report.content import (
    Cell,
    Depth,
    Figure,
    Table,
    between,
    number,
    seconds,
    share,
    size,
    word,
)
from tuner.report.plot_style import (
    BLUE,
    ORANGE,
    axis,
    filled,
    layout,
    limit_line,
    limit_text,
    second_bars,
    time_axis,
)
from tuner.units import format_bytes, parse_bytes

KINDS: Final = ("weights", "gradients", "optimizer", "activations", "buffers")
"""Kinds of data that a device's memory holds."""


def step_breakdown_figure(plan: Plan, predicted: TrainPrediction) -> Figure:
    """Draw the step's seconds by cause, with those of the runners-up."""
    return breakdown_figure(
        {"the plan": predicted.breakdown_s}
        | {
            f"runner-up {number}": alternative.predicted.breakdown_s
            for number, alternative in enumerate(plan.alternatives[:MOST_COMPARED], start=1)
        },
        name="breakdown",
        title="Where a step's time goes",
        reading="Predicted seconds of one step by cause, for the plan and its runners-up. "
        "Overlapped communication is not counted.",
    )


def stage_time_figure(decision: TrainDecision, predicted: TrainPrediction) -> Figure:
    """Draw the seconds of one micro-batch on each stage."""
    stages = predicted.stages
    parts = (
        ("forward", [stage.forward_s for stage in stages], BLUE, ""),
        ("backward", [stage.backward_s for stage in stages], ORANGE, "/"),
    )
    return Figure(
        name="stage-time",
        title="Time of a micro-batch by stage",
        reading="Predicted seconds of one micro-batch, stage by stage in execution order; "
        "recomputation counts as backward. The slowest stage sets the pace.",
        traces=second_bars([str(index) for index in range(len(stages))], parts),
        layout=layout(
            x=axis("stage", type="category"),
            y=time_axis("micro-batch time", rangemode="tozero"),
            barmode="stack",
        ),
        table=Table(
            caption="A micro-batch on each stage",
            header=("stages", "layers", "recompute", "forward", "backward"),
            rows=_equal_rows(
                [
                    (
                        number(stage.layers, key=f"predicted.stages.{index}.layers"),
                        word(f"{recompute}{f', {chunks} chunks' if chunks > 1 else ''}"),
                        seconds(stage.forward_s, key=f"predicted.stages.{index}.forward_s"),
                        seconds(stage.backward_s, key=f"predicted.stages.{index}.backward_s"),
                    )
                    for index, (stage, recompute, chunks) in enumerate(
                        zip(stages, decision.stage_recompute, decision.chunks, strict=True)
                    )
                ]
            ),
        ),
        height=340,
        depth=Depth.MORE,
    )


def memory_unit(most_bytes: float) -> tuple[str, int]:
    """Return the unit for drawing so many bytes, and its bytes."""
    unit = next(
        (unit for unit in ("GiB", "MiB", "KiB") if most_bytes >= parse_bytes(f"1{unit}")), "B"
    )
    return unit, parse_bytes(f"1{unit}")


def usable_limit(limit_bytes: int, unit_bytes: int, *, is_vertical: bool) -> dict[str, Any]:
    """Return a layout's line at the memory that may be used, and its label."""
    drawn, text = limit_bytes / unit_bytes, f"usable: {format_bytes(limit_bytes)} "
    return {
        "shapes": [limit_line(drawn, is_vertical=is_vertical)],
        "annotations": [limit_text(text, drawn, is_vertical=is_vertical)],
    }


def memory_figure(predicted: TrainPrediction) -> Figure:
    """Draw the peak of each pipeline rank by kind, with its band, against usable memory."""
    peaks, bands = predicted.peak_memory_bytes, predicted.peak_memory_bytes_band
    limit, ranks = predicted.memory_limit_bytes, range(len(predicted.peak_memory_bytes))
    unit, unit_bytes = memory_unit(max(peaks))
    parts = [_rank_parts(predicted, rank) for rank in ranks]
    names = [f"rank {rank}" for rank in ranks]
    band: dict[str, Any] = {
        "type": "data",
        "symmetric": False,
        "array": [(bands[rank][1] - peaks[rank]) / unit_bytes for rank in ranks],
        "arrayminus": [(peaks[rank] - bands[rank][0]) / unit_bytes for rank in ranks],
        "color": "ink",
        "thickness": 1.5,
    }
    marks = {} if limit is None else usable_limit(limit, unit_bytes, is_vertical=False)
    return Figure(
        name="peak",
        title="Peak memory against what may be used",
        reading="Predicted peak of each pipeline rank's devices, the highest, by what takes it; the"
        " line on top of a bar is the error band.",
        traces=tuple(
            {
                "type": "bar",
                "name": kind,
                "x": names,
                "y": [rank_parts[place] / unit_bytes for rank_parts in parts],
                "marker": filled(place),
                "hovertext": [f"{kind}: {format_bytes(rank_parts[place])}" for rank_parts in parts],
                "hoverinfo": "text+x",
                **({"error_y": band} if kind == KINDS[-1] else {}),
            }
            for place, kind in enumerate(KINDS)
        ),
        layout=layout(
            x=axis("pipeline rank", type="category"),
            y=axis(unit, rangemode="tozero"),
            barmode="stack",
            bargap=0.5,
            **marks,
        ),
        table=Table(
            caption="Peak memory of a device, by pipeline rank",
            header=("ranks", *KINDS, "total", "band", *(("of usable",) if limit else ())),
            rows=_equal_rows(
                [
                    (
                        *map(size, parts[rank]),
                        size(peaks[rank], key=f"predicted.peak_memory_bytes.{rank}"),
                        between(bands[rank], unit="bytes"),
                        *((share(peaks[rank] / limit),) if limit else ()),
                    )
                    for rank in ranks
                ]
            ),
        ),
        height=360,
        depth=Depth.MORE,
    )


def _rank_parts(predicted: TrainPrediction, rank: int) -> tuple[int, ...]:
    """Return the bytes of each of `KINDS` at the peak of a rank."""
    stages = predicted.stages[rank :: len(predicted.peak_memory_bytes)]
    stated = (
        sum(stage.parameter_bytes for stage in stages),
        sum(stage.gradient_bytes for stage in stages),
        sum(stage.optimizer_bytes for stage in stages),
        predicted.activation_bytes[rank],
    )
    return (*stated, max(0, predicted.peak_memory_bytes[rank] - sum(stated)))


def _equal_rows(rows: Sequence[tuple[Cell, ...]]) -> tuple[tuple[Cell, ...], ...]:
    """Return a row per kind of stage, with the numbers of the first one."""
    printed = [tuple(cell.text for cell in row) for row in rows]
    return tuple((word(group.label), *rows[group.stages[0]]) for group in equal_stages(printed))
