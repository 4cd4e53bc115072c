"""Axes and layouts that all plots share, in Plotly's terms.

Colours of text and grid are not here: page.js takes them from the page's light or dark scheme.
"""

from typing import Any


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis under its title."""
    return {"title": {"text": title, "standoff": 12}, "automargin": True, **more}


def time_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis of seconds whose ticks have a unit, e.g. `30 ms`."""
    return axis(title, tickformat="~s", ticksuffix="s", **more)


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
