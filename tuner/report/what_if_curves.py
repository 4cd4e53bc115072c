"""Plans under other limits, as small curves: every point is a separate solve.

One curve for each changed limit, over the factor of the change; 1 is the plan's own problem, solved
again in the same way. The y axis is the plan's objective in a comparable form: tokens per second of
the whole job where the devices of a training run change, otherwise per device; the objective
elsewhere.

Proven points are filled, points that ran out of time are hollow; an infeasible limit has no point,
and the table gives the reason.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from tuner.plans.breakdown import cause_words
from tuner.plans.serve import ServePlan
from tuner.plans.what_if import IDLE, LimitChange, WhatIf, WhatIfOutcome, Why
from tuner.report.axes import axis, layout
from tuner.report.content import (
    Block,
    Cell,
    Figure,
    Notes,
    Paragraph,
    Section,
    Table,
    number,
    some,
    word,
)
from tuner.report.figure_names import FIGURES, figure_text
from tuner.report.palette import BLUE, GREY
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_counted, format_ratio, format_s

MOST_TERMS: Final = 6
"""Causes by which two steps differ that are named."""
NO_GAIN_RATIO: Final = 0.0005
"""Of the objective; less is no change."""
MORE_IS_BETTER: Final = frozenset({"tokens_per_s", "requests_per_s", "goodput_per_device"})
UNSOLVED: Final[Mapping[str, str]] = {
    "refused": "not possible",
    "out_of_time": "not solved",
    "infeasible": "nothing fits",
    "unknown": "not decided",
}
SHOWN_FIGURES: Final = (
    *("step_time_s", "tokens_per_s", "peak_memory_bytes", "num_devices", "cost_per_hour"),
    *("requests_per_s", "ttft_p90_s", "tpot_p90_s", "goodput_per_device", "busiest_rank_ratio"),
    "objective",
)
TRAIN_CURVES: Final = (
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
)
"""Changes that are drawn, the most important first, as time may run out."""
PLACE_CURVES: Final = ("slots=+1", "slots=+2", "slots=+4")

_TITLES: Final = {
    "nodes": "Other numbers of nodes",
    "sequence-length": "Other sequence lengths",
    "batch": "Other batch sizes",
    "bandwidth": "Other network bandwidth",
    "memory": "Other memory per device",
    "rate": "Other request rates",
    "concurrency": "Other concurrency",
    "input-tokens": "Other input lengths",
    "output-tokens": "Other output lengths",
    "ttft": "Other TTFT targets",
    "tpot": "Other TPOT targets",
    "slots": "More slots per rank",
}


class _CurvePoint(NamedTuple):
    factor: float
    outcome: WhatIfOutcome


def serve_curves(plan: ServePlan) -> tuple[str, ...]:
    """Return the changes that are drawn of a deployment: its load and the targets that it has."""
    goal = plan.goal
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


def train_curve_figure(limit: str, _objective: str) -> str:
    """Return what the curve of a limit of a training run draws."""
    return "tokens_per_s" if limit == "nodes" else "tokens_per_s_per_device"


def what_if_section(
    result: WhatIf,
    changes: Sequence[LimitChange],
    *,
    drawn: Callable[[str, str], str],
    slots: int | None = None,
) -> Section:
    """Draw the results of `changes`, in their order.

    Args:
        result: of the solves.
        changes: the changed limits.
        drawn: the figure to draw, of a limit and the plan's objective (`Goal.curve_figure`).
        slots: of a rank, where the plan places experts.
    """
    curves: dict[str, list[_CurvePoint]] = defaultdict(list)
    for change, outcome in zip(changes, result.outcomes, strict=True):
        factor = _factor(change, slots=slots)
        if factor is not None:
            curves[change.key].append(_CurvePoint(factor, outcome))
    figures = (
        _figure(key, points, result.base, drawn=drawn(key, result.base.objective))
        for key, points in curves.items()
    )
    return Section(
        name="what-if",
        heading="What if",
        blocks=some(
            Paragraph(
                text="Every point is a solve of the plan's problem with one limit changed, "
                f"{result.time_limit_s:.0f} s for all of them; 1 is the plan's own limit."
            ),
            *figures,
            _table(result),
        ),
    )


def why_sections(why: Why) -> tuple[Section, ...]:
    """Return what would change a plan, and the terms in which its runners-up differ."""
    what_if, rivals = why.what_if, [rival for rival in why.rivals if rival.terms_s]
    blocks: dict[str, tuple[Block, ...]] = {}
    if rivals:
        terms = tuple(f"{rival.decision}: {terms_words(rival.terms_s)}" for rival in rivals)
        name = "Runners-up, by the seconds in which they differ from the plan"
        blocks[name] = (Notes(notes=terms, counted_as="runners-up"),)
    if what_if is not None:
        solved = sum(one.status != "out_of_time" for one in what_if.outcomes)
        total_s = sum(one.solve_s for one in what_if.outcomes)
        cases = (
            f"what-if: {format_counted(solved, 'case')} solved again in {format_s(total_s)} "
            f"(--time-limit {format_s(what_if.time_limit_s)} for their searches)"
        )
        blocks["What if"] = (Paragraph(text=cases), _table(what_if))
    if why.notes:
        blocks["Notes on what-ifs"] = (Notes(notes=why.notes, counted_as="notes"),)
    return tuple(Section(name="why", heading=name, blocks=own) for name, own in blocks.items())


def terms_words(terms_s: Mapping[str, float]) -> str:
    """Say by which seconds a step differs: in all, and the largest causes."""
    terms = list(terms_s.items())
    shown = ", ".join(
        f"{cause_words(name)} {_signed_s(spent)}" for name, spent in terms[:MOST_TERMS]
    )
    more = f" and {len(terms) - MOST_TERMS} smaller" if len(terms) > MOST_TERMS else ""
    return f"{_signed_s(sum(terms_s.values()))} = {shown}{more}"


def _signed_s(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_s(abs(seconds))}"


def _factor(change: LimitChange, *, slots: int | None) -> float | None:
    """Return the factor of a change; None if only its new value is known."""
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


def _figure(
    key: str, points: Sequence[_CurvePoint], base: WhatIfOutcome, *, drawn: str
) -> Figure | None:
    every = sorted((*points, _CurvePoint(1.0, base)), key=lambda point: point.factor)
    solved = [point for point in every if drawn in point.outcome.figures]
    if len(solved) < 2:
        return None
    said = FIGURES.get(drawn, drawn.replace("_", " "))
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
                "factor",
                type="log",
                tickvals=factors,
                ticktext=[f"{factor:.3g}" for factor in factors],
            ),
            y=axis(said, rangemode="tozero"),
            showlegend=len(traces) > 1,
        ),
        table=Table(
            caption=f"{_TITLES[key]}: {said}",
            header=("factor", said, "certificate", "decision"),
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


def _is_proven(point: _CurvePoint) -> bool:
    return point.outcome.status == "optimal"


def _reading(points: Sequence[_CurvePoint], drawn: str) -> str:
    lost = [point for point in points if drawn not in point.outcome.figures]
    if not lost:
        return (
            "Predicted, each with its own decision. Filled: proven; hollow: best within the time."
        )
    at = ", ".join(f"{point.factor:.3g}" for point in lost)
    return f"No solution at factor {at}: {lost[0].outcome.reason or lost[0].outcome.status}."


def _hover(point: _CurvePoint, drawn: str, said: str) -> str:
    one = point.outcome
    decision = one.decision.replace(", ", "\n")
    return f"{one.says or 'as planned'}\n{number(one.figures[drawn]).text} {said}\n{decision}"


def _value(outcome: WhatIfOutcome, drawn: str) -> Cell:
    value = outcome.figures.get(drawn)
    return word(outcome.reason or "-") if value is None else number(value)


def _table(result: WhatIf) -> Table:
    return Table(
        caption="All results",
        header=("limit", "result", "figures", "what changes"),
        rows=tuple(
            (
                word(one.says or one.change or "as planned"),
                _gain(one),
                word(
                    ", ".join(
                        f"{FIGURES[name]} {figure_text(name, one.figures[name])}"
                        for name in SHOWN_FIGURES
                        if name in one.figures
                    )
                ),
                word(_what_changes(one)),
            )
            for one in (result.base, *result.outcomes)
        ),
    )


def _gain(one: WhatIfOutcome) -> Cell:
    gain = one.gain_ratio
    if one.status in UNSOLVED or not one.change:
        return word(UNSOLVED.get(one.status, one.status))
    if gain is None:
        return word("fits")
    if abs(gain) < NO_GAIN_RATIO:
        return word("no change")
    grows = gain > 0 if one.objective in MORE_IS_BETTER else gain < 0
    name = FIGURES.get(one.objective, one.objective)
    text = f"{'+' if grows else '-'}{format_ratio(abs(gain))} {name}"
    return Cell(text=text, value=gain)


def _what_changes(one: WhatIfOutcome) -> str:
    """Say how the decision differs, or why nothing fits."""
    if not one.figures:
        return one.reason
    if one.change and one.gain_ratio is None:
        return one.decision
    return "; ".join((*one.decision_changes, *([IDLE] if IDLE in one.reason else [])))
