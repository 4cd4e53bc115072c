"""Loads by layer and rank, or expert: values of a heat map, and their JSON.

    L layers   G ranks   R rows and C columns drawn

A cell is a rank's load over the mean of its layer: 1 is perfect. A map with more layers or ranks
than fit is drawn in blocks, each showing its largest load, so that hot ranks stay visible; the JSON
has every number. tuner/report/heat_map_figure.py draws it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats


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
