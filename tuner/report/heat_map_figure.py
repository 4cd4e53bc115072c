"""Heat maps of loads as plots: a row a layer, a column a rank or an expert, panels side by side.

Loads are ratios to the mean of their layer. Maps of more layers or columns than a page should hold
are drawn in blocks that show their largest load (tuner/report/heat_map.py).
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from tuner.report.axes import axis, layout
from tuner.report.content import Cell, Figure, Table, word
from tuner.report.heat_map import HeatMap, blocks
from tuner.report.palette import DIVERGING

MOST_CELLS: Final = 40_000
"""Of one heat map's panel; the page shall stay small."""
MOST_ROWS: Final = 128

HOVER: Final = "layer %{y}, ACROSS %{x}<br>%{z:.3f} of the mean<extra></extra>"
"""Plotly's template; `extra` would repeat the panel's name."""


def heat_map_figure(heat: HeatMap, *, name: str, title: str, reading: str, across: str) -> Figure:
    """Draw the panels of a heat map on one colour scale, side by side.

    Args:
        heat: the loads.
        name: of the figure.
        title: of the figure.
        reading: what its loads are.
        across: what a column is, e.g. `rank`.
    """
    layers, ranks = next(iter(heat.panels.values())).shape
    rows = min(layers, MOST_ROWS)
    columns = min(ranks, max(1, MOST_CELLS // rows))
    most_ratio = max(1.0 + 1e-6, *(float(panel.max()) for panel in heat.panels.values()))
    middle = 1.0 / most_ratio
    first_layer = (np.arange(rows) * layers // rows).tolist()
    first_rank = (np.arange(columns) * ranks // columns).tolist()
    traces = []
    marks = []
    count = len(heat.panels)
    shapes: dict[str, object] = {}
    for place, (said, panel) in enumerate(heat.panels.items()):
        suffix = "" if place == 0 else str(place + 1)
        width = (1.0 - 0.06 * (count - 1)) / count
        start = place * (width + 0.06)
        shapes[f"xaxis{suffix}"] = axis(
            across,
            domain=[start, start + width],
            anchor=f"y{suffix}",
            showgrid=False,
            constrain="domain",
        )
        shapes[f"yaxis{suffix}"] = axis(
            "layer" if place == 0 else "",
            autorange="reversed",
            anchor=f"x{suffix}",
            type="category",
            showgrid=False,
            showticklabels=place == 0,
            **({"matches": "y"} if place else {}),
        )
        traces.append(
            {
                "type": "heatmap",
                "name": said,
                "z": [[float(f"{one:.4g}") for one in row] for row in blocks(panel, rows, columns)],
                "x": first_rank,
                "y": [str(heat.layer_ids[at]) for at in first_layer],
                "xaxis": f"x{suffix}",
                "yaxis": f"y{suffix}",
                "zmin": 0.0,
                "zmax": most_ratio,
                "colorscale": [[0.0, DIVERGING[0]], [middle, DIVERGING[1]], [1.0, DIVERGING[2]]],
                "showscale": place == count - 1,
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
                "hovertemplate": HOVER.replace("ACROSS", across),
                "xgap": 1 if columns <= 64 else 0,
                "ygap": 1 if rows <= 64 else 0,
            }
        )
        marks.append(
            {
                "text": f"{said}\nlargest {panel.max():.3f}",
                "x": start,
                "xref": "paper",
                "y": 1.0,
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "align": "left",
                "showarrow": False,
            }
        )
    base = layout(x=axis(""), y=axis(""))
    is_blocked = (rows, columns) != (layers, ranks)
    return Figure(
        name=name,
        title=title,
        reading=reading
        + " White is even, red is above the layer's mean, blue below."
        + (" Blocks show their largest load." if is_blocked else ""),
        traces=tuple(traces),
        layout={
            **base,
            **shapes,
            "annotations": marks,
            "margin": {"l": 12, "r": 12, "t": 42, "b": 92},
        },
        table=_loads(heat),
        height=int(min(620, max(330, 200 + 20 * rows))),
    )


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
