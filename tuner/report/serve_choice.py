"""Why this deployment: modes, runners-up, near miss, and unlaunchable options."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from tuner.config.serve_words import gain_words, short_serve, target_words
from tuner.plans.serve import ServeModeResult, ServePlan, ServePrediction
from tuner.report.axes import axis, layout, time_axis
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
from tuner.report.front_figure import front_figure
from tuner.report.palette import CYCLE, SYMBOLS, VERMILLION
from tuner.report.serve_figures import alternatives_rows
from tuner.units import format_counted, format_ratio, format_s

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
        _candidates(plan) if is_found else None,
        front_figure(plan) if is_found else None,
        _illegal(plan),
        bullets(_unlaunchable(plan), counted_as="options not launchable" * is_found),
    )


def _unlaunchable(plan: ServePlan) -> Iterator[str]:
    """Name options that no release launches, with what they would save where that is enough."""
    for one in plan.unlaunchable:
        gain = gain_words(one.gain_ratio, objective=plan.goal.objective)
        yield f"Not launchable: {one.feature}{f' (would {gain})' * (one.gain_ratio >= SHOWN_RATIO)}"


def _near_miss(plan: ServePlan) -> NamedValues | None:
    """Name the cheapest deployment whose miss the model cannot tell from a hit."""
    near = plan.near_miss
    if near is None:
        return None
    missed = " and ".join(
        f"{target_words(one.target)} by {format_ratio(one.seconds / one.limit_s - 1.0, digits=1)}"
        f" ({format_s(one.seconds)}, SLO {format_s(one.limit_s)})"
        for one in near.missed
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

    def row(at: int, one: ServeModeResult) -> tuple[Cell, ...]:
        return (
            word(one.mode.replace("_", " ")),
            word(one.status.replace("unlaunchable", "not launchable")),
            *(
                maybe(write, getattr(one, field), key=f"modes.{at}.{field}")
                for write, field in fields.values()
            ),
            # Options that a release refuses are listed below.
            word("" if one.status == "unlaunchable" else one.told),
        )

    order = sorted(enumerate(plan.modes), key=lambda pair: pair[1].status != "chosen")
    return Table(
        caption="Requested modes",
        header=("mode", "outcome", *fields, "why"),
        rows=tuple(row(at, one) for at, one in order),
    )


def _candidates(plan: ServePlan) -> Figure:
    rows = list(alternatives_rows(plan))
    lost = ["", *(one.lost_by for one in plan.alternatives)]
    has_cost = all(one.cost_per_hour is not None for *_, one in rows)
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
                "y": [one.tpot_s.p90],
                "marker": {
                    "color": VERMILLION if at == 0 else CYCLE[(at - 1) % len(CYCLE)],
                    "symbol": "star" if at == 0 else SYMBOLS[at % len(SYMBOLS)],
                    "size": 18 if at == 0 else 12,
                },
                "hovertext": [
                    f"{name}\n{short_serve(decision)}\nTTFT P90 "
                    f"{format_s(one.ttft_s.p90)}, TPOT P90 {format_s(one.tpot_s.p90)}"
                ],
                "hoverinfo": "text",
            }
            for at, (name, _, decision, one) in enumerate(rows)
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
                    seconds(one.ttft_s.p90, key=f"{key}.ttft_s.p90"),
                    seconds(one.tpot_s.p90, key=f"{key}.tpot_s.p90"),
                    number(one.goodput_per_device, key=f"{key}.goodput_per_device"),
                    *_cost(one, key=key, is_shown=has_cost),
                    word(short_serve(decision)),
                    word(why),
                )
                for (name, key, decision, one), why in zip(rows, lost, strict=True)
            ),
        ),
        height=380,
    )


def _cost(one: ServePrediction, *, key: str, is_shown: bool) -> Iterator[Cell]:
    if is_shown and one.cost_per_hour is not None:
        yield number(one.cost_per_hour, key=f"{key}.cost_per_hour")
