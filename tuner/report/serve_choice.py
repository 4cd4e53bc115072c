"""Why this deployment: modes, runners-up, near miss, and unlaunchable options."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from tuner.config.serve_words import gain_words, short_serve, target_words
from tuner.plans.serve import FrontPoint, ServeModeResult, ServePlan, ServePrediction
from tuner.report.content import (
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
    word,
)
from tuner.report.plot_style import (
    CYCLE,
    GREEN,
    SYMBOLS,
    VERMILLION,
    axis,
    layout,
    limit_line,
    limit_text,
    time_axis,
)
from tuner.report.serve_figures import alternatives_rows
from tuner.units import format_counted, format_ratio, format_s

SHADE: Final = 0.08
"""Opacity of the region that meets the SLO."""
SHOWN_RATIO: Final = 0.005
"""Least saving of an option without a release that is stated."""


def choice_section(plan: ServePlan) -> Section | None:
    """Return the section on what was compared; None where nothing was."""
    is_found = plan.decision is not None
    return section(
        "choice",
        "Why this one" if is_found else "What was tried",
        _modes(plan),
        _near_miss(plan),
        _candidates(plan) if is_found and plan.alternatives else None,
        front_figure(plan) if is_found else None,
        _illegal(plan),
        bullets(_unlaunchable(plan), counted_as="options not launchable" * is_found),
    )


def _unlaunchable(plan: ServePlan) -> Iterator[str]:
    """Name options that no release launches, with what they would save where that is enough."""
    for option in plan.unlaunchable:
        gain = gain_words(option.gain_ratio, objective=plan.goal.objective)
        would = f" (would {gain})" * (option.gain_ratio >= SHOWN_RATIO)
        yield f"Not launchable: {option.feature}{would}"


def _near_miss(plan: ServePlan) -> NamedValues | None:
    """Name the cheapest deployment whose miss the model cannot tell from a hit."""
    near = plan.near_miss
    if near is None:
        return None
    missed = " and ".join(
        f"{target_words(miss.target)} by"
        f" {format_ratio(miss.seconds / miss.limit_s - 1.0, digits=1)}"
        f" ({format_s(miss.seconds)}, SLO {format_s(miss.limit_s)})"
        for miss in near.missed
    )
    compared = f"; {near.comparison}" * bool(near.comparison)
    said = f"{short_serve(near.decision)} misses {missed}, less than the error band{compared}"
    return named(("near miss", said))


def _illegal(plan: ServePlan) -> Table | None:
    """Count the illegal options by reason; reasons that differ only in their numbers are one."""
    space = plan.certificate.space
    by_pattern: defaultdict[str, list[str]] = defaultdict(list)
    for reason in space.illegal_by:
        by_pattern[re.sub(r"\d+", "0", reason)].append(reason)
    if not by_pattern:
        return None
    rows = []
    for first, *others in by_pattern.values():
        more = f" ({format_counted(len(others), 'more such reason')})" if others else ""
        options = sum(space.illegal_by[reason] for reason in (first, *others))
        rows.append((word(f"{first}{more}"), number(options)))
    return Table(
        depth=Depth.MORE,
        caption=f"{space.illegal:,} instance options are illegal, {space.bounded:,} more are"
        " dominated by another",
        header=("reason", "options"),
        rows=tuple(sorted(rows, key=lambda row: -(row[1].value or 0.0))),
    )


def _modes(plan: ServePlan) -> Table | None:
    """Return the table of requested modes, the chosen one first."""
    if not plan.modes:
        return None
    has_rate = plan.goal.objective == "rate"
    has_price = any(mode.cost_per_hour is not None for mode in plan.modes)
    fields = {
        "devices": (number, "devices"),
        **({"requests/s": (number, "requests_per_s")} if has_rate else {}),
        **({"cost per hour": (number, "cost_per_hour")} if has_price else {}),
        "TTFT mean": (seconds, "ttft_s"),
        "TPOT mean": (seconds, "tpot_s"),
    }

    def row(at: int, result: ServeModeResult) -> tuple[Cell, ...]:
        return (
            word(result.mode.replace("_", " ")),
            word(result.status.replace("unlaunchable", "not launchable")),
            *(
                maybe(write, getattr(result, field), key=f"modes.{at}.{field}")
                for write, field in fields.values()
            ),
            # Options that a release refuses are listed below.
            word("" if result.status == "unlaunchable" else result.told),
        )

    order = sorted(enumerate(plan.modes), key=lambda pair: pair[1].status != "chosen")
    return Table(
        caption="Requested modes",
        header=("mode", "outcome", *fields, "why"),
        rows=tuple(row(at, result) for at, result in order),
    )


def _candidates(plan: ServePlan) -> Figure:
    rows = list(alternatives_rows(plan))
    lost = ["", *(alternative.lost_by for alternative in plan.alternatives)]
    has_cost = all(predicted.cost_per_hour is not None for *_, predicted in rows)
    return Figure(
        name="candidates",
        depth=Depth.MORE,
        is_table_open=True,
        title="The candidates: latency against devices",
        reading="The plan and its stored runners-up, each the best of its kind; other "
        "candidates were priced and are not stored. Hover for the decision.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [decision.num_devices],
                "y": [predicted.tpot_s.p90],
                "marker": {
                    "color": VERMILLION if at == 0 else CYCLE[(at - 1) % len(CYCLE)],
                    "symbol": "star" if at == 0 else SYMBOLS[at % len(SYMBOLS)],
                    "size": 18 if at == 0 else 12,
                },
                "hovertext": [
                    f"{name}\n{short_serve(decision)}\nTTFT P90 "
                    f"{format_s(predicted.ttft_s.p90)}, TPOT P90 {format_s(predicted.tpot_s.p90)}"
                ],
                "hoverinfo": "text",
            }
            for at, (name, _, decision, predicted) in enumerate(rows)
        ),
        layout=layout(
            x=axis("devices", rangemode="tozero"),
            y=time_axis("TPOT P90", rangemode="tozero"),
            hovermode="closest",
        ),
        table=Table(
            caption="The plan and its runners-up",
            header=(
                "",
                "devices",
                "TTFT P90",
                "TPOT P90",
                f"{'goodput, ' * plan.goal.slo.is_stated}requests/s per device",
                *(("cost per hour",) if has_cost else ()),
                "decision",
                "why it lost",
            ),
            rows=tuple(
                (
                    word(name),
                    number(decision.num_devices),
                    seconds(predicted.ttft_s.p90, key=f"{key}.ttft_s.p90"),
                    seconds(predicted.tpot_s.p90, key=f"{key}.tpot_s.p90"),
                    number(predicted.goodput_per_device, key=f"{key}.goodput_per_device"),
                    *_cost(predicted, key=key, is_shown=has_cost),
                    word(short_serve(decision)),
                    word(why),
                )
                for (name, key, decision, predicted), why in zip(rows, lost, strict=True)
            ),
        ),
        height=380,
    )


def _cost(predicted: ServePrediction, *, key: str, is_shown: bool) -> Iterator[Cell]:
    if is_shown and predicted.cost_per_hour is not None:
        yield number(predicted.cost_per_hour, key=f"{key}.cost_per_hour")


def front_figure(plan: ServePlan) -> Figure | None:
    """Draw the front; None if the plan has none (older versions)."""
    if not plan.pareto:
        return None
    target_s = strictest_tpot_s(plan)
    speeds = [point.tokens_per_s_per_user for point in plan.pareto]
    widest = 1.05 * max(*speeds, *([1.0 / target_s] if target_s else []))
    shapes, notes = [], []
    if target_s is not None:
        speed = 1.0 / target_s
        shapes = [limit_line(speed, is_vertical=True), _region(speed, to=widest)]
        said = f"SLO of {format_s(target_s)} per token"
        notes = [limit_text(said, speed, is_vertical=True)]
    return Figure(
        name="front",
        depth=Depth.MORE,
        title="Throughput per device against speed per user",
        reading="Output tokens/s per device against tokens/s of one request, with every instance "
        "at full batch and no queueing; no priced option of a mode beats its line in both. "
        "Right of the dashed line TPOT meets its SLO. The star is the plan under its traffic, "
        "queueing and idle time included.",
        traces=tuple(_front_traces(plan)),
        layout=layout(
            x=axis("output tokens/s per user", range=[0.0, widest]),
            y=axis("output tokens/s per device", rangemode="tozero"),
            shapes=shapes,
            annotations=notes,
            hovermode="closest",
        ),
        table=_front_table(plan),
        height=440,
    )


def strictest_tpot_s(plan: ServePlan) -> float | None:
    """Return the tightest limit on the time per output token; None without an SLO."""
    targets = plan.goal.slo.tpot
    stated = (targets.mean, targets.p50, targets.p90, targets.p99)
    return min((limit_s for limit_s in stated if limit_s is not None), default=None)


def _region(speed: float, *, to: float) -> dict[str, Any]:
    """Return the shaded region of speeds that meet the SLO."""
    return {
        "type": "rect",
        "x0": speed,
        "x1": to,
        "xref": "x",
        "y0": 0,
        "y1": 1,
        "yref": "y domain",
        "fillcolor": GREEN,
        "opacity": SHADE,
        "line": {"width": 0},
        "layer": "below",
    }


def _front_traces(plan: ServePlan) -> Iterator[dict[str, Any]]:
    for place, mode in enumerate(dict.fromkeys(point.mode for point in plan.pareto)):
        points = [point for point in plan.pareto if point.mode == mode]
        yield {
            "type": "scatter",
            "mode": "lines+markers",
            "name": mode.replace("_", " "),
            "x": [point.tokens_per_s_per_user for point in points],
            "y": [point.tokens_per_s_per_device for point in points],
            "marker": {
                "color": CYCLE[place % len(CYCLE)],
                "symbol": [
                    SYMBOLS[place] if point.within_targets else f"{SYMBOLS[place]}-open"
                    for point in points
                ],
                "size": 8,
            },
            "line": {"color": CYCLE[place % len(CYCLE)], "width": 1.5},
            "hovertext": [_front_hover(point) for point in points],
            "hoverinfo": "text",
        }
    if plan.decision is not None and plan.predicted is not None:
        own_user = 1.0 / plan.predicted.tpot_s.mean if plan.predicted.tpot_s.mean > 0.0 else 0.0
        device = plan.predicted.output_tokens_per_s / plan.decision.num_devices
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "the plan",
            "x": [own_user],
            "y": [device],
            "marker": {"color": VERMILLION, "symbol": "star", "size": 18},
            "hovertext": [f"the plan\n{own_user:.4g} tokens/s per user, {device:.4g} per device"],
            "hoverinfo": "text",
        }


def _front_hover(point: FrontPoint) -> str:
    prefill = f"\nprompts: {point.prefill}" if point.prefill else ""
    return (
        f"{point.tokens_per_s_per_user:.4g} tokens/s per user,"
        f" {point.tokens_per_s_per_device:.4g} per device\n{point.instance}{prefill}"
    )


def _degrees(instance: str) -> str:
    """Return the degrees of an instance without its batch."""
    before, knobs, _ = instance.partition(";")
    return f"{before})" if knobs else before


def _front_table(plan: ServePlan) -> Table:
    has_slo = plan.goal.slo.is_stated

    def row(at: int, point: FrontPoint) -> tuple[Cell, ...]:
        path = f"pareto.{at}"
        return (
            number(point.tokens_per_s_per_user, key=f"{path}.tokens_per_s_per_user"),
            number(point.tokens_per_s_per_device, key=f"{path}.tokens_per_s_per_device"),
            *((word("yes" if point.within_targets else "no"),) if has_slo else ()),
            word("yes" if point.on_joint_front else "no"),
            word(point.mode.replace("_", " ")),
            number(point.running, key=f"{path}.running"),
            seconds(point.ttft_s, key=f"{path}.ttft_s"),
            maybe(number, point.prefill_per_instance, key=f"{path}.prefill_per_instance"),
            word(
                " + ".join(
                    _degrees(instance) for instance in (point.prefill, point.instance) if instance
                )
            ),
        )

    order = sorted(enumerate(plan.pareto), key=lambda pair: not pair[1].on_joint_front)
    return Table(
        caption="Pareto front of tokens/s per user and per device, every instance full, no "
        "queueing; that of all modes together first",
        header=(
            *("per user", "per device", *(("SLO met",) if has_slo else ())),
            *("best of all modes", "mode"),
            *("sequences per rank", "prompt alone", "prefill per decode instance", "instance"),
        ),
        rows=tuple(row(at, point) for at, point in order),
    )
