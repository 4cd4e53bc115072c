"""Loads by layer and rank, or expert: values of a heat map, their JSON, and their plot.

    L layers   G ranks   R rows and C columns drawn

A cell is a rank's load over the mean of its layer: 1 is perfect. A map with more layers or ranks
than fit is drawn in blocks, each showing its largest load, so that hot ranks stay visible; the JSON
has every number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tuner.arrays import Floats
from tuner.report.content import Cell, Figure, Table, word
from tuner.report.plot_style import DIVERGING, axis, layout

MOST_CELLS: Final = 16_000
"""Cells of one panel; a dozen maps of two panels then take about 2 MB of a page."""
MOST_ROWS: Final = 128
MOST_GAPS: Final = 64
"""Most rows or columns with grid lines."""
GAP_RATIO: Final = 0.06
"""Share of a panel's width between two of them."""

HOVER: Final = "layer %{y}, ACROSS %{x}<br>%{z:.3f} of the mean<extra></extra>"
"""Plotly's template; `extra` would repeat the panel's name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMap:
    """Loads to be compared.

    Raises:
        ValueError: a panel has other layers.
    """

    title: str
    """Title, e.g. the workload's name."""
    layer_ids: tuple[int, ...]
    """Decoder layer of each row."""
    panels: Mapping[str, Floats]
    """Panels by name, in order: `[L][G]` loads over the layer's mean."""

    def __post_init__(self) -> None:
        if any(len(panel) != len(self.layer_ids) for panel in self.panels.values()):
            raise ValueError(f"{len(self.layer_ids)} layers; every panel needs a row for each")


def heat_map_json(heat: HeatMap) -> str:
    """Return the numbers: `title`, `layer_ids`, and by panel `load_ratio` [layers][ranks]."""
    panels = {
        name: {
            "load_ratio": [[float(f"{load:.6g}") for load in row] for row in panel.tolist()],
            "largest_ratio": float(f"{panel.max():.6g}"),
            "mean_of_largest_ratio": float(f"{panel.max(axis=1).mean():.6g}"),
        }
        for name, panel in heat.panels.items()
    }
    record = {"title": heat.title, "layer_ids": list(heat.layer_ids), "panels": panels}
    return json.dumps(record, allow_nan=False) + "\n"


def blocks(panel_LG: Floats, rows: int, columns: int) -> Floats:
    """Return the largest load of each of R x C blocks of neighbours."""
    layers, ranks = panel_LG.shape
    first_row = np.arange(rows) * layers // rows
    first_column = np.arange(columns) * ranks // columns
    by_row = np.maximum.reduceat(panel_LG, first_row, axis=0)
    blocks_RC: Floats = np.maximum.reduceat(by_row, first_column, axis=1)
    return blocks_RC


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
        "z": [[float(f"{cell:.4g}") for cell in row] for row in drawn.tolist()],
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
    suffixes = list(map(_suffix, range(count)))
    return {
        "grid": {"rows": 1, "columns": count, "pattern": "independent", "xgap": GAP_RATIO},
        **{
            f"xaxis{suffix}": axis(across, anchor=f"y{suffix}", showgrid=False)
            for suffix in suffixes
        },
        **{
            f"yaxis{suffix}": axis(
                "" if suffix else "layer",
                autorange="reversed",
                anchor=f"x{suffix}",
                type="category",
                showgrid=False,
                showticklabels=not suffix,
                **({"matches": "y"} if suffix else {}),
            )
            for suffix in suffixes
        },
    }


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

    return Table(
        caption=f"Largest and smallest load over the mean, {heat.title}",
        header=header,
        rows=tuple(
            (
                word(layer),
                *(
                    Cell(text=f"{value:.3f}", value=value)
                    for panel in heat.panels.values()
                    for value in (float(panel[place].max()), float(panel[place].min()))
                ),
            )
            for place, layer in enumerate(heat.layer_ids)
        ),
    )
