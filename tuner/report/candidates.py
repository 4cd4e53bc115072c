"""The candidates that a training plan keeps, time against memory.

A search prices or bounds every legal decision and stores few: the Pareto front of the priced ones,
the runners-up, and the ties. Only those can be drawn; the certificate counts the rest.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from tuner.config.train import TrainDecision
from tuner.config.train_words import train_words
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.axes import axis, layout, limit_line, limit_text, time_axis
from tuner.report.content import Cell, Figure, Table, seconds, size, word
from tuner.report.palette import BLUE, GREY, SKY, VERMILLION
from tuner.report.step_figures import memory_unit
from tuner.search.layout_groups import variants_words
from tuner.units import format_bytes, format_count, format_s


class _CandidatePoint(NamedTuple):
    group: str
    decision: TrainDecision
    step_time_s: float
    peak_bytes: float
    key: str
    """Of the step in the plan; empty: drawn alone, another point has the row."""
    lost_by: str
    variants: str = ""


_CHOSEN: Final = "the plan"
_TIE: Final = "tie: within the error band"
_OTHER: Final = "runner-up"
_FRONT: Final = "Pareto front"


def candidates_figure(plan: Plan, predicted: TrainPrediction) -> Figure:
    """Draw the candidates that the plan stores."""
    points = list(_points(plan, predicted))
    limit = predicted.memory_limit_bytes
    unit, unit_bytes = memory_unit(max(point.peak_bytes for point in points))
    marks = {}
    if limit is not None:
        marks = {
            "shapes": [limit_line(limit / unit_bytes, is_vertical=True)],
            "annotations": [
                limit_text(f"usable: {format_bytes(limit)} ", limit / unit_bytes, is_vertical=True)
            ],
        }
    return Figure(
        name="candidates",
        title="The candidates: time against memory",
        reading=_reading(plan),
        traces=tuple(_traces(points, unit_bytes)),
        layout=layout(
            x=axis(f"{unit} on the device with the highest peak"),
            y=time_axis("step time"),
            hovermode="closest",
            **marks,
        ),
        table=Table(
            caption="Candidates stored in the plan",
            header=("decision", "what it is", "step", "peak memory", "why it lost"),
            rows=tuple(_row(point) for point in points if point.key),
        ),
        height=440,
    )


def _reading(plan: Plan) -> str:
    space, least = plan.certificate.space, plan.certificate.within_band_is_least
    ties = f"{'at least ' if least else ''}{plan.certificate.within_band}"
    return (
        f"Of the search's candidates, {format_count(space.priced)} were priced and "
        f"{format_count(space.bounded)} proven slower by their bounds. A plan stores the Pareto "
        "front of those priced, the runners-up, the best of each layout, and listed ties: the "
        "points here (+N: variants of a layout with other options); "
        f"{ties} other parallel layouts are ties: within the error band of the choice. "
        "Hover for the decision."
    )


def _points(plan: Plan, predicted: TrainPrediction) -> Iterator[_CandidatePoint]:
    chosen = plan.decision
    assert chosen is not None
    peak = max(predicted.peak_memory_bytes)
    yield _CandidatePoint(_CHOSEN, chosen, predicted.step_time_s, peak, "predicted.step_time_s", "")
    listed = {chosen: predicted}
    for index, one in enumerate(plan.alternatives):
        listed[one.decision] = one.predicted
        yield _CandidatePoint(
            _TIE if one.within_band else _OTHER,
            one.decision,
            one.predicted.step_time_s,
            max(one.predicted.peak_memory_bytes),
            f"alternatives.{index}.predicted.step_time_s",
            one.lost_by,
            variants_words(plan, one),
        )
    for index, point in enumerate(plan.pareto):
        if (known := listed.get(point.decision)) is not None:
            # Its row is above, with every pass of the pipeline simulated; here it is only drawn.
            known_peak = max(known.peak_memory_bytes)
            yield _CandidatePoint(_FRONT, point.decision, known.step_time_s, known_peak, "", "")
            continue
        yield _CandidatePoint(
            _FRONT,
            point.decision,
            point.step_time_s,
            point.peak_memory_bytes,
            f"pareto.{index}.step_time_s",
            "by the closed form of the pipeline, its passes not simulated",
        )


def _traces(points: list[_CandidatePoint], unit_bytes: int) -> Iterator[dict[str, object]]:
    styles = (
        (_FRONT, "lines+markers", GREY, "circle-open", 9),
        (_OTHER, "markers", BLUE, "square", 9),
        (_TIE, "markers", SKY, "diamond", 10),
        (_CHOSEN, "markers", VERMILLION, "star", 18),
    )
    for group, mode, colour, symbol, width in styles:
        own = [point for point in points if point.group == group]
        if not own:
            continue
        if group == _FRONT:
            own = sorted(own, key=lambda point: point.peak_bytes)
        yield {
            "type": "scatter",
            "mode": mode,
            "name": group,
            "x": [point.peak_bytes / unit_bytes for point in own],
            "y": [point.step_time_s for point in own],
            "marker": {"color": colour, "symbol": symbol, "size": width},
            "line": {"color": colour, "dash": "dot", "width": 1.5, "shape": "hv"},
            "hovertext": [_hover(point) for point in own],
            "hoverinfo": "text",
        }


def _hover(point: _CandidatePoint) -> str:
    decision = train_words(point.decision).replace(", ", "\n")
    return (
        f"{point.group}\n{format_s(point.step_time_s)}, {format_bytes(point.peak_bytes)}"
        f"\n{decision}"
    )


def _row(point: _CandidatePoint) -> tuple[Cell, ...]:
    return (
        word(train_words(point.decision)),
        word(f"{point.group} ({point.variants})" if point.variants else point.group),
        seconds(point.step_time_s, key=point.key),
        size(point.peak_bytes),
        word(point.lost_by),
    )
