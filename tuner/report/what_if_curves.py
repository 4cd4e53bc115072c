"""What the plan would be under other limits, as small curves: every point is a solve of its own.

One curve for each limit that was moved, over the factor by which it was moved; 1 is the plan's own
question, solved again in the same way as the others. The figure that is drawn is what the plan was
made for, in the form that can be compared across the factor: a training run's tokens per second of
the whole job where its devices change, otherwise per device; the objective elsewhere.

A point that is proven stands filled, one that is only the best found in time is hollow; a limit
under which nothing fits has no point and its reason stands in the table.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tuner.plan_folder import kind_of_plan, parsed_plan
from tuner.report.axes import axis, layout
from tuner.report.content import Block, Cell, Figure, Paragraph, Section, Table, number, word
from tuner.report.palette import BLUE, GREY
from tuner.serve_plan import ServePlan
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_s
from tuner.what_if import Change, Outcome, WhatIf

_QUESTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        "nodes=x2",
        "sequence-length=x2",
        "batch=x2",
        "bandwidth=x2",
        "nodes=/2",
        "sequence-length=/2",
        "batch=/2",
        "bandwidth=/2",
        "memory=-20%",
        "memory=+20%",
    ),
    "place": ("slots=+1", "slots=+2", "slots=+4"),
}
"""What is asked of each kind of plan; first what matters most, as time may run out."""

_DRAWN: Final = {
    "tokens_per_s": "tokens/s, whole job",
    "tokens_per_s_per_device": "tokens/s per device",
    "num_devices": "devices",
    "cost_per_hour": "cost per hour",
    "goodput_per_device": "good requests/s per device",
    "requests_per_s": "requests/s",
    "objective": "objective",
    "busiest_rank_ratio": "busiest rank, share of a layer",
}
_TITLES: Final = {
    "nodes": "Other numbers of nodes",
    "sequence-length": "Other sequence lengths",
    "batch": "Other batch sizes",
    "bandwidth": "Other network bandwidth",
    "memory": "Other memory of a device",
    "rate": "Other request rates",
    "concurrency": "Other concurrency",
    "input-tokens": "Other prompts",
    "output-tokens": "Other answers",
    "ttft": "Other targets of the first token",
    "tpot": "Other targets per output token",
    "slots": "More slots a rank",
}


class _Point(NamedTuple):
    factor: float
    outcome: Outcome


def questions_of(folder: Path) -> tuple[str, ...]:
    """Return what is worth asking of the plan of a folder, what matters most first.

    Raises:
        PlanUnreadableError: there is no plan.
    """
    kind = kind_of_plan(folder) or ""
    if kind != "serve":
        return _QUESTIONS.get(kind, ())
    goal = parsed_plan(folder, ServePlan).goal
    loads = ["concurrency" if goal.traffic.is_closed_loop else "rate"]
    targets = [
        name
        for name, targets in (("tpot", goal.slo.tpot), ("ttft", goal.slo.ttft))
        if targets != Percentiles()
    ]
    return tuple(
        f"{name}={sign}2"
        for names, signs in ((loads, "x/"), (targets, "/x"), (("nodes", "bandwidth"), "/"))
        for name in names
        for sign in signs
    )


def what_if_section(
    found: WhatIf, changes: Sequence[Change], *, kind: str, slots: int | None = None
) -> Section:
    """Draw the answers to `changes`, in their order.

    Args:
        found: the answers.
        changes: what was asked.
        kind: of the plan.
        slots: of a rank, where the plan places experts.
    """
    curves: dict[str, list[_Point]] = defaultdict(list)
    for change, outcome in zip(changes, found.outcomes, strict=True):
        factor = _factor(change, slots=slots)
        if factor is not None:
            curves[change.key].append(_Point(factor, outcome))
    figures = (_figure(key, points, found.base, kind=kind) for key, points in curves.items())
    said = (
        f"Every point is a second solve of the plan's own question with one limit moved, "
        f"{found.time_limit_s:.0f} s for all of them; 1 is the limit of the plan itself."
    )
    blocks: list[Block] = [Paragraph(text=said)]
    blocks += [figure for figure in figures if figure is not None]
    blocks.append(_table(found))
    return Section(name="what-if", heading="What if", blocks=tuple(blocks))


def _factor(change: Change, *, slots: int | None) -> float | None:
    """Return what a limit is multiplied by; None where only its new value is known."""
    sign, rest = change.value[:1], change.value[1:]
    try:
        if rest.endswith("%"):
            part = float(rest[:-1]) / 100.0
            return {"+": 1.0 + part, "-": 1.0 - part}.get(sign)
        if sign in "+-" and change.key == "slots" and slots:
            return (slots + float(change.value)) / slots
        return {"x": float(rest), "/": 1.0 / float(rest)}.get(sign) if sign in "x/" else None
    except (ValueError, ZeroDivisionError):
        return None


def _figure(key: str, points: Sequence[_Point], base: Outcome, *, kind: str) -> Figure | None:
    drawn = _drawn_figure(base, key=key, kind=kind)
    every = sorted((*points, _Point(1.0, base)), key=lambda point: point.factor)
    solved = [point for point in every if drawn in point.outcome.figures]
    if len(solved) < 2:
        return None
    said = _DRAWN.get(drawn, drawn.replace("_", " "))
    values = [point.outcome.figures[drawn] for point in solved]
    traces: list[dict[str, object]] = []
    if key in ("nodes", "rate", "concurrency") and drawn in ("tokens_per_s", "num_devices"):
        own = base.figures[drawn]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "in proportion",
                "x": [point.factor for point in solved],
                "y": [own * point.factor for point in solved],
                "line": {"color": GREY, "dash": "dot", "width": 1.5},
                "hoverinfo": "skip",
            }
        )
    bands = [point.outcome.bands.get(drawn) for point in solved]
    error: dict[str, object] = {}
    if all(band is not None for band in bands):
        pairs = [band for band in bands if band is not None]
        error = {
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [high - at for at, (_, high) in zip(values, pairs, strict=True)],
                "arrayminus": [at - low for at, (low, _) in zip(values, pairs, strict=True)],
                "color": GREY,
                "thickness": 1,
                "width": 5,
            }
        }
    traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": said,
            "x": [point.factor for point in solved],
            "y": values,
            "line": {"color": BLUE, "width": 2},
            "marker": {
                "color": BLUE,
                "size": 10,
                "symbol": ["circle" if _is_proven(one) else "circle-open" for one in solved],
            },
            "hovertext": [_hover(point, drawn, said) for point in solved],
            "hoverinfo": "text",
            **error,
        }
    )
    factors = [point.factor for point in every]
    return Figure(
        name=f"what-if-{key}",
        title=_TITLES[key],
        reading=_reading(every, drawn),
        traces=tuple(traces),
        layout=layout(
            x=axis(
                "times as planned",
                type="log",
                tickvals=factors,
                ticktext=[f"{factor:.3g}" for factor in factors],
            ),
            y=axis(said, rangemode="tozero"),
            showlegend=len(traces) > 1,
        ),
        table=Table(
            caption=f"{_TITLES[key]}: {said}",
            header=("times as planned", said, "certificate", "decision"),
            rows=tuple(
                (
                    word(f"{point.factor:.3g}"),
                    _value(point.outcome, drawn),
                    word(point.outcome.status.replace("_", " ")),
                    word(point.outcome.decision),
                )
                for point in every
            ),
        ),
        height=300,
        is_small=True,
    )


def _drawn_figure(base: Outcome, *, key: str, kind: str) -> str:
    if kind == "train":
        return "tokens_per_s" if key == "nodes" else "tokens_per_s_per_device"
    return base.objective


def _is_proven(point: _Point) -> bool:
    return point.outcome.status == "optimal"


def _reading(points: Sequence[_Point], drawn: str) -> str:
    lost = [point for point in points if drawn not in point.outcome.figures]
    if not lost:
        return "Predicted, each with its own decision. Filled: proven; hollow: the best in time."
    at = ", ".join(f"{point.factor:.3g}" for point in lost)
    return f"No answer at {at} times: {lost[0].outcome.reason or lost[0].outcome.status}."


def _hover(point: _Point, drawn: str, said: str) -> str:
    one = point.outcome
    decision = one.decision.replace(", ", "\n")
    return f"{one.says or 'as planned'}\n{number(one.figures[drawn]).text} {said}\n{decision}"


def _value(outcome: Outcome, drawn: str) -> Cell:
    value = outcome.figures.get(drawn)
    return word(outcome.reason or "-") if value is None else number(value)


def _table(found: WhatIf) -> Table:
    def row(one: Outcome) -> tuple[Cell, ...]:
        value = one.figures.get(one.objective)
        gain = one.gain_ratio
        return (
            word(one.says or one.change or "as planned"),
            word(one.status.replace("_", " ")),
            word("-" if value is None else _objective(one.objective, value)),
            word("-") if gain is None else Cell(text=f"{100.0 * gain:+.1f} %", value=gain),
            word("; ".join(one.decision_changes) or ("" if one.figures else one.reason)),
        )

    return Table(
        caption="All answers",
        header=("limit", "certificate", "objective", "better by", "what changes"),
        rows=tuple(row(one) for one in (found.base, *found.outcomes)),
    )


def _objective(name: str, value: float) -> str:
    said = _DRAWN.get(name, name.removesuffix("_s").replace("_", " "))
    is_time = name.endswith("_time_s")
    return f"{format_s(value) if is_time else number(value).text} ({said})"
