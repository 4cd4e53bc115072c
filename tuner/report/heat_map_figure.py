"""Heat maps of loads as plots: one row per layer, one column per rank or expert.

Loads are ratios to the mean of their layer. Larger maps are drawn in blocks that show their largest
load (tuner/report/heat_map.py).
"""

from collections.abc import Iterator
from typing import Any, Final

from tuner.arrays import Floats
from tuner.report.axes import axis, layout
from tuner.report.content import Cell, Figure, Table, word
from tuner.report.heat_map import HeatMap, blocks
from tuner.report.palette import DIVERGING

MOST_CELLS: Final = 16_000
"""Cells of one panel; a dozen maps of two panels then take about 2 MB of a page."""
MOST_ROWS: Final = 128
MOST_GAPS: Final = 64
"""Most rows or columns with grid lines."""
GAP_RATIO: Final = 0.06
"""Share of a panel's width between two of them."""

HOVER: Final = "layer %{y}, ACROSS %{x}<br>%{z:.3f} of the mean<extra></extra>"
"""Plotly's template; `extra` would repeat the panel's name."""


def heat_map_figure(heat: HeatMap, *, name: str, title: str, reading: str, across: str) -> Figure:
    """Draw the panels of a heat map on one colour scale, side by side.

    Args:
        heat: the loads.
        name: of the figure.
        title: of the figure.
        reading: caption.
        across: unit of the columns, e.g. `rank`.
    """
    layers, wide = next(iter(heat.panels.values())).shape
    rows = min(layers, MOST_ROWS)
    columns = min(wide, max(1, MOST_CELLS // rows))
    is_blocked = (rows, columns) != (layers, wide)
    panels = list(enumerate(heat.panels.items()))
    most_ratio = max(1.0 + 1e-6, *(float(panel.max()) for panel in heat.panels.values()))
    return Figure(
        name=name,
        title=title,
        reading=reading
        + " White is even, red is above the layer's mean, blue below."
        + (" Blocks show their largest load." if is_blocked else ""),
        traces=tuple(
            {
                **_panel(heat, panel, rows=rows, columns=columns, most_ratio=most_ratio),
                "name": said,
                "xaxis": f"x{_suffix(place)}",
                "yaxis": f"y{_suffix(place)}",
                "showscale": place == len(panels) - 1,
                "hovertemplate": HOVER.replace("ACROSS", across),
            }
            for place, (said, panel) in panels
        ),
        layout={
            **layout(x=axis(""), y=axis("")),
            **_axes(len(panels), across=across),
            "annotations": [
                _heading(said, panel, xref=f"x{_suffix(place)} domain")
                for place, (said, panel) in panels
            ],
            "margin": {"l": 12, "r": 12, "t": 42, "b": 92},
        },
        table=_loads(heat),
        height=int(min(620, max(330, 200 + 20 * rows))),
    )


def _suffix(place: int) -> str:
    """Return Plotly's suffix of a panel's axes."""
    return "" if place == 0 else str(place + 1)


def _panel(
    heat: HeatMap, panel: Floats, *, rows: int, columns: int, most_ratio: float
) -> dict[str, Any]:
    layers, wide = panel.shape
    drawn = blocks(panel, rows, columns)
    return {
        "type": "heatmap",
        "z": [[float(f"{one:.4g}") for one in row] for row in drawn.tolist()],
        "x": [at * wide // columns for at in range(columns)],
        "y": [str(heat.layer_ids[at * layers // rows]) for at in range(rows)],
        "zmin": 0.0,
        "zmax": most_ratio,
        "colorscale": [[0.0, DIVERGING[0]], [1.0 / most_ratio, DIVERGING[1]], [1.0, DIVERGING[2]]],
        "colorbar": {
            "orientation": "h",
            "thickness": 10,
            "len": 0.5,
            "x": 0.0,
            "xanchor": "left",
            "y": 0.0,
            "yref": "container",
            "yanchor": "bottom",
        },
        "xgap": int(columns <= MOST_GAPS),
        "ygap": int(rows <= MOST_GAPS),
    }


def _axes(count: int, *, across: str) -> dict[str, Any]:
    grid = {"rows": 1, "columns": count, "pattern": "independent", "xgap": GAP_RATIO}
    axes: dict[str, Any] = {"grid": grid}
    for place in range(count):
        suffix = _suffix(place)
        axes[f"xaxis{suffix}"] = axis(across, anchor=f"y{suffix}", showgrid=False)
        axes[f"yaxis{suffix}"] = axis(
            "" if place else "layer",
            autorange="reversed",
            anchor=f"x{suffix}",
            type="category",
            showgrid=False,
            showticklabels=place == 0,
            **({"matches": "y"} if place else {}),
        )
    return axes


def _heading(said: str, panel: Floats, *, xref: str) -> dict[str, Any]:
    return {
        "text": f"{said}\nlargest {panel.max():.3f}",
        "x": 0.0,
        "xref": xref,
        "y": 1.0,
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
    }


def _loads(heat: HeatMap) -> Table:
    names = tuple(heat.panels)
    header = ("layer", *(f"{name}: {what}" for name in names for what in ("largest", "smallest")))

    def cells(place: int) -> Iterator[Cell]:
        for panel in heat.panels.values():
            for value in (float(panel[place].max()), float(panel[place].min())):
                yield Cell(text=f"{value:.3f}", value=value)

    return Table(
        caption=f"Largest and smallest load over the mean, {heat.title}",
        header=header,
        rows=tuple((word(layer), *cells(place)) for place, layer in enumerate(heat.layer_ids)),
    )
