"""The style of all plots, in Plotly's terms: axes, layouts, and a colour-blind safe palette.

Colours of text and grid are not here: page.js takes them from the page's light or dark scheme.
The palette is Okabe and Ito's (https://jfly.uni-koeln.de/color/), which also differs in lightness,
for black-and-white prints. Stacked plots also use hatching.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tuner.units import format_s

ORANGE: Final = "#e69f00"
SKY: Final = "#56b4e9"
GREEN: Final = "#009e73"
YELLOW: Final = "#f0e442"
BLUE: Final = "#0072b2"
VERMILLION: Final = "#d55e00"
PURPLE: Final = "#cc79a7"
GREY: Final = "#8c959f"
"""Neutral; readable on white and on near-black."""

CYCLE: Final = (
    *(BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY),
    *("#332288", "#882255", "#999933", "#44aa99"),
)
"""Enough for the twelve largest causes of a step, so that dense and expert layers share no colour;
the last four are of Paul Tol's muted scheme (https://personal.sron.nl/~pault/)."""
HATCHING: Final = ("", "/", ".", "x", "\\", "-", "+", "|")
"""Plotly's `marker.pattern.shape`."""

SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")

DIVERGING: Final = ("#2166ac", "#f7f7f7", "#b2182b")
"""Ends and middle of ColorBrewer's RdBu (https://colorbrewer2.org), safe for the colour-blind."""


def filled(index: int) -> dict[str, object]:
    """Return Plotly's `marker` of part number `index` in a stack."""
    around = index // len(CYCLE)
    # A repeated colour gets another hatching.
    return hatched(CYCLE[index % len(CYCLE)], HATCHING[(index + 3 * around) % len(HATCHING)])


def hatched(colour: str, shape: str) -> dict[str, object]:
    """Return Plotly's `marker` of a bar: a colour with hatching."""
    return {
        "color": colour,
        "pattern": {
            "shape": shape,
            "fillmode": "overlay",
            "size": 7,
            "solidity": 0.18,
            "fgcolor": "#000000",
            "fgopacity": 0.45,
        },
        "line": {"width": 0},
    }


def second_bars(
    names: Sequence[str], series: Iterable[tuple[str, Sequence[float], str, str]]
) -> tuple[dict[str, object], ...]:
    """Return Plotly's traces of vertical bars of seconds.

    Args:
        names: of the bars.
        series: name, seconds of every bar, colour and hatching.
    """
    return tuple(
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": values,
            "marker": hatched(colour, shape),
            "hovertext": [f"{name}: {format_s(value)}" for value in values],
            "hoverinfo": "text+x",
        }
        for name, values, colour, shape in series
    )


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
