"""The candidates that a training plan keeps, time against memory, and why they lost.

A search prices or bounds every legal decision and stores few: the Pareto front of the priced ones,
the runners-up, and the ties. Only those can be drawn; the certificate counts the rest.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision, train_words
from tuner.plans.train import Alternative, Plan, TrainPrediction
from tuner.report.content import Depth, Figure, Table, maybe, seconds, share, size, word
from tuner.report.plot_style import BLUE, GREY, SKY, VERMILLION, axis, layout, time_axis
from tuner.report.step_figures import memory_unit, usable_limit
from tuner.search.layout_groups import variants_words
from tuner.units import format_bytes, format_count, format_s, format_times


class _CandidatePoint(NamedTuple):
    group: str
    decision: TrainDecision
    step_time_s: float
    peak_bytes: float


_CHOSEN: Final = "the plan"
_TIE: Final = "tie: within the error band"
_OTHER: Final = "runner-up"
_FRONT: Final = "Pareto front"
_STYLES: Final = (
    (_FRONT, "lines+markers", GREY, "circle-open", 9),
    (_OTHER, "markers", BLUE, "square", 9),
    (_TIE, "markers", SKY, "diamond", 10),
    (_CHOSEN, "markers", VERMILLION, "star", 18),
)
"""Group, Plotly's mode, colour, symbol and size."""


def rivals_table(plan: Plan, predicted: TrainPrediction) -> Table:
    """List the plan and its runners-up, one for each other layout, and why they lost."""
    assert plan.decision is not None
    chosen = Alternative(
        decision=plan.decision, predicted=predicted, within_band=False, lost_by="chosen"
    )
    rivals = {"predicted": chosen} | {
        f"alternatives.{index}.predicted": alternative
        for index, alternative in enumerate(plan.alternatives)
    }
    return Table(
        caption="Why not the others (z ZeRO stage, b micro-batch, c chunks of MoE layers, pp4x8:"
        " VPP 8)",
        header=("decision", "step", "vs chosen", "memory", "OOM risk", "why it lost"),
        rows=tuple(
            (
                word(short_decision(rival.decision)),
                seconds(rival.predicted.step_time_s, key=f"{key}.step_time_s"),
                word("" if rival.ratio_band is None else format_times(rival.ratio_band)),
                size(max(rival.predicted.peak_memory_bytes)),
                maybe(share, rival.predicted.out_of_memory_probability),
                word("; ".join(filter(None, (_why(rival), variants_words(plan, rival))))),
            )
            for key, rival in rivals.items()
        ),
        depth=Depth.MORE,
    )


def _why(rival: Alternative) -> str:
    return f"{'tie: ' * rival.within_band}{rival.lost_by}"


def candidates_figure(plan: Plan, predicted: TrainPrediction) -> Figure:
    """Draw the candidates that the plan stores."""
    points, limit = list(_points(plan, predicted)), predicted.memory_limit_bytes
    unit, unit_bytes = memory_unit(max(point.peak_bytes for point in points))
    marks = {} if limit is None else usable_limit(limit, unit_bytes, is_vertical=True)
    space = plan.certificate.space
    return Figure(
        name="candidates",
        title="The candidates: time against memory",
        reading=f"Of the search's candidates, {format_count(space.priced)} were priced and "
        f"{format_count(space.bounded)} proven slower by their bounds. A plan stores the Pareto "
        "front of those priced, the runners-up, the best of each layout, and listed ties: the "
        "points here. Hover for the decision.",
        traces=tuple(_traces(points, unit_bytes)),
        layout=layout(
            x=axis(f"{unit} on the device with the highest peak"),
            y=time_axis("step time"),
            hovermode="closest",
            **marks,
        ),
        table=Table(
            caption="Candidates stored in the plan",
            header=("decision", "what it is", "step", "peak memory"),
            rows=tuple(
                (
                    word(train_words(point.decision)),
                    word(point.group),
                    seconds(point.step_time_s),
                    size(point.peak_bytes),
                )
                for point in points
            ),
        ),
        height=440,
    )


def _points(plan: Plan, predicted: TrainPrediction) -> Iterator[_CandidatePoint]:
    assert plan.decision is not None
    listed = {plan.decision: predicted}
    groups = {plan.decision: _CHOSEN}
    for alternative in plan.alternatives:
        listed[alternative.decision] = alternative.predicted
        groups[alternative.decision] = _TIE if alternative.within_band else _OTHER
    for decision, prediction in listed.items():
        peak = max(prediction.peak_memory_bytes)
        yield _CandidatePoint(groups[decision], decision, prediction.step_time_s, peak)
    for point in plan.pareto:
        # A listed decision's step was simulated with every pass of the pipeline.
        known = listed.get(point.decision)
        step_s = point.step_time_s if known is None else known.step_time_s
        peak = point.peak_memory_bytes if known is None else max(known.peak_memory_bytes)
        yield _CandidatePoint(_FRONT, point.decision, step_s, peak)


def _traces(points: list[_CandidatePoint], unit_bytes: int) -> Iterator[dict[str, object]]:
    for group, mode, colour, symbol, width in _STYLES:
        members = [point for point in points if point.group == group]
        if group == _FRONT:
            members = sorted(members, key=lambda point: point.peak_bytes)
        if members:
            yield {
                "type": "scatter",
                "mode": mode,
                "name": group,
                "x": [point.peak_bytes / unit_bytes for point in members],
                "y": [point.step_time_s for point in members],
                "marker": {"color": colour, "symbol": symbol, "size": width},
                "line": {"color": colour, "dash": "dot", "width": 1.5, "shape": "hv"},
                "hovertext": [_hover(point) for point in members],
                "hoverinfo": "text",
            }


def _hover(point: _CandidatePoint) -> str:
    decision = train_words(point.decision).replace(", ", "\n")
    return (
        f"{point.group}\n{format_s(point.step_time_s)}, {format_bytes(point.peak_bytes)}"
        f"\n{decision}"
    )
