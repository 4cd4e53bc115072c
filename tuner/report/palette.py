"""A colour-blind safe palette.

Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), which also differs in lightness, for
black-and-white prints. Stacked plots also use hatching.
"""

from collections.abc import Iterable, Sequence
from typing import Final

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
