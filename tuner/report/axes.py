"""Axes and layouts that all plots share, in Plotly's terms.

Colours of text and grid are not here: page.js takes them from the page's light or dark scheme.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from tuner.units import format_s

SHORTEST_S: Final = 1e-9
LONGEST_S: Final = 1e9
"""Limits of an axis of seconds."""
NARROW_RATIO: Final = 300.0
NARROWEST_RATIO: Final = 6.0
"""Largest over smallest value of an axis; below it more ticks per decade are labelled."""


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis under its title."""
    return {"title": {"text": title, "standoff": 12}, "automargin": True, **more}


def time_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis of seconds whose ticks have a unit, e.g. `30 ms`."""
    return axis(title, tickformat="~s", ticksuffix="s", **more)


def seconds_axis(title: str, drawn_s: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis of seconds, with ticks at 1, 2 and 5 of every decade.

    Values outside the limits (a band that begins at zero) do not affect its range.
    """
    shown_s = [each for each in drawn_s if SHORTEST_S <= each <= LONGEST_S] or [1.0]
    low, high = min(shown_s) / 1.15, max(shown_s) * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0) if high / low < NARROW_RATIO else (1.0,)
    if high / low < NARROWEST_RATIO:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return axis(
        title,
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=ticks,
        ticktext=[_short(tick) for tick in ticks],
        tickangle=0,
    )


def _short(tick_s: float) -> str:
    """Format a tick without trailing zeros, e.g. `1.5 s` and `200 ms`."""
    value, _, unit = format_s(tick_s).partition(" ")
    return f"{float(value):g} {unit}"


def layout(*, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a layout with the legend above the plot, where it never covers a point."""
    return {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        **more,
    }


def limit_line(value: float, *, is_vertical: bool) -> dict[str, Any]:
    """Return a dashed line across the plot at a limit."""
    along, across = ("x", "y") if is_vertical else ("y", "x")
    return {
        "type": "line",
        f"{along}0": value,
        f"{along}1": value,
        f"{along}ref": along,
        f"{across}0": 0,
        f"{across}1": 1,
        f"{across}ref": f"{across} domain",
        "line": {"color": "ink", "width": 1.5, "dash": "dash"},
    }


def limit_text(text: str, value: float, *, is_vertical: bool) -> dict[str, Any]:
    """Return the label of a limit's line."""
    along, across = ("x", "y") if is_vertical else ("y", "x")
    return {
        "text": text,
        along: value,
        f"{along}ref": along,
        across: 1,
        f"{across}ref": f"{across} domain",
        "xanchor": "right",
        "yanchor": "top" if is_vertical else "bottom",
        "showarrow": False,
    }
